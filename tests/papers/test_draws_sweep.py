"""The study draws and its page: models of several seeds, each scored on fresh draws of its features."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from papers import study
from papers.lib import sweep
from papers.pages import draws as draws_page

from tests.stored_runs import stored

SMALL = ["model.dim=8", "model.heads=2", "model.layers=1", "model.hidden_dim=8", "train.batch_size=6"]
SMALL += [f"data.max_{split}_samples=18" for split in ("train", "validation", "test")]
SMALL += ["train.steps=2", "train.eval_every=2"]


def test_from_runs_to_the_page(tmp_path: Path, called: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    out, page = tmp_path / "runs", tmp_path / "page"
    given = [*SMALL, "--out", str(out), "--methods", "trigrf_gmm"]
    assert study.main(["run", "draws", *given, "--seeds", "0", "1", "--draws", "3"]) == 0
    assert called == ["train_lra", "score"] * 2
    assert study.main(["page", "draws", "--runs", str(out), "--out", str(page)]) == 0
    reports = [stored(page)["sparsity_50", "trigrf_gmm", seed] for seed in (0, 1)]
    for seed, report in enumerate(reports):
        run = out / f"sparsity_50/trigrf_gmm/seed{seed}"
        trained, drawn = (json.loads((run / f"{name}.json").read_text()) for name in ("metrics", "evaluation"))
        assert report == {**trained, "evaluation": drawn}
        assert (report["config"]["train"]["seed"], drawn["draws"]["number"]) == (seed, 3)
    means = [100 * np.mean(report["evaluation"]["draws"]["scores"]) for report in reports]
    text = (page / "README.md").read_text()
    shown = f"| {np.mean(means):.1f} ± {np.std(means, ddof=1) / 2**0.5:.1f} |"
    assert shown in text
    assert "50 pairs, at most 2 steps of 6, 3 draws, 18 sequences." in text
    assert str(tmp_path) not in text
    assert (page / "draws.png").stat().st_size > 10_000

    # Finished ones are left, another number of draws is scored without training, a stored report is enough.
    called.clear()
    assert study.main(["run", "draws", *given, "--seeds", "0", "1", "--draws", "3"]) == 0
    assert called == []
    assert study.main(["run", "draws", *given, "--draws", "2"]) == 0
    assert called == ["score"]
    elsewhere = [*SMALL, "--out", str(tmp_path / "others"), "--methods", "trigrf_gmm", "--stored", str(page)]
    assert study.main(["run", "draws", *elsewhere]) == 0
    assert called == ["score"]
    capsys.readouterr()
    assert study.main(["page", "draws", "--runs", str(out), "--out", str(page)]) == 0
    assert "**The runs differ (" in (page / "README.md").read_text()


@pytest.mark.usefixtures("called")
def test_a_run_without_its_draws_is_not_on_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    """Scoring was stopped, or failed: the sweep says so, and goes on with it when it is called again."""
    execute = sweep.execute
    given = [*SMALL, "--out", str(tmp_path / "runs"), "--methods", "posrf_gmm", "--draws", "2"]
    for answer, code in (((-15, 15), 143), ((143, None), 143), ((1, None), 1)):
        monkeypatch.setattr(
            sweep, "execute", lambda command, answer=answer: answer if "score.py" in command[1] else execute(command)
        )
        assert study.main(["run", "draws", *given]) == code
        said = capsys.readouterr()
        assert ("run the same command again" in said.out) == (code == 143)
        assert ("failed: sparsity_50/posrf_gmm/seed0" in said.err) == (code == 1)
        assert study.main(["page", "draws", "--runs", str(tmp_path / "runs"), "--out", str(tmp_path / "page")]) == 2
        assert "recipes/papers/study.py run draws" in capsys.readouterr().err
    monkeypatch.setattr(sweep, "execute", execute)
    assert study.main(["run", "draws", *given]) == 0
    assert study.main(["page", "draws", "--runs", str(tmp_path / "runs"), "--out", str(tmp_path / "page")]) == 0


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--draws", "1"], "--draws: 1; expected 2 or more"),
        (["--methods", "posrf_orf"], "unknown methods ['posrf_orf']; the tasks have posrf_gmm, trigrf_gmm"),
    ],
)
def test_faults(given: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        study.main(["run", "draws", *given, "--out", str(tmp_path / "runs")])
    assert stopped.value.code == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


def report(scores: list[float], vote: float, against: float, gain: float | None) -> dict[str, Any]:
    """What the page reads."""
    split = {"accuracy": float(np.mean(scores)), "voting_accuracy": vote, "pi_share": against, "voting_gain": gain}
    draws = {"number": len(scores), "scores": scores, "score_std": float(np.std(scores, ddof=1))}
    return {
        "longest_sequence": 50,
        "train_cpu_seconds": 90.0,
        "config": {"train": {"steps": 10, "batch_size": 5}},
        "evaluation": {"score": 0.9, "examples": {"test": 40}, "draws": {**draws, "splits": {"test": split}}},
    }


def test_figures_are_over_models() -> None:
    cell = [report([0.5, 0.7], 0.9, 0.25, 1.5), report([0.2, 0.4], 0.6, 0.35, 2.0)]
    shown = draws_page.cells(cell)
    assert shown == [
        "90.0 ± 0.0 (2)",
        "45.0 ± 15.0",
        "14.1 ± 0.0",
        "75.0 ± 15.0",
        "1.75 ± 0.25",
        "30.0 ± 5.0",
        "90",
    ]
    never_right = report([0.0, 0.0], 0.0, 0.5, None)
    assert draws_page.cells([never_right])[4] == "–"
    assert draws_page.voted(cell[0]) == [(0.5, 0.9), (0.7, 0.9)]
