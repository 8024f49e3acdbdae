"""attention_estimates.py: errors of attention weights, by brute force on small queries and keys."""

from __future__ import annotations

import json
import math
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from data_files import write_task
from papers.lib.estimates_page import beats
from recipe_world import RECIPES, write_world
from transformers import AutoModel, GPT2Config, GPT2Model

from snnk_peft import build_feature_map
from snnk_peft.errors import UnsupportedError
from snnk_peft.layers.kernel_attention import KernelAttention


@pytest.fixture(scope="module")
def program() -> dict[str, Any]:
    return runpy.run_path(str(RECIPES / "papers/programs/attention_estimates.py"))


def heads(program: dict[str, Any], size: float, length: int = 5, dim: int = 4) -> Any:
    """Two heads of queries and keys about so long."""
    q, k = size * torch.randn(2, 1, 2, length, dim, generator=torch.Generator().manual_seed(0))
    return program["Heads"](q, k, dim**-0.5, program["softmax"](q, k, dim**-0.5))


def by_hand(q: torch.Tensor, k: torch.Tensor) -> list[list[float]]:
    """Softmax of one head, number by number."""
    rows = []
    for one in q.tolist():
        powers = [math.exp(sum(a * b for a, b in zip(one, key, strict=True)) / len(one) ** 0.5) for key in k.tolist()]
        rows.append([power / sum(powers) for power in powers])
    return rows


def test_exact_weights_and_both_errors_by_brute_force(program: dict[str, Any]) -> None:
    """Of uniform weights: the divergence is log n − entropy, the error √(Σ (A − 1/n)²) / √(Σ A²)."""
    given = heads(program, 1.5)
    found = program["uniform"](given)
    for head in range(2):
        rows = by_hand(given.q[0, head], given.k[0, head])
        torch.testing.assert_close(given.exact[0, head], torch.tensor(rows, dtype=torch.float64), rtol=1e-6, atol=1e-9)
        entropy = [-sum(a * math.log(a) for a in row) for row in rows]
        assert float(found.divergence[head]) == pytest.approx(math.log(5) - sum(entropy) / 5, abs=1e-6)
        missing = math.sqrt(sum((a - 0.2) ** 2 for row in rows for a in row))
        assert float(found.frobenius[head]) == pytest.approx(missing / math.sqrt(sum(a * a for r in rows for a in r)))
    assert not found.negative.any()


def test_the_weights_are_those_of_the_features(program: dict[str, Any]) -> None:
    """φ = exp(ω·x − ‖x‖²/2) of √scaling q and k, products and divisions one by one."""
    given = heads(program, 1.0)
    one = build_feature_map("posrf", "orf", 4, 6, seed=3)
    found, rows = program["estimate"](KernelAttention([one], 2), given), one.projection.materialize().tolist()

    def features(x: torch.Tensor) -> list[float]:
        x = (x * 4**-0.25).tolist()
        half = sum(a * a for a in x) / 2
        return [math.exp(sum(a * b for a, b in zip(row, x, strict=True)) - half) for row in rows]

    for head in range(2):
        exact, divergence, squares, norm = by_hand(given.q[0, head], given.k[0, head]), 0.0, 0.0, 0.0
        for query, wanted in zip(given.q[0, head], exact, strict=True):
            products = [
                sum(a * b for a, b in zip(features(query), features(key), strict=True)) for key in given.k[0, head]
            ]
            got = [product / sum(products) for product in products]
            divergence += sum(a * math.log(a / b) for a, b in zip(wanted, got, strict=True)) / 5
            squares += sum((a - b) ** 2 for a, b in zip(wanted, got, strict=True))
            norm += sum(a * a for a in wanted)
        assert float(found.divergence[head]) == pytest.approx(divergence, rel=1e-3)
        assert float(found.frobenius[head]) == pytest.approx(math.sqrt(squares / norm), rel=1e-3)


def test_errors_fall_as_one_over_the_root_of_the_features(program: dict[str, Any]) -> None:
    """At small norms, where the variance is small; the divergence, of second order, falls as 1/m."""
    given, means = heads(program, 0.3, length=8), {}
    for m in (64, 1024):
        maps = [build_feature_map("posrf", "gaussian", 4, m, seed=seed) for seed in range(40)]
        found = [program["estimate"](KernelAttention([one], 2), given) for one in maps]
        means[m] = [torch.stack([each[place].mean() for each in found]).mean().item() for place in (0, 1)]
    assert means[64][0] / means[1024][0] == pytest.approx(4, rel=0.25)
    assert means[64][1] / means[1024][1] == pytest.approx(16, rel=0.4)
    assert means[1024][0] < program["uniform"](given).frobenius.mean().item()


def test_negative_weights_have_no_divergence(program: dict[str, Any]) -> None:
    given = heads(program, 2.0)
    one = build_feature_map("trigrf", "orf", 4, 4, seed=0)
    found, level = program["estimate"](KernelAttention([one], 2), given), program["uniform"](given)
    row = program["row"]("trigrf-orf", 4, [[found]], [level], 1)
    assert row["kl"] is row["kl_se"] is row["kl_by_layer"] is row["nearer"] is None
    assert row["negative"] > 0
    assert row["error"] > 0


def test_standard_errors_are_of_the_draws(program: dict[str, Any]) -> None:
    """One sentence, two layers of two heads, three draws: means by draw are 1, 2, 6, their standard error √7/√3."""

    def made(*values: float) -> Any:
        return program["Errors"](torch.tensor(values), torch.tensor(values), torch.zeros(2))

    draws = [[made(v - 0.5, v + 0.5), made(v - 1, v + 1)] for v in (1.0, 2.0, 6.0)]
    level = [made(1.0, 1.0), made(2.0, 2.0)]
    row = program["row"]("map", 8, draws, level, 2)
    assert (row["error"], row["kl"], row["draws"]) == (3.0, 3.0, 3)
    assert row["kl_se"] == row["error_se"] == pytest.approx(math.sqrt(7 / 3))
    assert row["nearer"] == pytest.approx(3 / 12)  # 0.5 and 0 of the first draw, 1 of the second
    # Other values per layer, and a second sentence: its layers follow those of the first.
    row = program["row"]("map", 8, [[made(1.0, 1.0), made(2.0, 4.0), made(3.0, 5.0), made(6.0, 6.0)]], level * 2, 2)
    assert row["kl_by_layer"] == [2.5, 4.5]
    assert row["error_se"] is None


def test_a_whole_run_and_its_page_again(program: dict[str, Any], tmp_path: Path) -> None:
    """On a BERT whose heads are made sharp: calibration is nearer than uniform attention, and `--render` repeats it."""
    write_world(tmp_path)
    write_task(tmp_path / "glue", "sst2", n_train=60, n_dev=10)
    folder, out = tmp_path / "bert", tmp_path / "out"

    model = AutoModel.from_pretrained(folder)
    with torch.no_grad():
        for layer in model.encoder.layer:
            layer.attention.self.query.weight *= 20
            layer.attention.self.key.weight *= 20
    model.save_pretrained(folder)
    given = ["--model", str(folder), "--data", str(tmp_path / "glue"), "--pairs", "posrf-orf", "posrf-sgq"]
    given += ["--features", "8", "16", "--fitted", "16", "--steps", "0", "--sentences", "3", "--calibration", "20"]
    assert program["main"]([*given, "--draws", "2", "--output", str(out)]) == 0
    figures = json.loads((out / "metrics.json").read_text())
    rows = {(each["map"], each["features"]): each for each in figures["rows"]}
    assert list(rows) == [
        ("uniform", None),
        *(("posrf-orf", m) for m in (8, 16)),
        ("posrf-sgq", 33),
        ("centroids", 16),
    ]
    assert (figures["layers"], figures["heads"], figures["head_dim"], len(figures["tokens"])) == (2, 2, 16, 3)
    assert rows["centroids", 16]["kl"] < rows["uniform", None]["kl"]
    assert rows["posrf-orf", 16]["kl"] > 0
    assert str(tmp_path) not in (out / "metrics.json").read_text()
    page, picture = (out / "README.md").read_text(), (out / "error.png").read_bytes()
    assert f"{rows['centroids', 16]['kl']:.3f} | 16 |" in page
    assert "posrf-sgq (33)" in page
    assert "Layer by layer" not in page
    for name in ("README.md", "error.png"):
        (out / name).unlink()
    assert program["main"](["--render", "--output", str(out)]) == 0
    assert ((out / "README.md").read_text(), (out / "error.png").read_bytes()) == (page, picture)


def test_the_stored_page_is_that_of_the_stored_figures(program: dict[str, Any]) -> None:
    stored = program["RESULTS"]
    figures = json.loads((stored / "metrics.json").read_text())
    assert (stored / "README.md").read_text() == program["render"](figures)
    maps = {each["map"] for each in figures["rows"]}
    assert {"-".join(pair) for pair in program["PAIRS"]} | {"uniform", "centroids"} <= maps
    level = figures["rows"][0]["kl_by_layer"]
    assert f"| uniform | {' | '.join(f'{value:.3f}' for value in level)} |" in (stored / "README.md").read_text()
    assert sum(level) / len(level) == pytest.approx(figures["rows"][0]["kl"])
    assert all(each["draws"] >= 3 for each in figures["rows"] if each["map"] != "uniform")


def test_from_how_many_features_a_map_is_better_than_none() -> None:
    rows = [{"map": "uniform", "features": None, "kl": 1.0}]
    rows += [{"map": "a", "features": m, "kl": kl} for m, kl in ((64, 1.2), (1024, 0.9), (2048, 0.7))]
    rows += [{"map": "b", "features": 64, "kl": 1.0}, {"map": "c", "features": 64, "kl": None}]
    said = [beats({"rows": rows}, name, "kl") for name in "abc"]
    assert said == ["1,024", "none up to 64", "no divergence"]


def test_faults(program: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--features", "0", "--draws", "1", "--steps", "-1", "--output", str(tmp_path)]
    assert program["main"](given) == 2
    said = capsys.readouterr().err
    assert "--features has 0; expected at least 1" in said
    assert "--draws is 1; expected at least 2" in said
    assert "--steps is -1; expected at least 0" in said
    assert program["main"](["--model", str(tmp_path / "absent"), "--output", str(tmp_path)]) == 2
    assert "--model is" in capsys.readouterr().err
    assert program["main"](["--render", "--output", str(tmp_path)]) == 2
    assert "metrics.json: cannot be read" in capsys.readouterr().err


def test_causal_models_are_refused(program: dict[str, Any]) -> None:
    model = GPT2Model(GPT2Config(n_embd=8, n_layer=1, n_head=2, vocab_size=20, n_positions=8)).eval()
    ids = torch.arange(5)[None]
    with pytest.raises(UnsupportedError, match="GPT2Model attends to earlier tokens only; expected an encoder"):
        program["heard"](model, [{"input_ids": ids, "attention_mask": torch.ones_like(ids)}])
