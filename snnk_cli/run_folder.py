"""The run folder: its contents, whether they belong to the run, the record of the machine, and stop signals.

Settings, checkpoints and results may come from another run: copied there, restored from a backup, or left behind. All
settings that affect the weights are compared before any work is done, and differences are reported.
"""

from __future__ import annotations

import contextlib
import dataclasses
import glob
import importlib.metadata
import json
import os
import platform
import re
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import yaml

import snnk_peft
from snnk_cli.checkpoint import list_checkpoints, read_state
from snnk_cli.config import flatten, load_config, read_yaml
from snnk_cli.files import check_writable, read_json, sha256, write_json, write_text, writing
from snnk_cli.settings import FREE_ON_RESUME, PATHS
from snnk_peft.errors import ConfigError
from snnk_peft.saved_folder import remove_leftovers, temporary_name

REPORT = "metrics.json"
CONTENT = (
    "config.yaml", "environment.json", "log.jsonl", "metrics.json", "evaluation.json", "learning_curve.png",
    "checkpoints", "tensorboard", "adapter", "bundle", "model",
    "conversion.json", "calibration.json", "calibration.png", "plan.json", "plan.png",
)  # fmt: skip


_LEFT_OVER = re.compile(r"^\..+\.tmp(\.|$)|^plan\.(json|png)\.part$")  # left by a killed process


def check_folder(folder: Path, config: Any, resume: bool, overwrite: bool, leaves: Sequence[str] = ()) -> None:
    """Reject a folder that this run must not touch, without changing anything.

    Args:
        folder: the run folder; it need not exist.
        config: the resolved settings.
        resume: continue the run; all settings that affect the weights must agree.
        overwrite: an existing run folder will be deleted.
        leaves: names of further files that such a run writes, besides `CONTENT`.

    Raises:
        ConfigError: the folder is not empty, contains something else, has nothing to resume, or has other settings.
    """
    if resume and overwrite:
        raise ConfigError("--resume and --overwrite contradict each other; give one of them")
    check_writable(folder)
    found = [entry.name for entry in folder.iterdir()] if folder.is_dir() else []
    entries = sorted(name for name in found if not _LEFT_OVER.search(name))
    if resume:
        if "config.yaml" not in entries:
            raise ConfigError(f"{folder} holds no run: nothing to resume; leave out --resume to start one")
        check_settings(folder, config)
        return
    if entries and not overwrite:
        raise ConfigError(
            f"{folder} is not empty ({', '.join(entries[:5])}); continue the run with --resume, replace it with "
            "--overwrite, or choose another output.dir"
        )
    strange = [name for name in entries if name not in (*CONTENT, *leaves)]
    if strange:
        raise ConfigError(f"--overwrite would delete {folder}, which holds more than a run: {', '.join(strange[:5])}")


def claim_folder(folder: Path, config: str, root: Path, resume: bool) -> None:
    """Empty the (checked) folder unless `resume`, and write config.yaml and environment.json into it."""
    remove_leftovers(folder.parent, f"{glob.escape(folder.name)}.*")
    with writing(folder):
        if not resume and folder.exists():  # renamed first: a killed process must not leave half a run
            doomed = temporary_name(folder)
            folder.rename(doomed)
            shutil.rmtree(doomed)
        folder.mkdir(parents=True, exist_ok=True)
    for place in (folder, folder / "checkpoints"):
        remove_leftovers(place)
    write_text(folder / "config.yaml", config)  # makes the folder a run, which --resume continues
    write_json(folder / "environment.json", environment(root))


def choose_checkpoint(folder: Path, name: str | None) -> Path | None:
    """Return the checkpoint to continue from: `name`, or the newest; None if the run stopped before its first one."""
    found = list_checkpoints(folder)
    if name is None:
        return found[-1] if found else None
    for checkpoint in found:
        if checkpoint.name == name:
            return checkpoint
    available = ", ".join(checkpoint.name for checkpoint in found) or "none"
    raise ConfigError(f"--checkpoint {name}: no such checkpoint in {folder}; available: {available}")


def best_checkpoint(folder: Path) -> Path:
    """Return the checkpoint with the best score so far, of a finished or an unfinished run."""
    found = list_checkpoints(folder / "checkpoints")
    best = None
    if found:
        best = read_state(found[-1])["run"]["best"]
    if best is None:
        raise ConfigError(f"{folder} has no evaluated checkpoint yet; let the run reach its first evaluation")
    return folder / "checkpoints" / f"step-{best['step']:07d}"


def settings_of(folder: Path) -> dict[str, Any] | None:
    """Return the settings a run was started with; None if `folder` is not a run.

    Raises:
        ConfigError: the run converted a model, which is in its bundle/.
    """
    if not (folder / "config.yaml").is_file():
        return None
    given = read_yaml(folder / "config.yaml")
    if "convert" in given:
        raise ConfigError(f"{folder} is the folder of a conversion; give the model in it, {folder / 'bundle'}")
    return given


def environment(root: Path) -> dict[str, Any]:
    """Record what is needed to understand the figures of a run: versions, processor, threads and git commit."""
    packages = {}
    for name in ("torch", "transformers", "peft", "accelerate", "datasets", "snnk-peft"):
        try:
            packages[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            packages[name] = "not installed (run from a source tree)"
    commit = None
    if (root / "pyproject.toml").is_file():  # a clone; a wheel may be in anyone's repository
        with contextlib.suppress(FileNotFoundError):
            done = subprocess.run(["git", "rev-parse", "HEAD"], cwd=root, capture_output=True, text=True, check=False)
            commit = done.stdout.strip() or None
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": packages,
        "cpu_count": os.cpu_count(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "torch_threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "git_commit": commit,
    }


def peak_memory(device: torch.device) -> int:
    """Return the peak memory in bytes, of the tensors on a GPU, or of the whole process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


class StopSignal:
    """A handler that remembers SIGTERM or SIGINT (Ctrl-C), so that the loop can save at the next step boundary.

    Only the first Ctrl-C waits for that; a second ends the program at once.
    """

    def __init__(self) -> None:
        self._number: int | None = None
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            # Not print: the signal may have interrupted it.
            os.write(2, b"\nCtrl-C: saving after this step (again: end at once, without saving)\n")
        self._number = number if self._number is None else self._number

    @property
    def name(self) -> str:
        """The signal that asked for the stop; SIGTERM if another process received it."""
        return "Ctrl-C" if self._number == signal.SIGINT else "SIGTERM"

    @property
    def exit_code(self) -> int:
        """The exit code as a shell would report it: 130 for Ctrl-C, 143 for SIGTERM."""
        return 128 + (self._number or signal.SIGTERM)

    def received(self) -> bool:
        """Return True if this process was asked to stop."""
        return self._number is not None

    def agreed(self, accelerator: Any) -> bool:
        """Return True if any process was asked to stop; all processes must call this together."""
        if accelerator.num_processes == 1:
            return self.received()
        flag = torch.tensor([float(self.received())], device=accelerator.device)
        return bool(accelerator.reduce(flag, "sum").item())


def check_settings(folder: Path, config: Any) -> None:
    """Check that all settings that affect the weights match those in config.yaml."""
    try:
        stored = load_config(type(config), folder / "config.yaml")
    except ConfigError as error:
        raise refusal(folder, [f"{folder / 'config.yaml'}: {fault}" for fault in error.faults]) from error
    if faults := [f"{key} was {before!r} and is now {now!r}" for key, before, now in changes(stored, config)]:
        raise ConfigError(
            [f"--resume in {folder} needs the settings that the run was started with: {faults[0]}", *faults[1:]]
        )


def check_checkpoint(checkpoint: Path, config: Any, records: Sequence[str]) -> None:
    """Check that a checkpoint, and the best one it names, belong to a run with these settings and records.

    Args:
        checkpoint: checkpoint to continue from.
        config: the resolved settings.
        records: files of the run folder that a resumed run reads besides the checkpoint.

    Raises:
        ConfigError: the checkpoint is damaged, or belongs to another run.
    """
    state = read_state(checkpoint)
    best = state["run"].get("best")
    named = checkpoint if best is None else checkpoint.with_name(f"step-{best['step']:07d}")
    if not named.is_dir():
        raise ConfigError(f"{checkpoint} names {named.name} as the best one, but that is missing; put it back")
    faults = []
    for other in dict.fromkeys((checkpoint, named)):
        found = state if other == checkpoint else read_state(other)
        faults += _strange_settings(other, found, config)
        if found["identity"] != state["identity"]:
            faults.append(f"{other} and {checkpoint.name} were saved with different data or batches")
    folder, known = checkpoint.parent.parent, state.get("records") or {}
    for name in records:
        file = folder / name
        if not file.is_file():
            faults.append(f"{file} is missing; {checkpoint.name} was saved with it")
        elif name in known and sha256(file) != known[name]:
            faults.append(f"{file} is not the file that {checkpoint.name} was saved with: it was changed or replaced")
    if faults:
        advice = "Put back what belongs to this run, or start it again with --overwrite"
        raise ConfigError([*faults[:-1], f"{faults[-1]}. {advice}"])


def _strange_settings(checkpoint: Path, state: Mapping[str, Any], config: Any) -> list[str]:
    """List settings that differ; earlier versions did not record any."""
    if "settings" not in state:
        return []
    try:
        stored = load_config(type(config), yaml.safe_load(state["settings"]))
    except (ConfigError, yaml.YAMLError, AttributeError, TypeError, ValueError) as error:
        raise refusal(checkpoint.parent.parent, [f"{checkpoint / 'state.json'}: {error}"]) from error
    return [
        f"{checkpoint} belongs to another run: {key} was {before!r} there and is {now!r} here"
        for key, before, now in changes(stored, config)
    ]


def check_finished(folder: Path, common: Mapping[str, Any]) -> None:
    """Check that metrics.json, whose presence marks the run as complete, belongs to this run.

    Args:
        folder: the run folder.
        common: the entries that identify the run: task, method, seed, config.

    Raises:
        ConfigError: it belongs to another run.
    """
    file = folder / REPORT
    report = read_json(file)
    faults = []
    if not isinstance(report, dict) or not isinstance(report.get("config"), dict):
        faults.append("it has no settings (config)")
    else:
        here = json.loads(json.dumps(common))
        before, now = (flatten({key: given.get(key) for key in here}) for given in (report, here))
        # A report lacks settings that did not yet exist when the run was made.
        faults = [
            f"{key} is {before[key]!r} there and {now[key]!r} here"
            for key in sorted(before.keys() & now.keys())
            if before[key] != now[key] and not key.removeprefix("config.").startswith(FREE_ON_RESUME)
        ]
        faults += [f"{key} is {before[key]!r} there" for key in sorted(before.keys() - now.keys())]
    if not faults and (found := list_checkpoints(folder / "checkpoints")):
        run = read_state(found[-1])["run"]
        mine = {"best_step": (run.get("best") or {}).get("step"), "train_seconds": run.get("train_seconds")}
        faults = [
            f"{key} is {report.get(key)!r} there and {value!r} in {found[-1].name}"
            for key, value in mine.items()
            if report.get(key) != value
        ]
    if faults:
        head = f"{file} is not the report of this run; move it away to continue the run, or restore the whole folder"
        raise ConfigError([head, *faults])


def reported_settings(config: Any, paths: Sequence[tuple[str, str]]) -> dict[str, Any]:
    """Return the settings for metrics.json, without the paths of this machine.

    Args:
        config: the resolved settings.
        paths: (section, key) of settings that are paths, besides those of the data.
    """
    settings = dataclasses.asdict(config)
    del settings["output"]
    settings["data"] = {key: value for key, value in settings["data"].items() if key not in PATHS}
    for section, key in paths:
        del settings[section][key]
    return settings


def changes(stored: Any, config: Any) -> list[tuple[str, Any, Any]]:
    """Return (name, before, now) of the settings that affect the weights and differ."""
    before, now = flatten(dataclasses.asdict(stored)), flatten(dataclasses.asdict(config))
    return [
        (key, before.get(key), now.get(key))
        for key in sorted(before.keys() | now.keys())
        if before.get(key) != now.get(key) and not key.startswith(FREE_ON_RESUME)
    ]


def refusal(folder: Path, faults: list[str]) -> ConfigError:
    """Return the error for a run of another version that cannot be continued, with the reasons."""
    file = folder / "environment.json"
    try:
        written = read_json(file)
        version = written["packages"]["snnk-peft"]
    except (ConfigError, KeyError, TypeError):
        written, version = {}, "unknown"
    return ConfigError(
        [
            f"{folder} cannot be continued by snnk-peft {snnk_peft.__version__}; it was written by version {version}, "
            f"git commit {written.get('git_commit') or 'unknown'}: continue it with that one, or start again with "
            "--overwrite",
            *faults,
        ]
    )
