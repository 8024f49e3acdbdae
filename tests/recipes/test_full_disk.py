"""A disk that fills up at any moment of a run: the path is told, nothing half stays, and the run can be continued."""

from __future__ import annotations

import functools
import importlib
import resource
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import bundle
import export
import pytest
import score
import torch
from lib import run as runs
from lib import training
from lib.checkpoint import list_checkpoints, verify
from papers.programs import write_listops
from recipe_world import RECIPES, reset_accelerate, write_settings, write_world
from safetensors.torch import load_file

SMALL = {"train_copy": ["data.length=8", "data.train_examples=40", "train.steps=4", "train.eval_every=2"]}
SMALL["train_copy"] += ["model.dim=8", "model.heads=1", "model.layers=1", "data.validation_examples=4"]
SMALL["train_copy"] += ["data.test_examples=4", "method.attention=softmax"]
SHORT = ["--min-length", "3", "--max-length", "60"]
Switch = Callable[[], None]


@pytest.fixture
def full() -> Iterator[Callable[[bool], None]]:
    """full(True): from now on no byte can be written to any file, as on a full disk; full(False): some were freed."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda now: resource.setrlimit(resource.RLIMIT_FSIZE, (0 if now else soft, hard))
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_world(tmp_path_factory.mktemp("world"))


@pytest.fixture
def here(world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with run.yaml, whose run goes to run/."""
    write_settings(tmp_path / "run.yaml", str(world / "bert"), str(world / "glue"), "run", method="snnk")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def arguments(program: str, world: Path) -> list[str]:
    """A small run into run/, with everything that it can leave."""
    if program == "finetune":
        return ["run.yaml", "output.save_model=true", "output.tensorboard=true", "train.keep_checkpoints=9"]
    given = [f"model.name_or_path={world / 'bert'}", "task=rte", f"data.dir={world / 'glue'}", "data.max_length=32"]
    if program == "fit_head":
        return [str(RECIPES / "configs/head.yaml"), *given, "output.dir=run", "method.points=1"]
    return [str(RECIPES / "papers/configs/copy/copy.yaml"), "output.dir=run", *SMALL[program]]


def before(target: Any, name: str, happens: Switch, patched: pytest.MonkeyPatch) -> None:
    """`happens()` whenever target.name is called, before its work."""
    real = getattr(target, name)

    def first(*given: Any, **more: Any) -> Any:
        happens()
        return real(*given, **more)

    patched.setattr(target, name, first)


@pytest.fixture(scope="module")
def straight(world: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a program's run on a disk that never fills up."""
    folder = tmp_path_factory.mktemp("straight")
    write_settings(folder / "run.yaml", str(world / "bert"), str(world / "glue"), "run", method="snnk")

    @functools.cache
    def done(program: str) -> Path:
        with pytest.MonkeyPatch.context() as patched:
            patched.chdir(folder)
            assert (
                importlib.import_module(WHERE.get(program, program)).main(
                    [*arguments(program, world), f"output.dir={program}"]
                )
                == 0
            )
        reset_accelerate()
        return folder / program

    return done


# When the disk is full from then on: where the switch is, and what the error names.
MOMENTS = {
    "start": None,
    "settings": (runs, "claim_folder"),
    "first log": (training, "train_step"),
    "checkpoint": (training, "save_checkpoint"),
    "report": ("experiment", "report"),
    "curve": ("experiment", "curve"),
    "metrics": (runs, "read_log"),
}


WHERE = {"train_copy": "papers.programs.train_copy"}
CASES = [*(("finetune", moment) for moment in MOMENTS), ("fit_head", "checkpoint"), ("fit_head", "report")]
CASES += [("fit_head", "curve"), ("train_copy", "checkpoint"), ("train_copy", "metrics")]


@pytest.mark.parametrize(("program", "moment"), CASES)
def test_it_is_told_with_the_path_and_the_run_goes_on(
    here: Path,
    world: Path,
    program: str,
    moment: str,
    straight: Callable[[str], Path],
    full: Callable[[bool], None],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    module, given = importlib.import_module(WHERE.get(program, program)), arguments(program, world)
    with monkeypatch.context() as patched:
        if (place := MOMENTS[moment]) is None:
            full(True)
        else:
            kinds = {"finetune": "Finetuning", "fit_head": "FitHead", "train_copy": "TrainCopy"}
            target = getattr(module, kinds[program]) if place[0] == "experiment" else place[0]
            before(target, place[1], lambda: full(True), patched)
        assert module.main(given) == 2
    full(False)
    error = capsys.readouterr().err
    assert "File too large; raise the limit on the size of files (ulimit -f), or write to another disk" in error
    assert "error: run" in error, error  # the run folder, or a file in it
    assert "Traceback" not in error
    assert not [*here.rglob("*.tmp"), *here.rglob("*.lock"), *here.rglob("*.part")]
    begun = Path("run/config.yaml").is_file()
    for checkpoint in list_checkpoints(Path("run/checkpoints")):
        verify(checkpoint)
        assert "is complete; continue from it with:" in error
    assert module.main([*given, *(["--resume"] if begun else [])]) == 0
    whole = straight(program)
    mine, theirs = (
        load_file(list_checkpoints(run / "checkpoints")[-1] / "model.safetensors") for run in (Path("run"), whole)
    )
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(value, theirs[name]) for name, value in mine.items())
    names = [sorted(entry.name for entry in run.iterdir()) for run in (Path("run"), whole)]
    assert names[0] == names[1]


def test_programs_that_are_no_run(
    here: Path, world: Path, full: Callable[[bool], None], capsys: pytest.CaptureFixture[str]
) -> None:
    module = importlib.import_module("finetune")
    assert module.main(["run.yaml", "train.epochs=1"]) == 0
    for program, given, path in (
        (bundle, ["run"], "run/bundle"),
        (score, ["run"], "run/evaluation.json"),
        (export, ["run", "--format", "torch", "--output", "out.pt2"], "out.pt2"),
        (write_listops, ["--output", "listops", "--train", "1", "--validation", "1", "--test", "1", *SHORT], "listops"),
    ):
        capsys.readouterr()
        full(True)
        code = program.main(given)
        full(False)
        error = capsys.readouterr().err
        assert code == 2, error
        assert path in error, error
        assert "File too large" in error
        assert not [*here.rglob("*.tmp"), *here.rglob("*.lock")]
        assert program is export or program.main(given) == 0
