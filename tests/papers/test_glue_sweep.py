"""The sweep over GLUE: runs, skips, resumes, stops, and the page of what it left."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest
from papers import study
from papers.lib import sweep
from papers.lib.sweep import Run, time_left
from recipe_world import RECIPES, write_world

from tests.stored_runs import put_figures, report, stored


def test_a_table_is_rendered_from_stored_reports(tmp_path: Path) -> None:
    costs = {"seconds_per_epoch": 12.34, "processor_seconds_per_epoch": 11.9, "trainable_parameters": 74498}
    for task, method, seed, score in (
        ("rte", "lora_r8", 0, 0.60),
        ("rte", "lora_r8", 1, 0.64),
        ("rte", "snnk_relu16", 0, 0.65),
        ("mrpc", "snnk_relu16", 0, 0.85),
    ):
        examples = {"train": 100 if task == "rte" else 200, "validation": 9}
        figures = report(score=score, seed=seed, examples=examples, **costs)
        put_figures(tmp_path / "runs" / task / method / f"seed{seed}/metrics.json", figures)
    arguments = ["--runs", str(tmp_path / "runs"), "--out", str(tmp_path / "cards")]
    arguments += ["--rates", str(tmp_path / "rates")]
    assert study.main(["page", "glue", *arguments]) == 0
    page = (tmp_path / "cards/README.md").read_text()
    assert "| snnk_relu16 | 65.0 | 85.0 | 75.0 | 74,498 |" in page
    assert "| lora_r8 | 62.0 ± 2.0 (2) | – | – | 74,498 |" in page
    assert "| snnk_relu16 | +5.0 | – | – |" in page  # to LoRA with seed 0
    assert "| training examples | 100 | 200 |" in page
    assert "| lora_r8 | 12 | – |" in page
    assert ("rte", "lora_r8", 1) in stored(tmp_path / "cards")
    assert (tmp_path / "cards/scores.png").read_bytes().startswith(b"\x89PNG")


def test_the_time_left_is_estimated_from_like_runs() -> None:
    seconds = {"rte/lora_r8/seed0": 60.0, "rte/lora_r8/seed1": 120.0, "rte/snnk_relu16/seed0": 600.0}
    runs = [Run("rte", "lora_r8", 2), Run("rte", "linear_probe", 0)]
    assert time_left(runs, seconds) == "2 runs left, about 6 min"
    assert "1 runs of tasks that have not been timed" in time_left([Run("sst2", "lora_r8", 0)], seconds)


@pytest.mark.slow
def test_a_sweep_runs_skips_and_resumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    world = write_world(tmp_path / "world")
    monkeypatch.setenv("PYTHONPATH", str(RECIPES.parent))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    arguments = [
        *(f"model.name_or_path={world / 'bert'}", f"data.dir={world / 'glue'}", "train.epochs=1"),
        *("output.tensorboard=false", "output.save_model=false"),
        *("--out", str(tmp_path / "runs"), "--tasks", "rte", "--methods", "lora_r8", "pooler_cos", "--seeds", "0"),
    ]
    assert study.main(["run", "glue", *arguments]) == 0
    assert "0 runs left" in capfd.readouterr().out
    reports = {file.parts[-3]: json.loads(file.read_text()) for file in tmp_path.glob("runs/*/*/*/metrics.json")}
    assert reports["pooler_cos"]["config"]["method"]["pooler"] == {"component": "cos"}
    assert reports["pooler_cos"]["config"]["method"]["adapter"] is None
    assert reports["lora_r8"]["method"] == "lora"
    (tmp_path / "runs/rte/lora_r8/seed0/metrics.json").unlink()  # as if it had been killed near its end
    assert study.main(["run", "glue", *arguments]) == 0
    output = capfd.readouterr().out
    assert "2 runs, 1 finished" in output
    assert "rte/lora_r8/seed0 (resumed)" in output
    assert "continuing after step 2" in output
    again = json.loads((tmp_path / "runs/rte/lora_r8/seed0/metrics.json").read_text())
    assert again["score"] == reports["lora_r8"]["score"]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_sweep_passes_a_stop_on_and_stops_itself(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], number: signal.Signals, code: int
) -> None:
    # A run that tells the sweep's process to stop, as a terminal would, and saves itself when it is told so.
    (tmp_path / "run.py").write_text(
        "import os, signal, sys\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))\n"
        f"os.kill(os.getppid(), {int(number)})\n"
        "signal.pause()\n"
    )
    grid = sweep.Sweep(lambda run: [str(tmp_path / "run.py"), f"train.seed={run.seed}"], tmp_path / "out")
    assert sweep.sweep(grid, [sweep.Run("rte", "m", 0), sweep.Run("rte", "m", 1)]) == code
    assert "start the same command again" in capsys.readouterr().out


def test_a_sweep_that_is_stopped_tells_what_had_failed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As the system ends the first run when memory is short; told at once, and not taken for a mere stop."""
    (tmp_path / "run.py").write_text(
        "import os, signal, sys\n"
        "if 'train.seed=0' in sys.argv:\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))\n"
        "os.kill(os.getppid(), signal.SIGTERM)\n"
        "signal.pause()\n"
    )
    grid = sweep.Sweep(lambda run: [str(tmp_path / "run.py"), f"train.seed={run.seed}"], tmp_path / "out")
    assert sweep.sweep(grid, [sweep.Run("rte", "m", 0), sweep.Run("rte", "m", 1)]) == sweep.FAILED_THEN_STOPPED
    error = capsys.readouterr().err
    assert "failed: rte/m/seed0 (killed, as systems do when memory is short)" in error
    assert "failed before: rte/m/seed0" in error
    assert [sweep.ending(code) for code in (1, -11)] == ["exit code 1", "signal SIGSEGV"]
