"""What users of the recipes meet: Ctrl-C, full and closed disks, folders that are not there, texts that do not fit."""

from __future__ import annotations

import json
import os
import resource
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import bundle
import closed_form
import finetune
import pytest
import score
import torch
from data import TASKS
from glue_files import write_task
from lib import checkpoint as checkpoints
from lib import modality, training
from lib.files import temporary_name, write_text
from lib.guard import guarded
from lib.loop import train_step
from lib.modality import check_length, positions
from lib.models import resolve_model
from papers.lib import sweep
from papers.programs import write_listops
from recipe_world import RECIPES, program_file, write_settings, write_world
from safetensors.torch import load_file, save_file
from transformers import RobertaConfig, RobertaForSequenceClassification

from snnk_peft.errors import ConfigError


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_world(tmp_path_factory.mktemp("world"))


@pytest.fixture
def here(world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's folder with bert/, glue/ and run.yaml, in which all paths are relative; the current folder."""
    for name in ("bert", "glue"):
        shutil.copytree(world / name, tmp_path / name)
    write_settings(tmp_path / "run.yaml", "bert", "glue", "runs/one")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(scope="module")
def straight(world: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    """The weights of a run that nothing interrupted."""
    folder = tmp_path_factory.mktemp("straight")
    write_settings(folder / "run.yaml", str(world / "bert"), str(world / "glue"), str(folder / "run"))
    assert finetune.main([str(folder / "run.yaml")]) == 0
    return weights(folder / "run")


def weights(run: Path) -> dict[str, torch.Tensor]:
    return load_file(checkpoints.list_checkpoints(run / "checkpoints")[-1] / "model.safetensors")


def same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(value, second[name]) for name, value in first.items())


def at_step(monkeypatch: pytest.MonkeyPatch, step: int, happens: Any) -> None:
    """`happens()` while optimizer step `step` (from 1) runs."""

    def stepping(*arguments: Any) -> torch.Tensor:
        counter["done"] += 1
        values = train_step(*arguments)
        if counter["done"] == step:
            happens()
        return values

    counter = {"done": 0}
    monkeypatch.setattr(training, "train_step", stepping)


# --- help -------------------------------------------------------------------------------------------------------------


HEAVY = ("torch", "transformers", "peft", "datasets", "sklearn", "accelerate")


@pytest.mark.parametrize(
    "command",
    [
        *("finetune", "fit_head", "closed_form", "score", "convert", "bundle", "export", "gpu"),
        *("table_results", "study", "study run glue", "study run kernels", "study page glue", "study page lowrank"),
    ],
)
def test_help_answers_before_the_large_libraries_are_loaded(command: str) -> None:
    # -X importtime names every module that is loaded, on standard error.
    name, *words = command.split()
    asked = [sys.executable, "-X", "importtime", str(program_file(name)), *words, "--help"]
    done = subprocess.run(asked, capture_output=True, text=True, check=True)
    assert "usage:" in done.stdout
    loaded = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "argparse" in loaded
    assert not loaded & set(HEAVY)


# --- Ctrl-C -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("number", "name", "code"), [(signal.SIGINT, "Ctrl-C", 130), (signal.SIGTERM, "SIGTERM", 143)])
def test_a_stop_saves_and_the_printed_command_continues_from_where_the_run_was_started(
    here: Path,
    straight: dict[str, torch.Tensor],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    number: signal.Signals,
    name: str,
    code: int,
) -> None:
    before = signal.getsignal(number)
    with monkeypatch.context() as patched:
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
    assert same(weights(here / "runs/one"), straight)


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
    assert [entry.name for entry in checkpoints.list_checkpoints(here / "runs/one/checkpoints")] == ["step-0000002"]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_sweep_passes_a_stop_on_and_stops_itself(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], number: signal.Signals, code: int
) -> None:
    # A run that tells the sweep's process to stop, as a terminal would, and saves itself when it is told so.
    (tmp_path / "run.py").write_text(
        "import os, signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))\n"
        f"os.kill(os.getppid(), {int(number)})\n"
        "time.sleep(30)\n"
    )
    grid = sweep.Sweep(lambda run: [str(tmp_path / "run.py"), f"train.seed={run.seed}"], tmp_path / "out")
    assert sweep.sweep(grid, [sweep.Run("rte", "m", 0), sweep.Run("rte", "m", 1)]) == code
    assert "start the same command again" in capsys.readouterr().out


def test_a_sweep_that_is_stopped_tells_what_had_failed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As the system ends the first run when memory is short; told at once, and not taken for a mere stop."""
    (tmp_path / "run.py").write_text(
        "import os, signal, sys, time\n"
        "if 'train.seed=0' in sys.argv:\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))\n"
        "os.kill(os.getppid(), signal.SIGTERM)\n"
        "time.sleep(30)\n"
    )
    grid = sweep.Sweep(lambda run: [str(tmp_path / "run.py"), f"train.seed={run.seed}"], tmp_path / "out")
    assert sweep.sweep(grid, [sweep.Run("rte", "m", 0), sweep.Run("rte", "m", 1)]) == sweep.FAILED_THEN_STOPPED
    error = capsys.readouterr().err
    assert "failed: rte/m/seed0 (killed, as systems do when memory is short)" in error
    assert "failed before: rte/m/seed0" in error
    assert [sweep.ending(code) for code in (1, -11)] == ["exit code 1", "signal SIGSEGV"]


# --- disks ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def no_space() -> Iterator[Any]:
    """no_space(): from now on no file may grow beyond 20 kB, which is how a full disk looks to a program."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_is_told_and_the_run_can_be_continued(
    here: Path,
    straight: dict[str, torch.Tensor],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    no_space: Any,
) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with monkeypatch.context() as patched:
        at_step(patched, 7, no_space)
        assert finetune.main(["run.yaml"]) == 2
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    error = capsys.readouterr().err
    assert "File too large; raise the limit on the size of files (ulimit -f), or write to another disk" in error
    assert "step-0000006 is complete; continue from it with:" in error
    assert error.rstrip().endswith("run.yaml --resume")
    assert not list((here / "runs").rglob("*.tmp"))  # half a checkpoint would keep the disk full
    assert finetune.main(["run.yaml", "--resume"]) == 0
    assert same(weights(here / "runs/one"), straight)


def test_what_safetensors_cannot_write_is_told_like_any_other_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], no_space: Any
) -> None:
    no_space()
    tensors = {"a": torch.zeros(100_000)}
    assert guarded(lambda: save_file(tensors, tmp_path / "model.safetensors")) == 2
    assert "File too large; raise the limit on the size of files (ulimit -f)" in capsys.readouterr().err
    (tmp_path / "model.safetensors").unlink(missing_ok=True)
    with pytest.raises(ConfigError, match="log: File too large"):
        write_text(tmp_path / "log", "x" * 100_000)
    assert not list(tmp_path.iterdir())


def test_leftovers_of_a_killed_run_go_when_it_is_continued(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        at_step(patched, 3, lambda: os.kill(os.getpid(), signal.SIGTERM))
        assert finetune.main(["run.yaml"]) == 143
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    left = temporary_name(here / "runs/one/checkpoints/step-0000004")
    left = left.with_name(left.name.replace(f".{os.getpid()}@", f".{gone.pid}@"))
    left.mkdir()
    (left / "model.safetensors").write_bytes(b"half")
    (here / "runs/one" / left.name).write_text("half")
    assert finetune.main(["run.yaml", "--resume"]) == 0
    assert not list((here / "runs").rglob("*.tmp"))


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
    assert f"the output folder is runs/one, but {here} cannot be written; choose another" in capsys.readouterr().err
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


# --- folders that are not there ---------------------------------------------------------------------------------------


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
        (score, ["/nope", "--task", "rte"], "/nope is no folder"),
        (finetune, ["run.yaml", "model.name_or_path=/nope"], "model.name_or_path is /nope: no such folder; expected a"),
        (finetune, ["run.yaml", "model.name_or_path=./nope"], "model.name_or_path is ./nope: no such folder"),
        (finetune, ["run.yaml", "model.name_or_path=run.yaml/x"], "there is no such folder in"),
        (finetune, ["run.yaml", "model.name_or_path=empty"], "a folder without config.json; expected a model, found"),
        (finetune, ["run.yaml", "model.name_or_path=orphan"], "an adapter; expected a model: give the adapter's base"),
        (finetune, ["nope.yaml"], "nope.yaml: cannot be read (No such file or directory)"),
    ):
        assert program.main(arguments) == 2, arguments
        assert message in capsys.readouterr().err


def test_names_on_the_hub_and_home_folders_are_understood(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(here))
    assert resolve_model("google-bert/bert-base-uncased") == "google-bert/bert-base-uncased"
    assert resolve_model("~/bert") == str(here / "bert")
    assert resolve_model("bert") == "bert"
    with pytest.raises(ConfigError, match="--model is a/b/c: no such folder"):
        resolve_model("a/b/c", "--model")


# --- texts ------------------------------------------------------------------------------------------------------------


def test_examples_longer_than_the_positions_are_refused_before_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_world(tmp_path, positions=16)
    write_settings(tmp_path / "run.yaml", "bert", "glue", "run")
    monkeypatch.chdir(tmp_path)
    line = "word " * 40
    with (tmp_path / "glue/RTE/train.tsv").open("a") as stream:
        stream.write(f"99\t{line}\t{line}\tentailment\n")
    assert finetune.main(["run.yaml"]) == 2
    expected = (
        "data.max_length is 128; BertForSequenceClassification has positions for 16 tokens: set data.max_length=16"
    )
    assert expected in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
    assert finetune.main(["run.yaml", "data.max_length=16", "train.epochs=1"]) == 0
    assert score.main(["run", "data.max_length=17"]) == 2
    assert "set data.max_length=16" in capsys.readouterr().err
    settings = str(RECIPES / "configs/closed_form.yaml")
    given = [settings, "task=rte", "data.dir=glue", "model.name_or_path=bert", "output.dir=closed"]
    assert closed_form.main(given) == 2
    assert expected in capsys.readouterr().err
    write_task(tmp_path / "glue", "rte", n_train=300, n_dev=10)  # five batches, one of which chooses the ridge
    small = ["data.max_length=16", "method.num_features=8", "train.epochs=1"]
    assert closed_form.main([*given, *small]) == 0
    report = json.loads((tmp_path / "closed/metrics.json").read_text())
    assert [row["head"] for row in report["rows"]] == ["closed form", "AdamW, 1 epochs"]
    assert report["relative_difference_to_sklearn_ridge"] < 1e-3
    assert report["trainable_parameters"] == 2 * (8 + 1)


def test_roberta_counts_its_positions_from_the_padding_token() -> None:
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 8}
    config = RobertaConfig(vocab_size=20, max_position_embeddings=12, pad_token_id=1, **sizes)
    model = RobertaForSequenceClassification(config).eval()
    room = positions(model)
    assert room == 10
    model(input_ids=torch.full((1, room), 5))  # exactly what fits
    with pytest.raises((IndexError, RuntimeError)):
        model(input_ids=torch.full((1, room + 1), 5))
    check_length(model, 10)
    with pytest.raises(ConfigError, match=r"positions for 10 tokens: set data\.max_length=10"):
        check_length(model, 11)
    assert positions(torch.nn.Linear(2, 2)) is None


@pytest.mark.parametrize("blank", ["", "  "])
def test_empty_texts_are_refused_with_file_and_line(world: Path, tmp_path: Path, blank: str) -> None:
    shutil.copytree(world / "glue", tmp_path / "glue")
    file = tmp_path / "glue/RTE/dev.tsv"
    lines = file.read_text().splitlines()
    cells = lines[3].split("\t")
    lines[3] = "\t".join([cells[0], cells[1], blank, *cells[3:]])
    file.write_text("\n".join(lines) + "\n")
    with pytest.raises(ConfigError, match=r"RTE/dev\.tsv, line 4: sentence2 is empty; expected a text"):
        TASKS["rte"].load(tmp_path / "glue")


def test_the_few_empty_texts_of_an_official_file_are_left_out(tmp_path: Path) -> None:
    write_task(tmp_path, "qqp", n_train=5000, n_dev=10)
    file = tmp_path / "QQP/train.tsv"
    header, first, *rest = file.read_text().splitlines()
    cells = first.split("\t")
    cells[header.split("\t").index("question2")] = ""
    file.write_text("\n".join([header, "\t".join(cells), *rest]) + "\n")
    with pytest.warns(UserWarning, match="left out 1 of 5000 lines"):
        data = TASKS["qqp"].load(tmp_path)
    assert len(data["train"]) == 4999
    assert data["train"]["idx"][0] == 1
