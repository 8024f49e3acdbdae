"""The studies glue and snnk from runs to pages; a sweep skips what is finished, resumes the rest and can be stopped."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest
from data_files import write_columns
from fresh_process import run_python
from papers import study
from papers.lib import sweep
from papers.lib.study import load
from papers.lib.study_runs import data_settings
from papers.lib.sweep import Run, time_left
from papers.pages import snnk as snnk_page
from PIL import Image
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
    assert "run the same command again" in capsys.readouterr().out


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
    assert "failed: rte/m/seed0 (killed, as happens when memory runs out)" in error
    assert "failed before: rte/m/seed0" in error
    assert [sweep.ending(code) for code in (1, -11)] == ["exit code 1", "signal SIGSEGV"]


def test_every_experiment_has_a_title() -> None:
    assert set(snnk_page.TITLES) == set(load("snnk").tasks)


def test_from_runs_to_the_page(tmp_path: Path) -> None:
    write_columns(tmp_path / "data/hepmass", "hepmass")
    out, page = tmp_path / "runs", tmp_path / "page"
    program, given = (
        [str(RECIPES / "papers/study.py"), "run", "snnk"],
        ["--out", str(out), "--data", str(tmp_path / "data")],
    )
    few = ["train.epochs=1", "train.device=cpu"]
    first = run_python([*program, *few, *given, "--methods", "dense", "--tasks", "hepmass", "mnist"])
    assert first.returncode == 0, first.stderr[-3000:]
    assert "mnist is left out: --data has no folder mnist" in first.stdout
    few = ["train.steps=2", "train.device=cpu"]
    asked = [*program, *few, *given, "--methods", "dense", "--tasks", "two_bodies", "--seeds", "0", "1"]
    second = run_python(asked)
    assert second.returncode == 0, second.stderr[-3000:]
    assert study.main(["page", "snnk", "--runs", str(out), "--out", str(page)]) == 0
    text = (page / "README.md").read_text()
    dense = stored(page)["hepmass", "dense", 0]
    assert f"| dense | {100 * dense['score']:.1f} (1) | {dense['trainable_parameters']:,} |" in text
    missed = [1 - stored(page)["two_bodies", "dense", seed]["score"] for seed in (0, 1)]
    assert f"{sum(missed) / 2:.1e} ± " in text
    assert "(2) |" in text
    assert str(tmp_path) not in text
    assert "2 runs, 2 finished" in run_python(asked).stdout  # started again, nothing is run


def test_the_first_photograph_is_fitted_and_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    task, data = "siren_photograph", tmp_path / "my: data"  # a path that YAML would not read as a text
    wanted = load("snnk").tasks[task].data
    assert data_settings(task, wanted, None, tmp_path) is None
    (data / "photographs/b").mkdir(parents=True)
    (data / "photographs/0.txt").write_text("no picture")
    assert data_settings(task, wanted, data, tmp_path) is None
    missing = f"note: {task} is left out: --data has no image in photographs or imagenet"
    assert capsys.readouterr().out.splitlines() == [missing, missing]
    for name in ("imagenet/train/n01/n01_1.JPEG", "photographs/b/c.JPG", "photographs/b/d.png"):
        (data / name).parent.mkdir(parents=True, exist_ok=True)
        Image.radial_gradient("L").save(data / name)
        if name.startswith("imagenet"):
            assert "n01_1.JPEG" in str(data_settings(task, wanted, data, tmp_path))
    out, page, small = tmp_path / "runs", tmp_path / "page", ["data.size=16", "train.steps=2", "model.width=8"]
    given = ["--data", str(data), "--out", str(out), "--tasks", task, "--methods", "low_rank", "--seeds", "0"]
    done = run_python([str(RECIPES / "papers/study.py"), "run", "snnk", *small, "train.device=cpu", *given])
    assert done.returncode == 0, done.stderr[-3000:]
    assert study.main(["page", "snnk", "--runs", str(out), "--out", str(page)]) == 0
    assert "a photograph\n\nc.JPG, 16 pixels on each side.\n" in (page / "README.md").read_text()


def test_unknown_methods_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        study.main(["run", "snnk", "--tasks", "siren", "--methods", "lora"])
    assert stop.value.code == 2
    assert "unknown methods ['lora']; the tasks have dense, snnk" in capsys.readouterr().err
