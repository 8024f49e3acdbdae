"""parameter_tables.py counts as formulas written out here do; pointwise.py measures the errors of theory."""

from __future__ import annotations

import json
import math
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch

d, DEPTH, M = 768, 12, 8
TEXTS, LENGTH = 64, 128
HEAD = (d * d + d) + (2 * d + 2)
LAYER = 4 * (d * d + d) + (d * 4 * d + 4 * d) + (4 * d * d + d) + 2 * 2 * d
BERT = (30522 + 512 + 2) * d + 2 * d + DEPTH * LAYER + HEAD
MACS = TEXTS * (LENGTH * DEPTH * (12 * d * d + 2 * LENGTH * d) + d * d + 2 * d)


@pytest.fixture(scope="module")
def program() -> dict[str, Any]:
    return runpy.run_path(str(Path(__file__).resolve().parents[2] / "recipes/papers/programs/parameter_tables.py"))


@pytest.fixture(scope="module")
def folder(program: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("tables")
    given = ["--models", "BERT-base", "--layers", "0", "2", "12", "--output", str(out)]
    assert program["main"](given) == 0
    return out


@pytest.fixture(scope="module")
def figures(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "metrics.json").read_text())


def test_uptraining(figures: dict[str, Any]) -> None:
    """An expansion of 4d² + 4d numbers becomes 4d·m + 4d; the pair, bundled, d·m + d; a product per token each."""
    assert [row["k"] for row in figures["uptraining"]] == [0, 2, 12]
    for row in figures["uptraining"]:
        k = row["k"]
        assert row["training"] == BERT - k * (4 * d * d + 4 * d) + k * (4 * d * M + 4 * d)
        assert row["bundled"] == BERT - k * (4 * d * d + 4 * d + 4 * d * d + d) + k * (d * M + d)
        assert row["training_macs"] == MACS - k * TEXTS * LENGTH * (4 * d * d - M * (d + 4 * d))
        assert row["bundled_macs"] == MACS - k * TEXTS * LENGTH * (8 * d * d - 2 * M * d)
        # W with a bias per feature is kept beside the parameters, as are two rows of positions, of 8 bytes each.
        assert row["bundled_bytes"] == 4 * (row["bundled"] + k * M * (d + 1)) + 2 * 512 * 8
    assert figures["uptraining"][1]["printed"] == {
        "training": 100,
        "bundled": 97,
        "training_macs": 678,
        "bundled_macs": 639,
    }
    assert figures["uptraining"][0]["printed"]["bundled_mb"] == 440
    assert figures["uptraining"][2]["printed"] == {}


def test_adapters_and_heads(figures: dict[str, Any]) -> None:
    paper, default = figures["adapters"]
    assert (paper["trained"], default["trained"]) == (2 * DEPTH * d * (16 + 1), 2 * DEPTH * d * 16)
    assert paper["full_macs"] == MACS
    assert paper["macs"] == MACS + TEXTS * LENGTH * 2 * DEPTH * 2 * d * 16
    numbers = [row["numbers"] for row in figures["poolers"]]
    assert numbers == [HEAD, 2 * d + 2, 1024 * d + d + 2 * d + 2, 1024 * 2 + 2]


def test_printed_figures_are_those_of_the_paper(program: dict[str, Any]) -> None:
    """Its columns of parameters fall by a whole layer of 7.1 million per step, those of products as they must."""
    for columns in program["PRINTED"].values():
        assert all(len(column) == 7 for column in columns.values())
        for first, second in zip(columns["training"][1:], columns["training"][2:], strict=False):
            assert first - second in (7, 8)
    for k in range(7):
        found = MACS - k * TEXTS * LENGTH * (8 * d * d - 2 * M * d)
        assert program["PRINTED"]["BERT-base"]["bundled_macs"][k] == pytest.approx(found / 1e9, abs=1.5)


def test_the_page(program: dict[str, Any], folder: Path, figures: dict[str, Any]) -> None:
    page = (folder / "README.md").read_text()
    assert page == program["render"](figures)
    assert "| 2 | 104.8 (100) | 100.1 (97) | 400." in page
    assert "592,130 | ∼59k" in page
    (folder / "README.md").unlink()
    assert program["main"](["--render", "--output", str(folder)]) == 0
    assert (folder / "README.md").read_text() == page


def test_the_stored_page_is_that_of_the_stored_figures(program: dict[str, Any]) -> None:
    figures = json.loads((program["RESULTS"] / "metrics.json").read_text())
    assert (program["RESULTS"] / "README.md").read_text() == program["render"](figures)
    rows = {(row["model"], row["k"]): row for row in figures["uptraining"]}
    assert set(rows) == {(model, k) for model in ("BERT-base", "ViT-base") for k in (0, 1, 2, 3, 4, 5, 6, 12)}
    assert rows["BERT-base", 6]["bundled"] == pytest.approx(81.2e6, rel=1e-3)


def test_faults_of_counts(program: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert program["main"](["--layers", "13", "--features", "0", "--output", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert "--layers has 13; expected 0 to 12" in said
    assert "--features is 0; expected at least 1" in said


DRAWS = 200


def test_errors_are_those_of_theory(tmp_path: Path, root: Path) -> None:
    """Unbiased, and the spread of the arc-cosine layer is √((½ K₂)/(½ K₁)² − 1)/√p, from Cho and Saul's kernels."""
    main = runpy.run_path(str(root / "recipes/papers/programs/pointwise.py"))["main"]
    main(["--inputs", "60", "--projections", "16", "64", "--draws", str(DRAWS), "--output", str(tmp_path)])
    rows = {(r["layer"], r["projections"]): r for r in json.loads((tmp_path / "metrics.json").read_text())["rows"]}
    assert len(rows) == 4
    assert all(r["error of the mean"] < 5 * r["standard error of the mean"] for r in rows.values())
    w, x = torch.rand(2, 60, generator=torch.Generator().manual_seed(0), dtype=torch.float64) / 60**0.5
    t = math.acos(float(w @ x / (w.norm() * x.norm())))
    first = math.sin(t) + (math.pi - t) * math.cos(t)
    second = 3 * math.sin(t) * math.cos(t) + (math.pi - t) * (1 + 2 * math.cos(t) ** 2)
    for p in (16, 64):
        spread = math.sqrt((2 * math.pi * second / first**2 - 1) / p)
        found = rows["arc-cosine layer, relu", p]["standard error of the mean"] * DRAWS**0.5
        assert found == pytest.approx(spread, rel=0.3)
        sine = rows["sine layer, urf", p]["standard error of the mean"] * DRAWS**0.5
        # At the best scale the second moment is at most e^{2‖w‖‖x‖} (the sine of one atom).
        assert 0 < sine < math.sqrt(math.exp(2 * float(w.norm() * x.norm())) / p) / float(torch.sin(w @ x + 0.5))
    assert (tmp_path / "error.png").stat().st_size > 10_000


def test_faults(root: Path) -> None:
    main = runpy.run_path(str(root / "recipes/papers/programs/pointwise.py"))["main"]
    with pytest.raises(SystemExit, match="2 faults:\n  - --projections has 0; expected at least 1\n  - --draws is 1"):
        main(["--projections", "0", "8", "--draws", "1"])
