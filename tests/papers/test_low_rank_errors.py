"""Errors of low-rank starts against accuracy: the errors, their correlations, the experiment and the page.

Oracles: singular values, a plain SVD beside a Monte Carlo mean, correlations by hand and by scipy, a run's own report.
"""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

import image_layouts
import numpy as np
import pytest
import torch
from papers import study
from papers.lib.cifar_resnet import CifarResNet
from papers.lib.lowrank_model import init_errors, low_rank_model, rebuilt_errors
from papers.lib.lowrank_settings import LowRankConfig, LowRankMethod
from papers.lib.start_errors import rank_correlation
from papers.programs import train_lowrank
from recipe_world import RECIPES, InterruptedRun, at_step, die, reset_accelerate
from scipy.stats import spearmanr

from snnk_cli.config import load_config
from tests.stored_runs import put_run

PART = {"targets": "layer*", "kind": "conv", "rank_scale": 0.2}


def start(**changes: Any) -> tuple[CifarResNet, dict[str, float]]:
    """A dense ResNet-8, and the errors of a low-rank copy's start."""
    torch.manual_seed(0)
    dense = CifarResNet(8)
    torch.manual_seed(0)
    return dense, init_errors(low_rank_model(CifarResNet(8), LowRankMethod({**PART, **changes}), seed=0)[0])


@pytest.mark.parametrize("split", ["channel", "spatial"])
def test_without_activation_the_svd_misses_the_discarded_singular_values(split: str) -> None:
    """E‖(W' − W)x‖² = ‖W' − W‖², whatever the shape in which the kernel is cut."""
    dense, errors = start(init="spectral", split=split, activation="identity")
    assert len(errors) == 6
    for path, error in errors.items():
        kernel = dense.get_submodule(path).weight.detach().double()
        matrix = kernel.flatten(1) if split == "channel" else kernel.permute(0, 3, 1, 2).flatten(0, 1).flatten(1)
        values = torch.linalg.svdvals(matrix).square()
        rank = max(1, round(0.2 * len(values)))
        assert error == pytest.approx(float(values[rank:].sum() / values.sum()), rel=1e-4), path


def test_behind_relu_it_is_the_mean_over_patches() -> None:
    dense, errors = start(init="spectral", split="channel", activation="relu")
    path = "layer2.0.conv1"
    weight = dense.get_submodule(path).weight.detach().double().flatten(1)
    left, values, right = torch.linalg.svd(weight, full_matrices=False)
    rank = round(0.2 * len(values))
    product = left[:, :rank] * values[:rank] @ right[:rank]
    x = torch.randn(20_000, weight.shape[1], generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    wanted = torch.relu(x @ weight.T)
    # The ratio of two means: its deviation is that of (missed − ratio · energy) over the mean energy.
    missed, energy = (torch.relu(x @ product.T) - wanted).square().sum(1), wanted.square().sum(1)
    estimate = float(missed.mean() / energy.mean())
    error = float((missed - estimate * energy).std() / energy.mean() / len(x) ** 0.5)
    assert abs(errors[path] - estimate) < 5 * error < 0.02
    # Behind the activation `function` is at least as near as the SVD everywhere, and drawn factors are far away.
    _, best = start(init="function", split="channel", activation="relu")
    _, drawn = start(init="baseline", split="channel", activation="relu")
    assert all(best[path] < errors[path] < drawn[path] for path in errors)


def test_a_start_is_found_again_from_its_settings_even_for_a_continued_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The report of a run, of one that was stopped and continued, and the start built again: all the same."""
    drawn = image_layouts.draw(("train", "test"), 10, per_class=2)
    data = image_layouts.cifar10_binary(tmp_path / "cifar", drawn)
    part = "{targets: layer*, kind: conv, init: spectral, activation: relu, split: channel, frobenius_decay: 0.01}"
    given = [
        *("task=cifar10", f"data.dir={data}", "train.device=cpu", "train.epochs=2", "train.batch_size=8"),
        *("train.seed=3", f"method.low_rank={part}", "train.learning_rate=0.02", "train.save_every_steps=1"),
    ]
    file = tmp_path / "empty.yaml"
    file.write_text("{}")
    assert train_lowrank.main([str(file), *given, f"output.dir={tmp_path / 'straight'}"]) == 0
    reset_accelerate()
    with monkeypatch.context() as patched:
        at_step(patched, 4, die)
        with pytest.raises(InterruptedRun):
            train_lowrank.main([str(file), *given, f"output.dir={tmp_path / 'run'}"])
    reset_accelerate()
    assert train_lowrank.main([str(file), *given, f"output.dir={tmp_path / 'run'}", "--resume"]) == 0
    reset_accelerate()
    reports = [json.loads((tmp_path / name / "metrics.json").read_text()) for name in ("straight", "run")]
    before = torch.random.get_rng_state()
    built = rebuilt_errors(load_config(LowRankConfig, {**reports[0]["config"], "output": {"dir": "x"}}))
    assert torch.equal(torch.random.get_rng_state(), before)
    assert reports[0]["init_errors"] == reports[1]["init_errors"] == built
    assert reports[0]["init_error"] == pytest.approx(np.mean(list(built.values())))
    others = rebuilt_errors(
        load_config(LowRankConfig, {**reports[0]["config"], "output": {"dir": "x"}}, ["train.seed=4"])
    )
    assert others != built


# --- correlations -----------------------------------------------------------------------------------------------------


def test_the_correlation_is_spearmans_and_its_interval_that_of_theory() -> None:
    generator = np.random.default_rng(0)
    x = generator.normal(size=300)
    y = 0.5 * x + np.sqrt(0.75) * generator.normal(size=300)
    found = rank_correlation([list(zip(x, y, strict=True))])
    assert found is not None
    assert found.value == pytest.approx(spearmanr(x, y)[0])
    # Standard error of Spearman's r by Bonett and Wright (2000): √(1 + r²/2) / √(n − 3) in Fisher's z.
    z, half = np.arctanh(found.value), 1.96 * np.sqrt((1 + found.value**2 / 2) / 297)
    np.testing.assert_allclose([found.low, found.high], np.tanh([z - half, z + half]), atol=0.03)


def test_groups_count_alone() -> None:
    """Inside both groups the order is reversed, together it is not; constants and pairs say nothing."""
    low, high = [(0, 3), (1, 2), (2, 1)], [(10, 13), (11, 12), (12, 11.0)]
    together = rank_correlation([low + high])
    assert together is not None
    assert together.value == pytest.approx(spearmanr(*zip(*low, *high, strict=True))[0])
    assert together.value > 0
    within = rank_correlation([low, high, [(1, 1), (2, 2)], [(1, 1), (1, 2), (1, 3)]])
    assert within is not None
    assert (within.value, within.points, within.groups) == (pytest.approx(-1.0), 6, 2)
    assert within.low == pytest.approx(-1.0)
    assert rank_correlation([[(1, 1), (2, 2)]]) is None


# --- experiment and page ----------------------------------------------------------------------------------------------


def store(root: Path, method: str, part: dict[str, Any] | None, scores: list[float], **extra: Any) -> None:
    for seed, score in enumerate(scores):
        put_run(root, "cifar10", method, seed, {
            "task": "cifar10", "score": score, "seed": seed, "total_parameters": 1000, "init_seconds": 0.5,
            "examples": {"train": 10, "test": 400}, "device": "cpu", "environment": {"torch_threads": 1},
            "config": {
                "task": "cifar10", "method": {"low_rank": part}, "train": {"epochs": 3, "seed": seed},
                "model": {"name_or_path": "resnet20", "weights": None},
            },
            **extra,
        })  # fmt: skip


def test_from_stored_runs_to_errors_and_the_page(tmp_path: Path) -> None:
    runs, out = tmp_path / "stored", tmp_path / "errors"
    common = {"targets": "layer1*", "kind": "conv", "split": "channel", "activation": "identity", "rank_scale": 0.2}
    store(runs, "spectral_0.2", {**common, "init": "spectral"}, [0.60, 0.62, 0.64])
    store(runs, "spectral_0.2_frobenius", {**common, "init": "spectral", "frobenius_decay": 0.01}, [0.61, 0.64, 0.67])
    store(runs, "baseline_0.2", {**common, "init": "baseline"}, [0.50, 0.51, 0.52])
    store(runs, "ws_nkp_0.2", {**common, "init": "ws_nkp"}, [0.65, 0.68, 0.68], init_error=0.25)
    store(runs, "dense", None, [0.7])
    main = runpy.run_path(str(RECIPES / "papers/programs/low_rank_errors.py"))["main"]
    main(["--runs", str(runs), "--output", str(out)])
    figures = json.loads((out / "metrics.json").read_text())
    assert figures["settings"] == {"runs": 12, "starts": 9}  # decay changes no start
    rows = {(row["method"], row["seed"]): row for row in figures["rows"]}
    assert rows["ws_nkp_0.2", 0]["error"] == 0.25  # known already
    assert rows["spectral_0.2", 1]["error"] == rows["spectral_0.2_frobenius", 1]["error"]
    torch.manual_seed(1)
    dense, expected = CifarResNet(20), []
    for number in range(3):
        for name in ("conv1", "conv2"):
            values = torch.linalg.svdvals(dense.layer1[number].get_submodule(name).weight.detach().flatten(1).double())
            expected.append(float(values[3:].square().sum() / values.square().sum()))
    assert rows["spectral_0.2", 1]["error"] == pytest.approx(np.mean(expected), rel=1e-4)
    found = figures["correlations"]["cifar10"]
    points = [(row["error"], row["score"]) for row in rows.values()]
    assert found["all runs"]["value"] == pytest.approx(spearmanr(*zip(*points, strict=True))[0])
    assert -1 <= found["all runs"]["low"] < found["all runs"]["value"] < found["all runs"]["high"] < 0
    assert (out / "error.png").stat().st_size > 10_000

    page = ["--runs", str(tmp_path / "none"), "--out", str(runs), "--errors", str(out / "metrics.json")]
    assert study.main(["page", "lowrank", *page]) == 0
    lines = (runs / "README.md").read_text().splitlines()
    # ws_nkp minus spectral, weight decay: 5, 6, 4; Student's t of two degrees of freedom is 4.30.
    assert "| ws_nkp above spectral | +5.0 ± 0.6 (3) | holds |" in lines
    assert "| ws_nkp above baseline | +16.0 ± 0.6 (3) | holds |" in lines
    assert "| Frobenius decay above weight decay at 0.2 | +2.0 ± 0.6 (3) | not decided |" in lines  # 1, 2, 3
    assert "| ws_nkp | 0.250 |" in lines
    assert any(line.startswith(f"- all runs: {found['all runs']['value']:+.2f} (") for line in lines)
    assert (runs / "cifar10_error.png").stat().st_size > 10_000
    # Without errors, the page is there and has no such section.
    assert study.main(["page", "lowrank", *page[:-1], str(tmp_path / "nothing.json")]) == 0
    assert "| ws_nkp | 0.250 |" in (runs / "README.md").read_text()  # that of the report itself
    with pytest.raises(
        SystemExit, match=r"no reports in .*nowhere.jsonl .*; start: python recipes/papers/study.py run lowrank"
    ):
        main(["--runs", str(tmp_path / "nowhere"), "--output", str(out)])
