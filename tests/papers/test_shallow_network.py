"""A low-rank ReLU network from samples, and where the paper's Algorithm 2 ends."""

from __future__ import annotations

import json
import math
import runpy
from pathlib import Path

import pytest
import torch
from papers.lib.shallow_network import recover_weight

from snnk_peft.errors import ConfigError
from snnk_peft.functional.nonlinearity import nonlinearity
from snnk_peft.low_rank import factorize, kernel_projection, risk
from snnk_peft.low_rank.kernel_projection import nonlinearity_kernel

HAND = torch.tensor([[1.0, 0.0], [-1.0, 0.0], [0.0, 1.0]], dtype=torch.float64)  # the paper's layout, transposed


def sample(weight: torch.Tensor, count: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, weight.shape[1], generator=generator, dtype=torch.float64)
    return x, torch.relu(x @ weight.T)


def he_normal(outputs: int, inputs: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(outputs, inputs, generator=generator, dtype=torch.float64) * math.sqrt(2 / inputs)


def learned(x: torch.Tensor, y: torch.Tensor, rank: int, init: str, recovery: str = "least_squares"):
    """Factors of the weight that is recovered from samples; "kernel_projection" is Algorithm 2's way."""
    weight = recover_weight(x, y, recovery=recovery)
    if init == "kernel_projection":
        return kernel_projection(weight, rank, "relu", kernel=y.T @ y / len(y))
    made = factorize(weight, rank, init, activation="relu")
    return made.U, made.V


@pytest.mark.parametrize(("recovery", "samples"), [("least_squares", 60), ("gradient_descent", 400)])
def test_the_weight_is_recovered(recovery, samples):
    weight = he_normal(24, 16)
    found = recover_weight(*sample(weight, samples), recovery=recovery)
    torch.testing.assert_close(found, weight, rtol=0, atol=1e-9)


def test_algorithm_2_ends_above_the_svd_however_many_samples():
    """Against Theorems 2.8 and 2.10: risks 1.0249, .5 and .4414 of the hand example, whose E‖ReLU(Wx)‖² is 3/2."""
    x, y = sample(HAND, 100_000)
    found = {
        init: risk(HAND, *learned(x, y, 1, init), "relu") for init in ("kernel_projection", "spectral", "function")
    }
    exact = risk(HAND, *kernel_projection(HAND, 1), "relu")
    assert exact == pytest.approx(1.0249, abs=1e-4)
    assert found["kernel_projection"] == pytest.approx(exact, abs=0.01)
    assert found["spectral"] == pytest.approx(0.5, abs=1e-6)
    assert found["function"] == pytest.approx(0.4414, abs=1e-4)


def test_compressing_what_was_recovered_is_compressing_the_truth():
    weight = he_normal(40, 16)
    direct = factorize(weight, 4, "function", activation="relu")
    found = risk(weight, *learned(*sample(weight, 80), 4, "function"), "relu", relative=True)
    assert found == pytest.approx(direct.relative_risk, abs=1e-6)
    # Algorithm 2 with the same samples is far from it, and with the exact kernel still behind.
    printed = learned(*sample(weight, 80), 4, "kernel_projection", "gradient_descent")
    exact = risk(weight, *kernel_projection(weight, 4), "relu", relative=True)
    assert risk(weight, *printed, "relu", relative=True) > exact > direct.relative_risk + 0.01


@pytest.mark.parametrize("error", [1e-1, 1e-3, 1e-5])
def test_the_kernel_of_an_estimate_has_an_additive_bound(error):
    """Against Remark 8.17."""
    weight = he_normal(10, 6)
    estimate = weight + error * he_normal(10, 6, seed=1)
    moved, norm, own = (torch.linalg.vector_norm(w, dim=1) for w in (weight - estimate, weight, estimate))
    bound = (moved[:, None] * norm[None] + own[:, None] * moved[None]) / 2
    exact, found = (nonlinearity_kernel(nonlinearity("relu"), w) for w in (weight, estimate))
    assert ((exact - found).abs() <= bound).all()
    longer = nonlinearity_kernel(nonlinearity("relu"), (1 + error) * weight)  # where it is met, so no smaller one holds
    met = error * (2 + error) * norm.square() / 2
    torch.testing.assert_close((longer - exact).diagonal().abs(), met)


def test_faults():
    x, y = sample(he_normal(6, 16), 20)
    with pytest.raises(ConfigError, match=r"units \[.* of 20 samples; expected at least 16 each.*Give about 48"):
        recover_weight(x, y)
    with pytest.raises(
        ConfigError, match=r"2 faults:\n.*x has shape \(20, 16\) and y \(19, 6\).*\n.*recovery is 'newton'"
    ):
        recover_weight(x, y[:19], recovery="newton")
    with pytest.raises(ConfigError, match="y is negative somewhere"):
        recover_weight(x, -y)
    with pytest.raises(ConfigError, match="rank is 7; expected 1 to 4"):
        learned(*sample(he_normal(6, 4), 40), 7, "kernel_projection")


def test_the_experiment(tmp_path: Path, root: Path):
    for package in ("matplotlib", "rich"):
        pytest.importorskip(package, reason="pip install snnk-peft[recipes]")
    main = runpy.run_path(str(root / "recipes/papers/programs/low_rank_samples.py"))["main"]
    given = ["--inputs", "8", "--outputs", "16", "--rank", "2", "--teachers", "2", "--samples", "10", "400"]
    main([*given, "--output", str(tmp_path)])
    rows = {(row["method"], row["samples"]): row for row in json.loads((tmp_path / "metrics.json").read_text())["rows"]}
    assert ("function, least squares", 10) not in rows  # units are active in fewer samples than there are inputs
    assert rows["function", 400]["excess"] < 1e-6 < rows["spectral", 400]["excess"]
    assert rows["Algorithm 2", 400]["excess"] > rows["spectral", 400]["excess"]
    assert rows["function, least squares", 400]["weight_error"] < 1e-12
    assert (tmp_path / "risk.png").stat().st_size > 10_000
    with pytest.raises(SystemExit, match="2 faults:\n  - --rank is 99; expected 1 to 32"):
        main(["--rank", "99", "--teachers", "0"])
