"""The run folder: what may be in it, what is recorded about the machine, and how a stop is asked for."""

from __future__ import annotations

import glob
import importlib.metadata
import os
import platform
import re
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from lib.belonging import check_settings
from lib.checkpoint import list_checkpoints, read_state
from lib.files import check_writable, remove_leftovers, temporary_name, write_json, write_text, writing
from snnk_peft.errors import ConfigError

CONTENT = (
    "config.yaml", "environment.json", "log.jsonl", "metrics.json", "evaluation.json", "learning_curve.png",
    "checkpoints", "tensorboard", "adapter", "bundle", "model",
    "conversion.json", "calibration.json", "calibration.png", "plan.json", "plan.png",
)  # fmt: skip


_LEFT_OVER = re.compile(r"^\..+\.tmp(\.|$)|^plan\.(json|png)\.part$")  # what a killed process was writing


def check_folder(folder: Path, config: Any, resume: bool, overwrite: bool, leaves: Sequence[str] = ()) -> None:
    """Refuse a folder that this run must not touch; changes nothing.

    Args:
        folder: the run folder; it need not exist.
        config: the resolved settings.
        resume: continue what is there; the settings must agree in everything that decides the weights.
        overwrite: a run folder that is there will be deleted.
        leaves: what such a run writes besides `CONTENT`.

    Raises:
        ConfigError: the folder is in use, holds something else, has nothing to resume, or other settings.
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
    write_text(folder / "config.yaml", config)  # with it the folder is a run, which --resume continues
    write_json(folder / "environment.json", environment(root))


def choose_checkpoint(folder: Path, name: str | None) -> Path | None:
    """The checkpoint to continue from: `name`, or the newest; None if the run was stopped before its first one."""
    found = list_checkpoints(folder)
    if name is None:
        return found[-1] if found else None
    for checkpoint in found:
        if checkpoint.name == name:
            return checkpoint
    available = ", ".join(checkpoint.name for checkpoint in found) or "none"
    raise ConfigError(f"--checkpoint {name}: no such checkpoint in {folder}; available: {available}")


def best_checkpoint(folder: Path) -> Path:
    """The checkpoint with the best score so far, of a finished or an unfinished run."""
    found = list_checkpoints(folder / "checkpoints")
    best = None
    if found:
        best = read_state(found[-1])["run"]["best"]
    if best is None:
        raise ConfigError(f"{folder} has no evaluated checkpoint yet; let the run reach its first evaluation")
    return folder / "checkpoints" / f"step-{best['step']:07d}"


def environment(root: Path) -> dict[str, Any]:
    """Versions, processor, threads and git commit: what someone needs to understand the numbers of a run."""
    packages = {}
    for name in ("torch", "transformers", "peft", "accelerate", "datasets", "snnk-peft"):
        try:
            packages[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            packages[name] = "not installed (run from a source tree)"
    try:
        done = subprocess.run(["git", "rev-parse", "HEAD"], cwd=root, capture_output=True, text=True, check=False)
        commit = done.stdout.strip() or None
    except FileNotFoundError:
        commit = None
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": packages,
        "cpu_count": os.cpu_count(),
        "torch_threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "git_commit": commit,
    }


def peak_memory(device: torch.device) -> int:
    """Bytes: of the tensors on a GPU, or of the whole process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


class StopSignal:
    """Remembers that SIGTERM or SIGINT (Ctrl-C) arrived, so that the loop can save at the next step boundary.

    Only the first Ctrl-C waits for that; a second one ends the program at once.
    """

    def __init__(self) -> None:
        self._number: int | None = None
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            # Not print: the signal may have come in the middle of one.
            os.write(2, b"\nCtrl-C: saving after this step (again: end at once, without saving)\n")
        self._number = number if self._number is None else self._number

    @property
    def name(self) -> str:
        """What asked for the stop; SIGTERM if it was another process that was asked."""
        return "Ctrl-C" if self._number == signal.SIGINT else "SIGTERM"

    @property
    def exit_code(self) -> int:
        """As a shell would report it: 130 for Ctrl-C, 143 for SIGTERM."""
        return 128 + (self._number or signal.SIGTERM)

    def received(self) -> bool:
        """Whether this process was asked to stop."""
        return self._number is not None

    def agreed(self, accelerator: Any) -> bool:
        """Whether any process was asked to stop; all processes must call this together."""
        if accelerator.num_processes == 1:
            return self.received()
        flag = torch.tensor([float(self.received())], device=accelerator.device)
        return bool(accelerator.reduce(flag, "sum").item())
