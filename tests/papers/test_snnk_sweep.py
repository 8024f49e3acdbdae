"""The study snnk: every experiment and method runs, and the page says what the runs found."""

from __future__ import annotations

from pathlib import Path

import pytest
from data_files import write_columns
from fresh_process import run_python
from papers import study
from papers.lib.study import load
from papers.lib.study_runs import data_settings
from papers.pages import snnk as snnk_page
from PIL import Image
from recipe_world import RECIPES

from tests.stored_runs import stored


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
    missing = f"note: {task} is left out: --data has no picture in photographs or imagenet"
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
