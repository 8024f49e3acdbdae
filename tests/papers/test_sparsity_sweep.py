"""Sums over pairs: tasks of other lengths, the end of a run at a score, the study sparsity and its page."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from data import TASKS
from papers import study
from papers.lib.lra_settings import LongRangeConfig
from papers.lib.study import load
from papers.pages import sparsity as sparsity_page
from papers.programs import train_lra
from recipe_world import RECIPES, reset_accelerate

from snnk_cli.config import load_config
from snnk_peft.errors import ConfigError

CONFIG = str(RECIPES / "papers/configs/lra/sparsity.yaml")
SMALL = ["model.dim=8", "model.heads=2", "model.layers=1", "model.hidden_dim=8", "train.batch_size=6"]
SMALL += [f"data.max_{split}_samples=18" for split in ("train", "validation", "test")]


# --- other lengths ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("percent", "length"), [(10, 50), (50, 12), (90, 300)])
def test_sequences_are_made_and_not_cut(percent: int, length: int) -> None:
    """Their labels are the sums of all their pairs, as a cut sequence's are not; no prefix leaves −4 to 4."""
    task = TASKS[f"sparsity_{percent}"]
    made = task.of_length(length)
    assert (made.name, made.max_length) == (task.name, length)
    assert task.of_length(200) is task.of_length(None) is task
    rows = made.load(splits=["validation"], max_samples={"validation": 180})["validation"]
    assert np.bincount(rows.labels).tolist() == [20] * 9
    tokens = np.stack(rows.tokens[0]).astype(int) - 1
    assert tokens.shape == (180, length)
    sums = np.cumsum(np.where(tokens // 2 == 1, 1, -1) * (tokens % 2), 1)
    assert np.array_equal(sums[:, -1] + 4, rows.labels)
    assert np.abs(sums).max() == 4


def test_too_few_pairs_are_refused() -> None:
    said = r"39 positions, of which 3\.9 are relevant on average; .* 40 positions or more"
    with pytest.raises(ConfigError, match=said):
        TASKS["sparsity_10"].of_length(39)
    with pytest.raises(ConfigError, match=said):
        load_config(LongRangeConfig, {"task": "sparsity_10", "data": {"max_length": 39}, "output": {"dir": "x"}})
    assert TASKS["listops"].of_length(39) is TASKS["listops"]  # which is cut


# --- runs and page ----------------------------------------------------------------------------------------------------


def test_a_run_ends_at_its_score(tmp_path: Path) -> None:
    """No accuracy is below 0: the first evaluation ends the run; none is above 1: the last step does."""
    for name, wanted, steps in (("at_once", 0, 2), ("never", 1.01, 6)):
        reset_accelerate()
        given = ["data.max_length=12", "train.steps=6", "train.eval_every=2", f"train.stop_at_score={wanted}"]
        assert train_lra.main([CONFIG, *SMALL, *given, f"output.dir={tmp_path / name}"]) == 0
        report = json.loads((tmp_path / name / "metrics.json").read_text())
        assert (report["steps"], report["stopped_early"]) == (steps, steps < 6)
        rows = [json.loads(line) for line in (tmp_path / name / "log.jsonl").read_text().splitlines()]
        scored = {row["step"]: row["score"] for row in rows if "score" in row}
        assert dict(report["learning_curve"]) == scored
        assert list(scored) == list(range(2, steps + 1, 2))
        assert report["longest_sequence"] == 12


def test_models_of_every_method_have_the_papers_size() -> None:
    for task in load("sparsity").tasks.values():
        models = [load_config(LongRangeConfig, task.config, settings).model for settings in task.methods.values()]
        assert {(model.dim, model.layers) for model in models} == {(64, 3)}


@pytest.mark.usefixtures("called")
def test_from_runs_to_the_page(tmp_path: Path) -> None:
    out, page = tmp_path / "runs", tmp_path / "page"
    given = [*SMALL, "train.steps=4", "train.eval_every=2", "--out", str(out), "--methods", "posrf_gmm"]
    assert study.main(["run", "sparsity", *given, "--tasks", "sparsity_10", "sparsity_90"]) == 0
    assert study.main(["page", "sparsity", "--runs", str(out), "--out", str(page)]) == 0
    text = (page / "README.md").read_text()
    assert "| attention | 10 % relevant | 90 % relevant |" in text
    assert "| posrf_gmm | not in 4 (1) | not in 4 (1) |" in text
    assert "All runs: 100 pairs, batches of 6, learning rate 0.0005, at most 4 steps, scored every 2." in text
    assert str(tmp_path) not in text
    assert (page / "accuracy.png").stat().st_size > 10_000


def report(*curve: float, **train: Any) -> dict[str, Any]:
    """Of a run that was scored every 10 steps."""
    settings = {"batch_size": 5, "learning_rate": 0.1, "steps": 90, "eval_every": 10, **train}
    return {
        **{"longest_sequence": 50, "config": {"train": settings}, "steps": 10 * len(curve), "accuracy": curve[-1]},
        **{"cpu_seconds_per_step": 0.5, "train_cpu_seconds": 60.0, "total_parameters": 1234},
        "learning_curve": [[10 * number, accuracy] for number, accuracy in enumerate(curve, start=1)],
    }


def test_steps_are_those_of_the_first_median() -> None:
    """Medians are 0.6, 0.85, 0.93, 0.95, 0.99 and 0.1, 0.6, 0.7, 0.7, 0.96; the single 0.9 counts for nothing."""
    cell = [report(0.6, 0.85, 0.95, 0.93, 0.99), report(0.1, 0.9, 0.6, 0.7, 0.96)]
    assert [sparsity_page.steps_to(cell[0], level) for level in sparsity_page.LEVELS] == [10, 30, 50]
    assert [sparsity_page.steps_to(cell[1], level) for level in sparsity_page.LEVELS] == [20, 50, None]
    found = [sparsity_page.steps(cell, level) for level in sparsity_page.LEVELS]
    assert found == ["15 ± 5 (2)", "40 ± 10 (2)", "50 (1 of 2)"]
    cell = [report(0.6, 0.95, 0.85, 1.0), report(0.5, 0.8, 0.9)]
    assert sparsity_page.steps([report(0.1, 0.2)], 0.5) == "not in 20 (1)"
    assert sparsity_page.steps([], 0.5) == "–"
    points = sparsity_page.curve(cell)
    assert [point[0] for point in points] == [10, 20, 30, 40]
    assert points[3][1] == pytest.approx((1.0 + 0.9) / 2)  # the second run has ended
    assert points[3][2] == pytest.approx(0.05)
    text = sparsity_page.render({"sparsity_50": {"softmax": cell, "posrf_gmm": [report(0.1, steps=80)]}})
    assert "**The runs differ (50 pairs, batches of 5, learning rate 0.1, at most 80 steps" in text
    assert "| softmax | 0.500 | 1.0 | 95.0 | 1,234 |" in text
