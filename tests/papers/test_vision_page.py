"""The page of the study vision shows what is stored, and what is stored are runs of the study."""

from __future__ import annotations

from pathlib import Path

from papers import study
from papers.lib.reports import read_reports
from papers.lib.study import load

from tests.stored_runs import put_figures, report


def test_the_page_shows_what_is_stored(tmp_path: Path, root: Path) -> None:
    for method, scores in {"lora_r4": [0.8, 0.9], "full": [0.95]}.items():
        for seed, score in enumerate(scores):
            sizes = {"trainable_parameters": 7, "trainable_parameters_without_classifier": 5}
            config = {"model": {"name_or_path": "vit"}, "train": {"epochs": 3, "eval_every": "end"}}
            examples = {"train": 10, "test": 50}
            figures = report(score=score, seconds_per_epoch=2.0 - seed, examples=examples, config=config, **sizes)
            put_figures(tmp_path / "runs/digits" / method / f"seed{seed}/metrics.json", figures)
    assert study.main(["page", "vision", "--runs", str(tmp_path / "runs"), "--out", str(tmp_path / "out")]) == 0
    lines = (tmp_path / "out/README.md").read_text().splitlines()
    rows = [line for line in lines if line.startswith(("| full", "| lora"))]
    assert rows == [
        "| full | 95.0 | 95.0 | 7 | 5 | 10 | 3 | at end | 2.0 |",
        "| lora_r4 | 85.0 ± 7.1 (2) | 80.0, 90.0 | 7 | 5 | 10 | 3 | at end | 1.0 |",
    ]
    assert (tmp_path / "out/digits.png").stat().st_size > 1000


def test_stored_runs_are_of_methods_of_the_study(root: Path) -> None:
    table = read_reports(root / "model_cards/vision", "vision")
    assert all(row.keys() <= load("vision").tasks["digits"].methods.keys() for row in table.values())
