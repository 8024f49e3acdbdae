"""Where programs write: folders that are not there or not theirs, two who write at once, a disk that fills up."""

from __future__ import annotations

import functools
import json
import os
import resource
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import bundle
import export
import finetune
import fit_head
import pytest
import score
import torch
from lib.finetuning import Finetuning
from lib.head_fitting import FitHead
from papers.lib.measured_page import measured_page
from papers.programs import train_copy, write_listops
from recipe_world import (
    RECIPES,
    last_weights,
    reset_accelerate,
    same_tensors,
    write_settings,
)

from snnk_cli import launch as runs
from snnk_cli import modality, training
from snnk_cli.checkpoint import list_checkpoints, verify
from snnk_cli.files import FileError, guarded
from snnk_cli.lock import alone
from snnk_cli.training import train_step
from snnk_peft import ClosedFormHead
from snnk_peft.errors import ConfigError
from tests.fresh_process import FreshProcess, run_processes, run_python, start_python


@pytest.fixture
def here(world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's folder with bert/, glue/ and run.yaml, in which all paths are relative; the current folder."""
    for name in ("bert", "glue"):
        (tmp_path / name).symlink_to(world / name)
    write_settings(tmp_path / "run.yaml", "bert", "glue", "runs/one")
    monkeypatch.chdir(tmp_path)
    return tmp_path


# --- folders ----------------------------------------------------------------------------------------------------------


def test_folders_that_are_not_there_are_named(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "empty").mkdir()
    (here / "orphan").mkdir()
    (here / "orphan/adapter_config.json").write_text(
        json.dumps({"peft_type": "LORA", "base_model_name_or_path": "/gone/bert"})
    )
    task = ["--task", "rte", "--output", "out"]
    for program, arguments, message in (
        (bundle, ["/nope"], "/nope does not exist; expected a run of recipes/finetune.py or an adapter folder"),
        (bundle, ["run.yaml"], "run.yaml is a file; expected a run"),
        (bundle, ["empty", *task], "empty: expected a run (config.yaml), an adapter (adapter_config.json) or a model"),
        (bundle, ["orphan", *task], "base_model_name_or_path in orphan/adapter_config.json is /gone/bert: no such"),
        (score, ["/nope", "--task", "rte"], "/nope is not a folder"),
        (finetune, ["run.yaml", "model.name_or_path=/nope"], "model.name_or_path is /nope: no such folder; expected a"),
        (finetune, ["run.yaml", "model.name_or_path=./nope"], "model.name_or_path is ./nope: no such folder"),
        (finetune, ["run.yaml", "model.name_or_path=run.yaml/x"], "there is no such folder in"),
        (finetune, ["run.yaml", "model.name_or_path=empty"], "a folder without config.json; expected a model, found"),
        (finetune, ["run.yaml", "model.name_or_path=orphan"], "an adapter; expected a model: give the adapter's base"),
        (finetune, ["nope.yaml"], "nope.yaml: cannot be read (No such file or directory)"),
    ):
        assert program.main(arguments) == 2, arguments
        assert message in capsys.readouterr().err


def test_an_output_that_cannot_be_made_is_refused_before_the_work(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(modality, "load_tokenizer", lambda *_: pytest.fail("the work has begun"))
    (here / "file").write_text("")
    for folder, message in (
        ("file", "the output folder is file, which is a file; expected a folder"),
        ("file/run", f"the output folder is file/run, but {here / 'file'} is a file"),
    ):
        assert finetune.main(["run.yaml", f"output.dir={folder}"]) == 2
        assert message in capsys.readouterr().err
    (here / "empty").mkdir()
    assert bundle.main(["empty", "--task", "rte", "--output", "file/out"]) == 2
    assert "the output folder is file, which is a file; expected a folder" in capsys.readouterr().err
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root, who runs tests in containers, may do anything
    assert finetune.main(["run.yaml"]) == 2
    assert f"the output folder is runs/one, but {here} cannot be written to; choose another" in capsys.readouterr().err
    assert write_listops.main(["--output", "new"]) == 2
    assert "the output folder is new" in capsys.readouterr().err


def test_what_the_system_refuses_is_no_traceback(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert guarded(lambda: (tmp_path / "none/file").write_text("")) == 2
    assert f"error: {tmp_path}/none/file: No such file or directory" in capsys.readouterr().err
    # /proc is a file system in which nobody, root included, can make a folder.
    small = ["--train", "2", "--validation", "1", "--test", "1", "--min-length", "3", "--max-length", "60"]
    assert write_listops.main(["--output", "/proc/listops", *small]) == 2
    assert "error: /proc/listops: No such file or directory" in capsys.readouterr().err

    def broken() -> None:
        raise RuntimeError("a bug keeps its traceback")

    with pytest.raises(RuntimeError):
        guarded(broken)


def test_a_used_folder_is_refused_and_overwrite_spares_strangers(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["run.yaml", "train.epochs=1"]
    assert finetune.main(arguments) == 0
    assert finetune.main(arguments) == 2
    assert "--resume" in (error := capsys.readouterr().err)
    assert "--overwrite" in error
    before = (here / "runs/one/metrics.json").stat().st_mtime_ns
    # Bad data are found before anything is deleted.
    assert finetune.main([*arguments, "--overwrite", "data.dir=nowhere"]) == 2
    assert (here / "runs/one/metrics.json").stat().st_mtime_ns == before
    assert finetune.main([*arguments, "--overwrite"]) == 0
    assert (here / "runs/one/metrics.json").stat().st_mtime_ns > before
    (here / "runs/one/thesis.tex").write_text("x")
    assert finetune.main([*arguments, "--overwrite"]) == 2
    assert "holds more than a run: thesis.tex" in capsys.readouterr().err
    assert (here / "runs/one/thesis.tex").exists()


# --- one writer -------------------------------------------------------------------------------------------------------


ENVIRONMENT = {**os.environ, "PYTHONPATH": f"{RECIPES.parent}:{RECIPES}"}
# Takes the lock, says so, and waits for a line that never comes.
HOLDER = "import sys; from pathlib import Path; from snnk_cli.lock import alone\nwith alone(Path(sys.argv[1])):\n"
HOLDER += "    print('held', flush=True)\n    sys.stdin.read() or __import__('signal').pause()\n"


def holder(path: Path) -> FreshProcess:
    """Another process that writes there, at work."""
    process = start_python(["-c", HOLDER, str(path)], env=ENVIRONMENT)
    assert process.stdout.readline() == "held\n"
    return process


def second(*options: str) -> tuple[int, str]:
    """Exit code and errors of another process with the same settings."""
    done = run_python([str(RECIPES / "finetune.py"), "run.yaml", *options], env=ENVIRONMENT)
    return done.returncode, done.stderr


@pytest.mark.slow
def test_a_second_run_is_refused_from_the_first_moment_to_the_last(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the folder exists (data are being read), while it trains, and while it reports: nothing is lost."""
    told: list[tuple[int, str]] = []
    real, steps = modality.load_tokenizer, iter(range(99))

    def reading(*given: Any) -> Any:
        assert not (here / "runs/one").exists()
        told.append(second())
        told.append(second("--overwrite"))
        return real(*given)

    def stepping(*given: Any) -> torch.Tensor:
        if next(steps) == 5:
            told.extend(second(option) for option in ("--resume", "--overwrite"))
        return train_step(*given)

    def reporting(self: Any, *given: Any) -> None:
        told.append(second("--resume"))

    with monkeypatch.context() as patched:
        patched.setattr(modality, "load_tokenizer", reading)
        patched.setattr(training, "train_step", stepping)
        patched.setattr(Finetuning, "curve", reporting)
        assert finetune.main(["run.yaml"]) == 0
    assert [code for code, _ in told] == [2] * 5
    for _, error in told:
        assert f"runs/one is being written by process {os.getpid()} on " in error
        assert "wait until it has ended (its lock ends with it), stop it, or choose another output.dir" in error
        assert "Traceback" not in error
    assert (here / "runs/one/metrics.json").is_file()
    assert not list(here.rglob("*.lock"))
    assert finetune.main(["run.yaml", "output.dir=alone"]) == 0
    assert same_tensors(last_weights(here / "runs/one"), last_weights(here / "alone"))


@pytest.mark.slow
def test_two_processes_of_one_run_hold_one_lock_and_all_tell_who_has_it(here: Path) -> None:
    arguments = [str(RECIPES / "finetune.py"), "run.yaml", "train.batch_size=4", "train.epochs=1", "train.device=cpu"]
    with alone(here / "runs/one"):
        done = run_processes(arguments, env=ENVIRONMENT)
    assert [code for code, _ in done] == [2, 2], done
    assert all(f"runs/one is being written by process {os.getpid()} on " in text for _, text in done)
    done = run_processes(arguments, env=ENVIRONMENT)
    assert [code for code, _ in done] == [0, 0], done
    assert not list(here.rglob("*.lock"))


@pytest.mark.slow
def test_a_killed_process_leaves_nothing_that_hinders(tmp_path: Path) -> None:
    process = holder(tmp_path / "run")
    told = f"is being written by process {process.pid} on .*, since 20"
    with pytest.raises(ConfigError, match=told), alone(tmp_path / "run"):
        pass
    process.send_signal(signal.SIGKILL)
    assert process.wait(60) == -signal.SIGKILL
    assert [file.name for file in tmp_path.iterdir()] == [".run.lock"]
    with alone(tmp_path / "run"):
        pass
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_one_folder_under_any_name_and_what_it_lies_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "link").symlink_to("a")
    with alone(Path("a/b/run")):
        for other in ("a/b/run", "a/./b/../b/run", f"{tmp_path}/a/b/run", "link/b/run"):
            with pytest.raises(ConfigError, match="is being written"), alone(Path(other)):
                pass
        with alone(Path("a/b/other")):  # beside it
            pass
        (tmp_path / "a/b/run").mkdir()
        shutil.rmtree("a/b/run")  # as --overwrite does
        with pytest.raises(ConfigError, match="is being written"), alone(Path("a/b/run")):
            pass
    assert [entry.name for entry in tmp_path.iterdir()] == ["link"]  # nothing came of it, nothing stays
    with alone(Path("c/run")):
        Path("c/run").mkdir()
    assert sorted(str(entry.relative_to(tmp_path)) for entry in tmp_path.rglob("*")) == ["c", "c/run", "link"]


@pytest.mark.slow
def test_a_forked_worker_that_outlives_the_run_holds_nothing(tmp_path: Path) -> None:
    """As workers of a loader do for seconds when their parent was killed."""
    code = "import os, signal, sys; from pathlib import Path; from snnk_cli.lock import alone\n"
    code += "with alone(Path(sys.argv[1])):\n    pid = os.fork()\n"
    code += "    if not pid:\n        signal.pause()\n        os._exit(0)\n"
    code += "    print(pid, flush=True)\n    os.kill(os.getpid(), 9)\n"
    process = start_python(["-c", code, str(tmp_path / "run")], env=ENVIRONMENT)
    worker = int(process.stdout.readline())
    try:
        assert process.wait(60) == -signal.SIGKILL
        os.kill(worker, 0)  # it lives
        with alone(tmp_path / "run"):
            pass
    finally:
        os.kill(worker, signal.SIGKILL)


@pytest.mark.slow
def test_what_the_system_refuses_inside_names_what_was_written(tmp_path: Path) -> None:
    with pytest.raises(FileError, match=r"/out: No space left on device; free some space"), alone(tmp_path / "out"):
        raise OSError(28, os.strerror(28))
    with pytest.raises(FileError, match=r"/none: No such file"), alone(tmp_path / "out"):
        (tmp_path / "none").read_text()
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="file, which is a file; expected a folder"), alone(tmp_path / "file/out"):
        pass


@pytest.mark.slow
def test_every_program_that_writes_asks(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert finetune.main(["run.yaml", "train.epochs=1", "method.name=snnk", "output.dir=run"]) == 0
    for held, program, arguments in (
        ("run", bundle, ["run"]),  # the run is at work, and writes its bundle at its end
        ("run/bundle", bundle, ["run"]),
        ("out", bundle, ["run", "--output", "out"]),
        ("run/evaluation.json", score, ["run"]),
        ("out.json", score, ["run", "--output", "out.json"]),
        ("run/model.onnx", export, ["run"]),
        ("out.pt2", export, ["run", "--output", "out.pt2", "--format", "torch"]),
        ("listops", write_listops, ["--output", "listops", "--train", "1"]),
    ):
        capsys.readouterr()
        with alone(Path(held)):
            assert program.main(arguments) == 2, arguments
        assert f"{held} is being written by process {os.getpid()}" in capsys.readouterr().err
    with alone(Path("page")), pytest.raises(ConfigError, match="page is being written"):
        measured_page(Path("page"), False, lambda: pytest.fail("measured"), lambda figures: "")
    for file in ("benchmarks/snnk_layer.py", "papers/programs/pointwise.py", "gpu.py"):
        more = ["--device", "cpu"] if file == "gpu.py" else []
        with alone(Path("figures")):
            done = run_python([str(RECIPES / file), "--output", "figures", *more], env=ENVIRONMENT)
        assert done.returncode in (1, 2), file
        assert "figures is being written by process" in done.stderr, done.stderr
        assert "Traceback" not in done.stderr


# --- full disks -------------------------------------------------------------------------------------------------------


COPIES = ["data.length=8", "data.train_examples=40", "data.validation_examples=4", "data.test_examples=4"]
COPIES += ["train.steps=4", "train.eval_every=2", "model.dim=8", "model.heads=1", "model.layers=1"]


# Name of a program of runs -> its module, its experiment.
PROGRAMS: dict[str, tuple[Any, Any]] = {
    "finetune": (finetune, Finetuning),
    "fit_head": (fit_head, FitHead),
    "train_copy": (train_copy, train_copy.TrainCopy),
}
# When the disk is full from then on: where the switch is, and what the error names.
MOMENTS = {
    "start": None,
    "settings": (runs, "claim_folder"),
    "first log": (training, "train_step"),
    "checkpoint": (training, "save_checkpoint"),
    "statistics": (ClosedFormHead, "save"),
    "report": ("experiment", "report"),
    "curve": ("experiment", "curve"),
    "metrics": (runs, "read_log"),
}
CASES = [("finetune", moment) for moment in MOMENTS if moment != "statistics"]
CASES += [("fit_head", moment) for moment in ("statistics", "checkpoint", "report", "curve")]
CASES += [("train_copy", "checkpoint"), ("train_copy", "metrics")]


@pytest.fixture
def full() -> Iterator[Callable[[bool], None]]:
    """full(True): from now on no byte can be written to any file, as on a full disk; full(False): some were freed."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda now: resource.setrlimit(resource.RLIMIT_FSIZE, (0 if now else soft, hard))
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def arguments(program: str, world: Path) -> list[str]:
    """A small run into run/, with everything that it can leave."""
    if program == "finetune":
        more = ["output.dir=run", "method.name=snnk", "output.save_model=true", "output.tensorboard=true"]
        return ["run.yaml", *more, "train.keep_checkpoints=9"]
    given = [f"model.name_or_path={world / 'bert'}", "task=rte", f"data.dir={world / 'glue'}", "data.max_length=32"]
    if program == "fit_head":
        return [str(RECIPES / "configs/head.yaml"), *given, "output.dir=run", "method.points=1"]
    return [str(RECIPES / "papers/configs/copy/copy.yaml"), "output.dir=run", *COPIES, "method.attention=softmax"]


def before(target: Any, name: str, happens: Callable[[], None], patched: pytest.MonkeyPatch) -> None:
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
    write_settings(folder / "run.yaml", str(world / "bert"), str(world / "glue"), "run")

    @functools.cache
    def done(program: str) -> Path:
        with pytest.MonkeyPatch.context() as patched:
            patched.chdir(folder)
            assert PROGRAMS[program][0].main([*arguments(program, world), f"output.dir={program}"]) == 0
        reset_accelerate()
        return folder / program

    return done


@pytest.mark.parametrize(("program", "moment"), CASES)
def test_a_full_disk_is_told_with_the_path_and_the_run_goes_on(
    here: Path,
    world: Path,
    program: str,
    moment: str,
    straight: Callable[[str], Path],
    full: Callable[[bool], None],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (module, experiment), given = PROGRAMS[program], arguments(program, world)
    with monkeypatch.context() as patched:
        if (place := MOMENTS[moment]) is None:
            full(True)
        else:
            before(experiment if place[0] == "experiment" else place[0], place[1], lambda: full(True), patched)
        assert module.main(given) == 2
    full(False)
    error = capsys.readouterr().err
    assert "File too large; raise the limit on the size of files (ulimit -f), or write to another disk" in error
    named = "run/statistics.safetensors" if moment == "statistics" else "run"  # the run folder, or a file in it
    assert f"error: {named}" in error, error
    assert "Traceback" not in error
    assert not [*here.rglob("*.tmp"), *here.rglob("*.lock"), *here.rglob("*.part")]
    begun = Path("run/config.yaml").is_file()
    for checkpoint in list_checkpoints(Path("run/checkpoints")):
        verify(checkpoint)
        assert "is complete; continue from it with:" in error
    assert module.main([*given, *(["--resume"] if begun else [])]) == 0
    whole = straight(program)
    assert same_tensors(last_weights(Path("run")), last_weights(whole))
    names = [sorted(entry.name for entry in run.iterdir()) for run in (Path("run"), whole)]
    assert names[0] == names[1]


def test_a_full_disk_for_programs_that_are_no_run(
    here: Path, full: Callable[[bool], None], capsys: pytest.CaptureFixture[str]
) -> None:
    assert finetune.main(["run.yaml", "train.epochs=1", "method.name=snnk", "output.dir=run"]) == 0
    short = ["--min-length", "3", "--max-length", "60"]
    for program, given, path in (
        (bundle, ["run"], "run/bundle"),
        (score, ["run"], "run/evaluation.json"),
        (export, ["run", "--format", "torch", "--output", "out.pt2"], "out.pt2"),
        (write_listops, ["--output", "listops", "--train", "1", "--validation", "1", "--test", "1", *short], "listops"),
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
