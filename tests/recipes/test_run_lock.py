"""Who writes a folder is alone: two runs, a run and `--overwrite`, two `--resume`, killed ones, forked workers."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path
from typing import Any

import bundle
import export
import finetune
import pytest
import score
import torch
from lib import modality, training
from lib.files import FileError
from lib.finetuning import Finetuning
from lib.lock import alone
from lib.loop import train_step
from papers.lib.measured_page import measured_page
from papers.programs import write_listops
from recipe_world import write_settings, write_world
from safetensors.torch import load_file

from snnk_peft.errors import ConfigError
from tests.fresh_process import FreshProcess, run_processes, run_python, start_python

ROOT = Path(__file__).resolve().parents[2]
RECIPES = ROOT / "recipes"


pytestmark = pytest.mark.slow


ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT)}
# Takes the lock, says so, and waits for a line that never comes.
HOLDER = "import sys; from pathlib import Path; from lib.lock import alone\nwith alone(Path(sys.argv[1])):\n"
HOLDER += "    print('held', flush=True)\n    sys.stdin.read() or __import__('signal').pause()\n"


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_world(tmp_path_factory.mktemp("world"))


@pytest.fixture
def here(world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with run.yaml, whose run goes to runs/one."""
    write_settings(tmp_path / "run.yaml", str(world / "bert"), str(world / "glue"), "runs/one")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def holder(path: Path) -> FreshProcess:
    """Another process that writes there, at work."""
    process = start_python(["-c", HOLDER, str(path)], env={**ENVIRONMENT, "PYTHONPATH": f"{ROOT}:{RECIPES}"})
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


def second(*options: str) -> tuple[int, str]:
    """Exit code and errors of another process with the same settings."""
    done = run_python([str(RECIPES / "finetune.py"), "run.yaml", *options], env=ENVIRONMENT)
    return done.returncode, done.stderr


def weights(run: Path) -> dict[str, torch.Tensor]:
    return load_file(sorted((run / "checkpoints").glob("step-*"))[-1] / "model.safetensors")


def same(first: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return first.keys() == other.keys() and all(torch.equal(value, other[name]) for name, value in first.items())


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
    assert same(weights(here / "runs/one"), weights(here / "alone"))


def test_two_processes_of_one_run_hold_one_lock_and_all_tell_who_has_it(here: Path, world: Path) -> None:
    arguments = [str(RECIPES / "finetune.py"), "run.yaml", "train.batch_size=4", "train.epochs=1", "train.device=cpu"]
    with alone(here / "runs/one"):
        done = run_processes(arguments, env=ENVIRONMENT)
    assert [code for code, _ in done] == [2, 2], done
    assert all(f"runs/one is being written by process {os.getpid()} on " in text for _, text in done)
    done = run_processes(arguments, env=ENVIRONMENT)
    assert [code for code, _ in done] == [0, 0], done
    assert not list(here.rglob("*.lock"))


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


def test_a_forked_worker_that_outlives_the_run_holds_nothing(tmp_path: Path) -> None:
    """As workers of a loader do for seconds when their parent was killed."""
    code = "import os, sys, time; from pathlib import Path; from lib.lock import alone\n"
    code += "with alone(Path(sys.argv[1])):\n    pid = os.fork()\n"
    code += "    if not pid:\n        time.sleep(60)\n        os._exit(0)\n"
    code += "    print(pid, flush=True)\n    os.kill(os.getpid(), 9)\n"
    process = start_python(["-c", code, str(tmp_path / "run")], env={**ENVIRONMENT, "PYTHONPATH": f"{ROOT}:{RECIPES}"})
    assert process.stdout is not None
    worker = int(process.stdout.readline())
    try:
        assert process.wait(60) == -signal.SIGKILL
        os.kill(worker, 0)  # it lives
        with alone(tmp_path / "run"):
            pass
    finally:
        os.kill(worker, signal.SIGKILL)


def test_what_the_system_refuses_inside_names_what_was_written(tmp_path: Path) -> None:
    with pytest.raises(FileError, match=r"/out: No space left on device; free some space"), alone(tmp_path / "out"):
        raise OSError(28, os.strerror(28))
    with pytest.raises(FileError, match=r"/none: No such file"), alone(tmp_path / "out"):
        (tmp_path / "none").read_text()
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="file, which is a file; expected a folder"), alone(tmp_path / "file/out"):
        pass


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
    environment = {**ENVIRONMENT, "PYTHONPATH": f"{ROOT}:{RECIPES}"}
    for file in ("benchmarks/import_time.py", "papers/programs/pointwise.py", "gpu.py"):
        more = ["--device", "cpu"] if file == "gpu.py" else []
        with alone(Path("figures")):
            done = run_python([str(RECIPES / file), "--output", "figures", *more], env=environment)
        assert done.returncode in (1, 2), file
        assert "figures is being written by process" in done.stderr, done.stderr
        assert "Traceback" not in done.stderr
