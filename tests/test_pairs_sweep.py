"""recipes/sweep_pairs.py: all pairs of the paper at equal processor time, on short whole expressions."""

# Imports follow the check that the optional packages are there, and the recipes' folder on sys.path.
# ruff: noqa: E402

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

for package in ("matplotlib", "rich"):
    pytest.importorskip(package, reason="pip install snnk-peft[recipes]")

sys.path.append(str(Path(__file__).resolve().parent.parent / "recipes"))

import sweep_pairs
import table_lra
from _lib import short_listops

from snnk_peft.tasks.listops import write_listops

FEW = {"train": 64, "validation": 16, "test": 16}


def test_the_pairs_are_those_of_table_2() -> None:
    components, matrices = ("posrf", "oprf", "saderf"), ("orf", "sorf", "qmc", "mm", "sgq", "fastfood_learned")
    pairs = {f"{component}_{matrix}" for component in components for matrix in matrices}
    assert len(pairs) == 18
    assert set(sweep_pairs.METHODS) - {"performer_pytorch"} == {"softmax", *pairs}
    for task in sweep_pairs.TASKS.values():
        budgets = {tuple(each for each in own if "max_cpu_minutes" in each) for own in task.methods.values()}
        assert len(budgets) == 1


def test_from_expressions_to_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    """Expressions are written once and whole; without its files Text is left out; the page has what has run."""
    written: list[Path] = []

    def few(place: Path, **bounds: int) -> None:
        written.append(place)
        write_listops(place, FEW, **bounds)

    monkeypatch.setattr("snnk_peft.tasks.listops.write_listops", few)
    runs, cards = tmp_path / "runs", tmp_path / "cards"
    settings = ["train.steps=2", "train.eval_every=2", "model.dim=8", "model.hidden_dim=8", "train.device=cpu"]
    given = ["--methods", "posrf_mm", "saderf_orf", "--seeds", "0", "--out", str(runs)]
    assert sweep_pairs.main([*settings, *given]) == 0
    assert "text is left out" in capsys.readouterr().out
    assert sweep_pairs.main([*settings, *given]) == 0
    assert len(written) == 1
    low, high = short_listops.BOUNDS.values()
    lengths = [len(row.split("\t")[0].split()) for row in _rows(runs / "listops_files")]
    assert lengths
    assert low <= min(lengths)
    assert max(lengths) <= high
    report = json.loads((runs / "listops/posrf_mm/seed0/metrics.json").read_text())
    assert report["config"]["data"]["max_length"] == high
    assert table_lra.main(["--runs", str(runs), "--out", str(cards)]) == 0
    page = (cards / "README.md").read_text()
    assert "| posrf_mm | 1 |" in page
    assert "PosRF-MM against SADERF-ORF" in page


def _rows(folder: Path) -> list[str]:
    return [line for file in folder.glob("*.tsv") for line in file.read_text().splitlines()[1:]]
