"""`--resume` takes no checkpoint, report or record of another run, and no manifest that leaves a file unchecked."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import bundle
import finetune
import fit_head
import pytest
import score
import torch
from lib import training
from lib.checkpoint import list_checkpoints
from lib.files import sha256
from lib.loop import train_step
from recipe_world import RECIPES, write_settings, write_world
from safetensors.torch import load_file, save_file


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """run.yaml, and runs of it: `stopped` after six of ten steps, `finished`, `seed` with another seed, all of it."""
    folder = write_world(tmp_path_factory.mktemp("world"))
    write_settings(folder / "run.yaml", str(folder / "bert"), str(folder / "glue"), "unused")
    with pytest.MonkeyPatch.context() as patched:
        patched.chdir(folder)
        for name, more in (("finished", []), ("seed", ["train.seed=7"])):
            assert finetune.main(["run.yaml", f"output.dir={name}", *KEEP, *more]) == 0
        steps = iter(range(99))

        def stopping(*given: Any) -> torch.Tensor:
            if next(steps) == 5:
                os.kill(os.getpid(), signal.SIGTERM)
            return train_step(*given)

        patched.setattr(training, "train_step", stopping)
        assert finetune.main(["run.yaml", "output.dir=stopped", *KEEP]) == 143
    return folder


KEEP = ("train.keep_checkpoints=9",)


@pytest.fixture
def here(runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of all that, as the current folder."""
    for name in ("finished", "seed", "stopped"):
        shutil.copytree(runs / name, tmp_path / name)
    shutil.copy(runs / "run.yaml", tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def resume(*more: str) -> int:
    return finetune.main(["run.yaml", "output.dir=stopped", *KEEP, *more, "--resume"])


def newest(run: str) -> Path:
    return list_checkpoints(Path(run) / "checkpoints")[-1]


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


def rewritten(checkpoint: Path, file: str, change: Callable[[Any], None]) -> None:
    """A JSON file of the checkpoint changed, and the manifest made to fit."""
    value = json.loads((checkpoint / file).read_text())
    change(value)
    (checkpoint / file).write_text(json.dumps(value))
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    manifest["files"][file] = {"bytes": (checkpoint / file).stat().st_size, "sha256": sha256(checkpoint / file)}
    (checkpoint / "manifest.json").write_text(json.dumps(manifest))


def test_the_stopped_run_is_continued_to_the_weights_of_the_finished_one(here: Path) -> None:
    assert resume() == 0
    mine, theirs = (load_file(newest(name) / "model.safetensors") for name in ("stopped", "finished"))
    assert all(torch.equal(value, theirs[name]) for name, value in mine.items())


def test_a_checkpoint_of_another_seed_is_refused(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place = newest("stopped")
    shutil.rmtree(place)
    shutil.copytree(Path("seed/checkpoints") / place.name, place)
    refused(capsys, f"{place} is of another run: train.seed was 7 there and is 0 here", "Put back what belongs")
    for program in (score, bundle):  # they read the best one
        capsys.readouterr()
        best = json.loads((place / "state.json").read_text())["run"]["best"]["step"]
        shutil.rmtree(there := Path(f"stopped/checkpoints/step-{best:07d}"))
        shutil.copytree(Path("seed/checkpoints") / there.name, there)
        assert program.main(["stopped"]) == 2
        assert "is of another run: train.seed was 7 there and is 0 here" in capsys.readouterr().err


def test_a_best_checkpoint_of_another_seed_or_none_is_refused(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    best = json.loads((newest("stopped") / "state.json").read_text())["run"]["best"]["step"]
    place = Path(f"stopped/checkpoints/step-{best:07d}")
    assert place != newest("stopped")
    shutil.rmtree(place)
    refused(capsys, f"names {place.name} as the best one, and that is gone; put it back")
    shutil.copytree(Path("seed/checkpoints") / place.name, place)
    refused(capsys, f"{place} is of another run: train.seed was 7 there and is 0 here")


def test_a_renamed_checkpoint_is_refused(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    newest("stopped").rename("stopped/checkpoints/step-0000008")
    refused(capsys, "is the state after step 6, and its folder is step-0000008")


@pytest.mark.parametrize(
    ("report", "message"),
    [
        ("{}", "it has no settings (config)"),
        ('{"score": 1.0}', "it has no settings (config)"),
        ("[]", "it has no settings (config)"),
        ("{", "not valid JSON"),
        ("[" * 100_000, "not valid JSON"),
        ("seed", "seed is 7 there and 0 here"),
        ("finished", "train_seconds is"),
    ],
)
def test_a_planted_report_does_not_finish_a_run(
    here: Path, capsys: pytest.CaptureFixture[str], report: str, message: str
) -> None:
    text = Path(report, "metrics.json").read_text() if report in ("seed", "finished") else report
    Path("stopped/metrics.json").write_text(text)
    refused(capsys, "stopped/metrics.json", message)
    Path("stopped/metrics.json").unlink()
    assert resume() == 0


def test_a_finished_run_is_finished_and_goes_on_from_an_earlier_checkpoint(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    again = ["run.yaml", "output.dir=finished", *KEEP, "--resume"]
    assert finetune.main(again) == 0
    assert "finished is finished; its results are in finished/metrics.json" in capsys.readouterr().out
    before = json.loads(Path("finished/metrics.json").read_text())

    def stopping(*given: Any) -> torch.Tensor:
        os.kill(os.getpid(), signal.SIGTERM)
        return train_step(*given)

    with monkeypatch.context() as patched:
        patched.setattr(training, "train_step", stopping)
        assert finetune.main([*again, "--checkpoint", "step-0000004"]) == 143
    assert not Path("finished/metrics.json").exists()  # it is not finished now, and says so
    assert finetune.main(again) == 0
    after = json.loads(Path("finished/metrics.json").read_text())
    assert after["metrics"] == before["metrics"]


@pytest.mark.parametrize(
    ("manifest", "message"),
    [
        ({"format": 1, "files": {}}, "model.safetensors is not in its manifest.json"),
        ({"format": 1}, "expected `files` with bytes and sha256 of every file"),
        ({"format": 1, "files": []}, "expected `files` with bytes and sha256 of every file"),
        ({"format": 1, "files": {"state.json": "x"}}, "expected `files` with bytes and sha256 of every file"),
        ({"format": 1, "files": {"state.json": {"bytes": 1}}}, "expected `files` with bytes and sha256"),
        ({"format": 2, "files": {}}, "expected format 1"),
        ([], "expected format 1"),
        ("{", "not valid JSON"),
        ("[" * 100_000, "not valid JSON"),
        ('{"format": ' + "9" * 5000 + "}", "not valid JSON"),
    ],
)
def test_a_manifest_that_leaves_something_unchecked_is_refused(
    here: Path, capsys: pytest.CaptureFixture[str], manifest: Any, message: str
) -> None:
    file = newest("stopped") / "manifest.json"
    file.write_text(manifest if isinstance(manifest, str) else json.dumps(manifest))
    refused(capsys, message, "continue with --resume --checkpoint step-0000005")


def test_every_file_is_checked(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
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
        moved.rename(place / name)
    (place / "manifest.json").write_text(json.dumps(kept))
    (place / "more").write_text("")
    refused(capsys, f"{place / 'more'} is not in its manifest.json")


@pytest.mark.parametrize("key", ["step", "identity", "run", "processes"])
def test_a_state_without_what_it_needs_is_refused(here: Path, capsys: pytest.CaptureFixture[str], key: str) -> None:
    rewritten(newest("stopped"), "state.json", lambda state: state.update({key: "x"}))
    refused(capsys, "state.json: expected step, processes, identity and run")
    rewritten(newest("stopped"), "state.json", lambda state: state.pop(key))
    refused(capsys, "state.json: expected step, processes, identity and run")


def test_records_that_a_continuation_reads_are_those_of_its_checkpoint(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What fit_head.py counted, and convert.py decided: exchanged or altered, it would be another model."""
    monkeypatch.chdir(tmp_path)
    given = [str(RECIPES / "configs/head.yaml"), "task=rte", f"data.dir={runs / 'glue'}", "output.dir=run"]
    given += [f"model.name_or_path={runs / 'bert'}", "data.max_length=32", "method.points=1"]
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
        assert f"run/{name} is not the file that step-0000000 was saved with: it was altered or exchanged" in error
    Path("run/head.json").unlink()
    assert fit_head.main([*given, "--resume"]) == 2
    assert "run/head.json is missing, which step-0000000 goes with" in capsys.readouterr().err
    for name, value in kept.items():
        Path(name).write_bytes(value)
    assert fit_head.main([*given, "--resume"]) == 0
