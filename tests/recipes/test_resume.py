"""Stopped, killed and damaged runs: `--resume` ends with the bits of a run that nobody disturbed, or refuses."""

from __future__ import annotations

import json
import os
import random
import shlex
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import bundle
import finetune
import fit_head
import pytest
import score
import torch
from recipe_world import RECIPES, InterruptedRun, at_step, die, same_tensors, stop, write_settings
from safetensors.torch import load_file, save_file

from snnk_cli import checkpoint as checkpoints
from snnk_cli import files
from snnk_cli.checkpoint import list_checkpoints
from snnk_cli.files import sha256
from snnk_cli.run_folder import claim_folder
from snnk_peft.errors import ConfigError
from snnk_peft.saved_folder import temporary_name
from tests.kill_runs import kill_runs

KEEP = ("train.keep_checkpoints=9",)


@pytest.fixture(scope="module")
def runs(world: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """run.yaml, and runs of it: `stopped` after six of ten steps, `finished`, `seed` with another seed, all of it."""
    folder = tmp_path_factory.mktemp("runs")
    write_settings(folder / "run.yaml", str(world / "bert"), str(world / "glue"), "run")
    with pytest.MonkeyPatch.context() as patched:
        patched.chdir(folder)
        for name, more in (("finished", []), ("seed", ["train.seed=7"])):
            assert finetune.main(["run.yaml", f"output.dir={name}", *KEEP, *more]) == 0
        at_step(patched, 6, stop)
        assert finetune.main(["run.yaml", "output.dir=stopped", *KEEP]) == 143
    return folder


@pytest.fixture
def here(runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of all that, as the current folder."""
    shutil.copytree(runs, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def interrupted(step: int, *changes: str) -> list[str]:
    """Arguments of a run into `run` whose process dies in this step."""
    arguments = ["run.yaml", *changes]
    with pytest.MonkeyPatch.context() as patched:
        at_step(patched, step, die)
        with pytest.raises(InterruptedRun):
            finetune.main(arguments)
    return arguments


def resume(*more: str) -> int:
    return finetune.main(["run.yaml", "output.dir=stopped", *KEEP, *more, "--resume"])


def newest(run: str) -> Path:
    return list_checkpoints(Path(run) / "checkpoints")[-1]


def best_of(checkpoint: Path) -> Path:
    step = json.loads((checkpoint / "state.json").read_text())["run"]["best"]["step"]
    return checkpoint.with_name(f"step-{step:07d}")


def assert_same(first: str, second: str) -> None:
    """Model and optimizer of two runs' newest checkpoints are equal bit for bit."""
    assert newest(first).name == newest(second).name
    for name in ("model.safetensors", "optimizer.safetensors"):
        assert same_tensors(load_file(newest(first) / name), load_file(newest(second) / name)), name


def content(folder: Path) -> dict[str, bytes]:
    return {str(file): file.read_bytes() for file in sorted(folder.rglob("*")) if file.is_file()}


def refused(capsys: pytest.CaptureFixture[str], *messages: str, run: Callable[[], int] = resume) -> None:
    """Code 2 with these messages, and nothing in the folder changed."""
    before = content(Path("stopped"))
    capsys.readouterr()
    assert run() == 2
    error = capsys.readouterr().err
    assert "Traceback" not in error
    for message in messages:
        assert message in error, error
    assert content(Path("stopped")) == before


# --- exactly ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", [3, 6, 9])
def test_resume_is_exact_in_the_middle_of_an_epoch(here: Path, capsys: pytest.CaptureFixture[str], step: int) -> None:
    arguments = interrupted(step)
    assert newest("run").name < newest("finished").name
    torch.manual_seed(999)  # what the interrupted process left behind must not matter
    assert finetune.main([*arguments, "--resume"]) == 0
    assert "threads" not in capsys.readouterr().out
    assert_same("run", "finished")
    first, second = (json.loads(Path(run, "metrics.json").read_text()) for run in ("run", "finished"))
    assert first["metrics"] == second["metrics"]
    steps = [json.loads(line)["step"] for line in Path("run/log.jsonl").read_text().splitlines()]
    assert steps == sorted(steps)


@pytest.mark.parametrize(
    "parts",
    [
        ("method.adapter.init=paper",),
        ("train.mixed_precision=bf16", "train.gradient_accumulation=2", "train.schedule=linear", "train.epochs=5"),
        # What calibration wrote (landmarks, readouts) does not follow from the settings: the checkpoint has to hold it.
        (
            "method.adapter=null",
            "method.ffn={num_features: 8}",
            "method.calibrate=true",
            "method.pooler={init: paper, num_features: 16}",
        ),
        # So do rows made of labels.
        (
            "method.adapter={component: relu, projection: informed, num_features: 4}",
            *("method.calibrate_adapters=true", "method.calibrate_samples=40", "method.fit_head=true"),
        ),
        # So do the head's means and spreads.
        (
            "method.adapter={component: gelu, projection: free, num_features: 4}",
            *("method.head=wide", "method.fit_head=true", "method.head_samples=40", "train.head_learning_rate=0.0001"),
        ),
        # What runs once is run again by the continuation.
        (
            "method.adapter={component: gelu, projection: free, num_features: 4}",
            *("method.head=wide", "method.fit_head=true", "method.cut=1", "train.dropout=0"),
        ),
        (
            "method.adapter=null",
            "method.parts=[{part: ffn, num_features: 8, layers: [0]}, {part: adapter, num_features: 4}]",
        ),
    ],
    ids=["adapter", "bf16", "calibrated", "informed", "wide head", "cut", "parts"],
)
def test_resume_of_snnk_parts_is_exact(here: Path, capsys: pytest.CaptureFixture[str], parts: tuple[str, ...]) -> None:
    assert finetune.main(["run.yaml", "method.name=snnk", *parts, "output.dir=straight"]) == 0
    assert ("of all rows" in capsys.readouterr().out) == ("method.calibrate_adapters=true" in parts)
    arguments = interrupted(7, "method.name=snnk", *parts)
    assert finetune.main([*arguments, "--resume"]) == 0
    assert_same("run", "straight")
    assert score.main(["run"]) == 0
    results = [json.loads(Path("run", f"{name}.json").read_text()) for name in ("metrics", "evaluation")]
    assert results[0]["metrics"] == results[1]["metrics"]


def test_resume_before_the_first_step_keeps_what_was_scored_before_it(here: Path) -> None:
    assert finetune.main(["run.yaml", "method.fit_head=true", "output.dir=straight"]) == 0
    arguments = interrupted(1, "method.fit_head=true")
    assert [entry.name for entry in list_checkpoints(here / "run/checkpoints")] == ["step-0000000"]
    assert finetune.main([*arguments, "--resume"]) == 0
    assert_same("run", "straight")
    results = [json.loads(Path(name, "metrics.json").read_text()) for name in ("run", "straight")]
    scores = [result["before_training"]["score"] for result in results]
    assert scores[0] == scores[1]


def test_resume_on_other_threads_says_that_bits_may_differ(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = interrupted(3)
    torch.set_num_threads(2)
    try:
        assert finetune.main([*arguments, "--resume"]) == 0
    finally:
        torch.set_num_threads(1)
    output = capsys.readouterr().out
    assert "saved with 1 threads, continued with 2" in output
    assert "OMP_NUM_THREADS=1" in output


@pytest.mark.parametrize(("number", "name", "code"), [(signal.SIGINT, "Ctrl-C", 130), (signal.SIGTERM, "SIGTERM", 143)])
def test_a_stop_saves_and_the_printed_command_continues_from_where_the_run_was_started(
    here: Path, capsys: pytest.CaptureFixture[str], number: signal.Signals, name: str, code: int
) -> None:
    before = signal.getsignal(number)
    with pytest.MonkeyPatch.context() as patched:
        at_step(patched, 5, lambda: os.kill(os.getpid(), number))
        assert finetune.main(["run.yaml", "train.log_every=3"]) == code
    assert signal.getsignal(number) is before
    printed = capsys.readouterr().out
    assert f"{name}: saved step-0000005; continue with:" in printed
    interpreter, program, *arguments = shlex.split(printed.splitlines()[-1])
    assert Path(shutil.which(interpreter) or "") == Path(sys.executable)
    assert (here / program).resolve() == RECIPES / "finetune.py"  # relative to the folder where the run was started
    assert arguments == ["run.yaml", "train.log_every=3", "--resume"]
    assert finetune.main(arguments) == 0
    assert_same("run", "finished")


def test_a_second_ctrl_c_ends_at_once_without_a_traceback(
    here: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def impatient() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)

    at_step(monkeypatch, 3, impatient)
    assert finetune.main(["run.yaml"]) == 130
    error = capfd.readouterr().err
    assert "saving after this step" in error
    assert "stopped by Ctrl-C" in error
    assert [entry.name for entry in list_checkpoints(here / "run/checkpoints")] == ["step-0000002"]


@pytest.mark.slow
def test_killed_three_times_and_resumed_equals_uninterrupted(tmp_path: Path) -> None:
    """A sample of what `python tests/kill_runs.py` does."""
    seed = random.randrange(10**6)
    print("\n".join([f"seed {seed}", *kill_runs(tmp_path, 3, seed)]))


def test_leftovers_of_a_killed_run_go_when_it_is_continued(here: Path) -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    left = temporary_name(Path("stopped/checkpoints/step-0000008"))
    left = left.with_name(left.name.replace(f".{os.getpid()}@", f".{gone.pid}@"))
    left.mkdir()
    (left / "model.safetensors").write_bytes(b"half")
    Path("stopped", left.name).write_text("half")
    assert resume() == 0
    assert not list(Path("stopped").rglob("*.tmp"))
    assert_same("stopped", "finished")


def test_a_finished_run_is_finished_and_goes_on_from_an_earlier_checkpoint(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    again = ["run.yaml", "output.dir=finished", *KEEP, "--resume"]
    assert finetune.main(again) == 0
    assert "finished is finished; its results are in finished/metrics.json" in capsys.readouterr().out
    before = json.loads(Path("finished/metrics.json").read_text())
    with pytest.MonkeyPatch.context() as patched:
        at_step(patched, 1, stop)
        assert finetune.main([*again, "--checkpoint", "step-0000004"]) == 143
    assert not Path("finished/metrics.json").exists()  # it is not finished now, and says so
    assert finetune.main(again) == 0
    after = json.loads(Path("finished/metrics.json").read_text())
    assert after["metrics"] == before["metrics"]


# --- what cannot be continued -----------------------------------------------------------------------------------------


def test_resume_refuses_what_it_cannot_continue(here: Path, world: Path, capsys: pytest.CaptureFixture[str]) -> None:
    refused(capsys, "nothing to resume", run=lambda: finetune.main(["run.yaml", "--resume"]))
    changed = ("train.learning_rate was 0.001 and is now 0.1", "train.seed was 0 and is now 4")
    refused(capsys, *changed, run=lambda: resume("train.learning_rate=0.1", "train.seed=4"))
    # Other data under another folder name: the fingerprint differs.
    shutil.copytree(world / "glue", "other")
    lines = Path("other/RTE/train.tsv").read_text().splitlines()
    Path("other/RTE/train.tsv").write_text("\n".join([lines[0], *lines[:0:-1]]) + "\n")
    refused(capsys, "data was", run=lambda: resume("data.dir=other"))
    without = ["run.yaml", "output.dir=stopped", "--checkpoint", "step-0000002"]
    refused(capsys, "--checkpoint needs --resume", run=lambda: finetune.main(without))
    refused(capsys, "no such checkpoint", run=lambda: resume("--checkpoint", "step-0000099"))


def test_a_checkpoint_of_another_model_changes_nothing(runs: Path) -> None:
    model = torch.nn.Linear(3, 2)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(ConfigError, match="does not exist in this model"):
        checkpoints.load_model(list_checkpoints(runs / "finished/checkpoints")[-1], model)
    assert same_tensors(model.state_dict(), before)


def test_a_checkpoint_of_another_seed_is_refused(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The newest one, and the best one, which must be there."""
    place = newest("stopped")
    best, message = best_of(place), "belongs to another run: train.seed was 7 there and is 0 here"
    assert best != place
    kept = best.rename("kept")
    refused(capsys, f"names {best.name} as the best one, but that is missing; put it back")
    shutil.copytree(Path("seed/checkpoints") / best.name, best)
    refused(capsys, f"{best} {message}")
    for program in (score, bundle):  # they read the best one
        refused(capsys, message, run=lambda program=program: program.main(["stopped"]))
    shutil.rmtree(best)
    kept.rename(best)
    shutil.rmtree(place)
    shutil.copytree(Path("seed/checkpoints") / place.name, place)
    refused(capsys, f"{place} {message}", "Put back what belongs")


def test_a_renamed_checkpoint_is_refused(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    newest("stopped").rename("stopped/checkpoints/step-0000008")
    refused(capsys, "is the state after step 6, but its folder is step-0000008")


@pytest.mark.parametrize(
    ("report", "message"),
    [
        ("{}", "it has no settings (config)"),
        ("[]", "it has no settings (config)"),
        ("[" * 100_000, "not valid JSON"),
        ("seed", "seed is 7 there and 0 here"),
        ("finished", "train_seconds is"),
    ],
    ids=lambda given: given[:9],
)
def test_a_planted_report_does_not_finish_a_run(
    here: Path, capsys: pytest.CaptureFixture[str], report: str, message: str
) -> None:
    text = Path(report, "metrics.json").read_text() if report in ("seed", "finished") else report
    Path("stopped/metrics.json").write_text(text)
    refused(capsys, "stopped/metrics.json", message)


@pytest.mark.parametrize(
    ("manifest", "message"),
    [
        (None, "manifest.json"),
        ({"format": 1, "files": {}}, "model.safetensors is not in its manifest.json"),
        ({"format": 1}, "expected `files` with bytes and sha256 of every file"),
        ({"format": 1, "files": []}, "expected `files` with bytes and sha256 of every file"),
        ({"format": 1, "files": {"state.json": "x"}}, "expected `files` with bytes and sha256 of every file"),
        ({"format": 1, "files": {"state.json": {"bytes": 1}}}, "expected `files` with bytes and sha256"),
        ({"format": 2, "files": {}}, "expected format 1"),
        ([], "expected format 1"),
        ("[" * 100_000, "not valid JSON"),
        ('{"format": ' + "9" * 5000 + "}", "not valid JSON"),
    ],
    ids=str,
)
def test_a_manifest_that_leaves_something_unchecked_is_refused(
    here: Path, capsys: pytest.CaptureFixture[str], manifest: Any, message: str
) -> None:
    file = newest("stopped") / "manifest.json"
    file.write_text(manifest if isinstance(manifest, str) else json.dumps(manifest))
    if manifest is None:
        file.unlink()
    refused(capsys, message, "continue with --resume --checkpoint step-0000005")


def test_every_file_is_checked_and_the_previous_checkpoint_offered(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = newest("stopped")
    names = {file.name for file in place.iterdir()} - {"manifest.json"}
    assert {"model.safetensors", "optimizer.safetensors", "state.json", "rng-0.safetensors", "rng-0.json"} == names
    kept = json.loads((place / "manifest.json").read_text())
    for name in sorted(names):
        without = {**kept, "files": {key: value for key, value in kept["files"].items() if key != name}}
        (place / "manifest.json").write_text(json.dumps(without))
        refused(capsys, f"{place / name} is not in its manifest.json")
        moved = (place / name).rename("elsewhere")
        refused(capsys, f"{place} has no {name}")
        (place / "manifest.json").write_text(json.dumps(kept))
        refused(capsys, f"{place / name} is missing")
        whole = moved.read_bytes()
        for damaged in (whole[:-8], whole[:-1] + bytes([whole[-1] ^ 1])):
            (place / name).write_bytes(damaged)
            refused(capsys, name, "--resume --checkpoint step-0000005")
        (place / name).write_bytes(whole)
    (place / "more").write_text("")
    refused(capsys, f"{place / 'more'} is not in its manifest.json")
    Path("stopped/checkpoints/.step-0000008.tmp").mkdir()  # of a process killed while saving: nobody's checkpoint
    assert resume("--checkpoint", "step-0000005") == 0
    assert_same("stopped", "finished")


@pytest.mark.parametrize("key", ["step", "identity", "run", "processes"])
def test_a_state_without_what_it_needs_is_refused(here: Path, capsys: pytest.CaptureFixture[str], key: str) -> None:
    place = newest("stopped")
    state, manifest = (json.loads((place / name).read_text()) for name in ("state.json", "manifest.json"))
    for wrong in ({**state, key: "x"}, {name: value for name, value in state.items() if name != key}):
        file = place / "state.json"
        file.write_text(json.dumps(wrong))
        manifest["files"][file.name] = {"bytes": file.stat().st_size, "sha256": sha256(file)}
        (place / "manifest.json").write_text(json.dumps(manifest))
        refused(capsys, "state.json: expected step, processes, identity and run")


def test_records_that_a_continuation_reads_are_those_of_its_checkpoint(
    world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What fit_head.py counted, and convert.py decided: exchanged or altered, it would be another model."""
    monkeypatch.chdir(tmp_path)
    given = [str(RECIPES / "configs/head.yaml"), "task=rte", f"data.dir={world / 'glue'}", "output.dir=run"]
    given += [f"model.name_or_path={world / 'bert'}", "data.max_length=32", "method.points=1"]
    assert fit_head.main(given) == 0
    Path("run/metrics.json").unlink()  # as if it had been killed then
    kept = content(Path("run"))
    tensors = load_file("run/statistics.safetensors")
    save_file({name: 2 * value for name, value in tensors.items()}, "run/statistics.safetensors")
    record = json.loads(Path("run/head.json").read_text())
    record["fit"]["temperature"] = 3.0
    Path("run/head.json").write_text(json.dumps(record))
    capsys.readouterr()
    assert fit_head.main([*given, "--resume"]) == 2
    error = capsys.readouterr().err
    for name in ("statistics.safetensors", "head.json"):
        assert f"run/{name} is not the file that step-0000000 was saved with: it was changed or replaced" in error
    Path("run/head.json").unlink()
    assert fit_head.main([*given, "--resume"]) == 2
    assert "run/head.json is missing; step-0000000 was saved with it" in capsys.readouterr().err
    for name, value in kept.items():
        Path(name).write_bytes(value)
    assert fit_head.main([*given, "--resume"]) == 0


def test_leftovers_of_killed_processes_go_and_those_of_live_ones_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host, dead = socket.gethostname(), 2**22 + 1  # no process has a number above 2²²
    gone = [f".adapter.{dead}@{host}.tmp", f"checkpoints/.step-0000003.{dead}@{host}.tmp"]
    kept = [temporary_name(tmp_path / "log.jsonl").name, f".bundle.{dead}@elsewhere.tmp", ".strange.tmp"]
    for name in (*gone, *kept):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "file").write_text("half")
    claim_folder(tmp_path, "x: 1\n", RECIPES.parent, resume=True)
    assert not [name for name in gone if (tmp_path / name).exists()]
    assert all((tmp_path / name).is_dir() for name in kept)
    (tmp_path / gone[0]).mkdir()
    files.write_folder(tmp_path / "adapter", lambda folder: (folder / "file").write_text("whole"))
    assert not (tmp_path / gone[0]).exists()
