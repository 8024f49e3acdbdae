"""recipes/finetune.py in several processes on the CPU, and the profiles of `accelerate launch`."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import yaml
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils.launch import prepare_multi_gpu_env, prepare_simple_launcher_cmd_env
from recipe_world import write_world
from safetensors.torch import load_file

from snnk_cli.checkpoint import list_checkpoints, verify
from snnk_cli.processes import launcher_faults
from tests.fresh_process import run_processes, run_python

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = str(ROOT / "recipes/finetune.py")


pytestmark = pytest.mark.slow

# The environment that `accelerate launch` makes of recipes/accelerate/fsdp2.yaml; see the test of that file.
FSDP2 = {
    "ACCELERATE_MIXED_PRECISION": "no",
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_VERSION": "2",
    "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    "FSDP_RESHARD_AFTER_FORWARD": "true",
    "FSDP_STATE_DICT_TYPE": "FULL_STATE_DICT",
    "FSDP_CPU_RAM_EFFICIENT_LOADING": "false",
}
# Profile -> number of processes of its command, whether torch's launcher starts them.
PROFILES = {
    "cpu": (1, False),
    "multi_cpu": (2, True),
    "one_gpu": (1, False),
    "multi_gpu": (4, True),
    "fsdp2": (4, True),
    "deepspeed_zero2": (4, False),
    "deepspeed_zero3": (4, False),
    "multi_node": (8, True),
}
# No dropout: what is left to differ is the order of sums. fp32, ten steps of AdamW.
ROUNDING = {"rtol": 1e-3, "atol": 1e-5}


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`bert/` without dropout and `glue/` (RTE: 40 examples to train on, 10 to score)."""
    folder = write_world(tmp_path_factory.mktemp("world"))
    file = folder / "bert/config.json"
    config = json.loads(file.read_text()) | {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    file.write_text(json.dumps(config))
    return folder


def settings(world: Path, out: Path, *changes: str) -> list[str]:
    """Command-line arguments of a run into `out`: calibrated FFN, an adapter whose matrices are drawn anew."""
    adapter = {"num_features": 4, "projection": "orf", "projection_params": {"redraw_every": 3}}
    content = {
        "task": "rte",
        "model": {"name_or_path": str(world / "bert")},
        "data": {"dir": str(world / "glue")},
        "method": {"name": "snnk", "adapter": adapter, "ffn": {"layers": "top-1"}, "calibrate": True},
        "train": {"epochs": 2, "batch_size": 8, "log_every": 1, "save_every_steps": 2, "device": "cpu"},
        "output": {"dir": str(out), "tensorboard": False, "save_model": True},
    }
    content["train"] |= {"gradient_accumulation": 2, "keep_checkpoints": 9, "eval_batch_size": 3}
    # The last batch is not full, and in the last one of an evaluation a second process has no example.
    content["data"] |= {"max_train_samples": 37, "max_eval_samples": 7}
    file = out.with_name(f"{out.name}.yaml")
    file.write_text(yaml.safe_dump(content))
    return [str(file), *changes]


def environment(**changes: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), **changes}


def run_two(arguments: list[str], code: int = 0, **changes: str) -> str:
    """Both processes' output; both must end with this exit code."""
    done = run_processes([PROGRAM, *arguments], env=environment(**changes))
    output = "".join(text for _, text in done)
    assert [found for found, _ in done] == [code, code], output
    return output


def assert_close(first: Path, second: Path, file: str, **tolerance: float) -> None:
    mine, theirs = load_file(first / file), load_file(second / file)
    assert mine.keys() == theirs.keys()
    for name, value in mine.items():
        torch.testing.assert_close(theirs[name], value, msg=lambda text, name=name: f"{name}: {text}", **tolerance)


def last(run: Path) -> Path:
    return list_checkpoints(run / "checkpoints")[-1]


@pytest.fixture(scope="module")
def one(world: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one process: 8 examples per forward pass, 3 steps per epoch of which the last has 5."""
    run = tmp_path_factory.mktemp("one") / "run"
    done = run_python([PROGRAM, *settings(world, run)], env=environment())
    assert done.returncode == 0, done.stderr
    return run


@pytest.fixture(scope="module")
def two(world: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same global batch in two processes (DDP)."""
    run = tmp_path_factory.mktemp("two") / "run"
    run_two(settings(world, run, "train.batch_size=4"))
    return run


def check_like_one(run: Path, one: Path) -> None:
    """Weights, moments, scores and files are those of one process, up to the order of sums."""
    assert last(run).name == last(one).name == "step-0000006"
    for file in ("model.safetensors", "optimizer.safetensors"):
        assert_close(last(one), last(run), file, **ROUNDING)
    for folder, file in (("adapter", "adapter_model.safetensors"), ("bundle", "model.safetensors")):
        assert_close(one / folder, run / folder, file, **ROUNDING)
    mine, theirs = (json.loads((folder / "metrics.json").read_text()) for folder in (run, one))
    assert mine["examples"] == {"train": 37, "validation": 7}
    for key in ("metrics", "score", "best_step", "examples", "trainable_parameters", "total_parameters"):
        assert mine[key] == theirs[key], key
    rows, expected = (
        [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()] for folder in (run, one)
    )
    assert len(rows) == len(expected)  # one writer
    losses = [[row["loss"] for row in log if "loss" in row] for log in (rows, expected)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    assert sorted(entry.name for entry in run.iterdir()) == sorted(entry.name for entry in one.iterdir())


def test_two_processes_train_as_one(one: Path, two: Path) -> None:
    check_like_one(two, one)
    assert {file.name for file in last(two).glob("rng-*.json")} == {"rng-0.json", "rng-1.json"}


def test_fsdp2_trains_saves_and_resumes_as_one_process(world: Path, one: Path, tmp_path: Path) -> None:
    """Saved whole: a run continues sharded or not, and what it leaves loads anywhere."""
    run = tmp_path / "run"
    arguments = settings(world, run, "train.batch_size=4")
    run_two(arguments, **FSDP2)
    check_like_one(run, one)
    before = {file.name: load_file(file) for file in last(run).glob("*.safetensors")}
    output = run_two([*arguments, "--resume", "--checkpoint", "step-0000004"], **FSDP2)
    assert "continuing after step 4" in output
    after = {file.name: load_file(file) for file in last(run).glob("*.safetensors")}
    for file, values in before.items():
        assert [name for name, value in values.items() if not torch.equal(value, after[file][name])] == []
    # One process goes on where the sharded ones stopped.
    done = run_python([PROGRAM, *settings(world, run), "--resume", "--checkpoint", "step-0000004"], env=environment())
    assert done.returncode == 0, done.stderr
    check_like_one(run, one)


def test_another_number_of_processes_continues(world: Path, one: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    done = run_python([PROGRAM, *settings(world, run)], env=environment())
    assert done.returncode == 0, done.stderr
    arguments = [*settings(world, run), "--resume", "--checkpoint", "step-0000002"]
    output = run_two(arguments, code=2)
    assert "saved with 8 examples per forward pass over all processes; now there are 16, 8 in each of 2" in output
    assert "Continue with train.batch_size=4" in output
    output = run_two([*arguments, "train.batch_size=4"])
    assert "note: saved with 1 processes, continued with 2: the batches are the same" in output
    check_like_one(run, one)
    arguments = [*settings(world, run), "--resume", "--checkpoint", "step-0000004", "train.batch_size=3"]
    done = run_processes([PROGRAM, *arguments], count=3, env=environment())
    assert [code for code, _ in done] == [2, 2, 2]
    assert "3 processes cannot split 8 evenly: continue with 1, 2, 4, 8 processes" in done[0][1]


def test_a_process_that_dies_takes_the_run_down(world: Path, tmp_path: Path) -> None:
    """Started by the profile's own command; SIGKILL leaves the process no chance to say anything."""
    run = tmp_path / "run"
    command = [sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch", "--main_process_port", "0"]
    command += ["--config_file", str(ROOT / "recipes/accelerate/multi_cpu.yaml"), PROGRAM]
    long = ("train.epochs=24", "train.eval_every=end", "output.save_model=false")
    arguments = settings(world, run, "train.batch_size=4", *long)
    with (tmp_path / "output").open("w+") as output:
        launcher = subprocess.Popen(
            [*command, *arguments], env=environment(), stdout=output, stderr=subprocess.STDOUT, text=True
        )
        try:
            deadline = time.monotonic() + 120
            while not (run / "checkpoints").is_dir() or not list_checkpoints(run / "checkpoints"):
                assert launcher.poll() is None, (tmp_path / "output").read_text()
                assert time.monotonic() < deadline
                time.sleep(0.1)
            workers = worker_of(launcher.pid)
            os.kill(workers[1], signal.SIGKILL)
            started = time.monotonic()
            code = launcher.wait(timeout=60)
        finally:
            launcher.kill()
            launcher.wait()
    text = (tmp_path / "output").read_text()
    assert code == 1, text
    assert time.monotonic() - started < 60
    assert "error: process 0 of 2 can no longer reach another process, which was killed or failed" in text
    assert "Signal 9 (SIGKILL)" in text
    assert "accelerate launch --config_file PROFILE recipes/finetune.py" in text
    verify(last(run))
    stopped = last(run).name.removeprefix("step-")
    done = run_python([PROGRAM, *arguments, "train.batch_size=8", "--resume"], env=environment())
    assert done.returncode == 0, done.stderr
    assert f"continuing after step {int(stopped)}" in done.stdout


def worker_of(launcher: int) -> dict[int, int]:
    """Rank -> process id of the processes that a launcher has started."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            variables = (folder / "environ").read_bytes().split(b"\0") if parent == launcher else []
        except OSError:
            continue
        found |= {int(entry[5:]): int(folder.name) for entry in variables if entry.startswith(b"RANK=")}
    return found


# --- profiles --------------------------------------------------------------------------------------------------------


def test_layers_that_run_once_do_so_in_every_process(world: Path, tmp_path: Path) -> None:
    """With balanced classes and a fitted head besides: the batches of both processes bring states and weights."""
    changes = ("method.ffn=null", "method.calibrate=false", "method.cut=1", "train.class_weights=balanced")
    changes += ("method.head=wide", "method.fit_head=true", "method.adapter.projection_params={}")
    runs = tmp_path / "one", tmp_path / "two"
    done = run_python([PROGRAM, *settings(world, runs[0], *changes)], env=environment())
    assert done.returncode == 0, done.stderr
    run_two(settings(world, runs[1], *changes, "train.batch_size=4"))
    assert_close(last(runs[0]), last(runs[1]), "model.safetensors", **ROUNDING)


@pytest.mark.parametrize("file", sorted((ROOT / "recipes/accelerate").iterdir()), ids=lambda file: file.stem)
def test_accelerate_reads_every_profile_as_its_command_says(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    processes, by_torch = PROFILES[file.stem]
    monkeypatch.chdir(ROOT)
    launcher, launch, *words = shlex.split(file.read_text().splitlines()[0].removeprefix("# "))
    assert (launcher, launch) == ("accelerate", "launch")
    args = launch_command_parser().parse_args(words)
    assert args.config_file == f"recipes/accelerate/{file.name}"
    args, _, _ = _validate_launch_command(args)
    assert args.num_processes == processes
    assert (args.multi_gpu or args.use_fsdp) == by_torch
    own_program = args.training_script == "your_program.py"
    assert own_program == args.use_deepspeed
    assert own_program or (Path(args.training_script).is_file() and Path(args.training_script_args[0]).is_file())
    if args.use_deepspeed:
        assert args.zero_stage == int(file.stem[-1])
        return
    args.main_process_port = 0 if args.num_machines == 1 else args.main_process_port
    variables = prepare_multi_gpu_env(args) if by_torch else prepare_simple_launcher_cmd_env(args)[1]
    if file.stem == "fsdp2":
        assert {name: variables[name] for name in FSDP2} == FSDP2
    assert ("train.device=cpu" in args.training_script_args) == (file.stem == "multi_cpu")
    assert (variables.get("ACCELERATE_USE_CPU") == "True") == (file.stem == "cpu")


def test_there_is_a_profile_of_every_kind() -> None:
    assert {file.stem for file in (ROOT / "recipes/accelerate").iterdir()} == set(PROFILES)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without GPUs")
def test_a_profile_for_gpus_says_what_to_do_where_there_are_none(world: Path, tmp_path: Path) -> None:
    arguments = [PROGRAM, *settings(world, tmp_path / "run", "train.device=auto")]
    done = run_python(arguments, env=environment(ACCELERATE_MIXED_PRECISION="no", ACCELERATE_USE_CPU="False"))
    assert done.returncode == 2
    assert "error: accelerate launch asked for GPUs" in done.stderr
    assert "add train.device=cpu" in done.stderr
    assert not (tmp_path / "run").exists()
    done = run_python(
        [str(ROOT / "recipes/score.py"), str(world / "bert"), "--task", "rte", f"data.dir={world / 'glue'}"],
        env=environment(ACCELERATE_MIXED_PRECISION="no", ACCELERATE_USE_CPU="False"),
    )
    assert done.returncode == 2
    assert "or add device=cpu" in done.stderr


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"ACCELERATE_USE_DEEPSPEED": "true"}, "asks for DeepSpeed.*use recipes/accelerate/fsdp2.yaml instead"),
        ({"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "1"}, "FSDP 1; expected fsdp_version: 2"),
        ({**FSDP2, "FSDP_CPU_RAM_EFFICIENT_LOADING": "true"}, "every process starts its SNNK layers; set it to false"),
        ({"LOCAL_WORLD_SIZE": "3"}, "3 processes were started on this machine, which has . GPUs"),
    ],
)
def test_what_a_launcher_cannot_have(variables: dict[str, str], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    on_cpu = "LOCAL_WORLD_SIZE" not in variables
    (fault,) = launcher_faults("cpu" if on_cpu else "auto", cpu=on_cpu)
    assert re.search(message, fault)
