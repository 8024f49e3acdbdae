"""The beginning of a training run: the command line, the run folder, and the state that a stopped run left behind."""

from __future__ import annotations

import argparse
import dataclasses
import os
import shlex
import shutil
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from accelerate import Accelerator

from _lib.checkpoint import discard_newer, load_checkpoint
from _lib.config import describe, dump_yaml, load_config
from _lib.files import FileError
from _lib.guard import guarded
from _lib.loop import RunState
from _lib.run_folder import check_folder, choose_checkpoint, claim_folder
from _lib.terminal import quiet
from snnk_peft.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]
Config = TypeVar("Config")


@dataclass(frozen=True)
class Request(Generic[Config]):
    """What the command line asks for.

    Args:
        config: the checked settings.
        command: continues this run; shown when it is stopped.
        resume: continue the run in output.dir.
        checkpoint: from this checkpoint instead of the newest, or None.
        overwrite: delete the run in output.dir first.
    """

    config: Config
    command: str
    resume: bool
    checkpoint: str | None
    overwrite: bool


def launch(
    program: str,
    description: str | None,
    settings: type[Config],
    run: Callable[[Request[Config]], int],
    argv: list[str] | None,
) -> int:
    """Read the command line and run; returns the exit code (0 done, 1 diverged, 2 wrong input, 130 or 143 stopped).

    Args:
        program: its file in recipes/.
        description: the text of `--help`.
        settings: the dataclass that says which settings there are.
        run: the program.
        argv: the arguments, or None for those of this process.
    """
    parser = argparse.ArgumentParser(
        description=description,
        epilog="settings (default):\n" + "\n".join(describe(settings)),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("config", help="a YAML file, see recipes/configs")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="settings that replace the file's")
    parser.add_argument("--resume", action="store_true", help="continue the run in output.dir")
    parser.add_argument("--checkpoint", metavar="NAME", help="with --resume: this checkpoint instead of the newest")
    parser.add_argument("--overwrite", action="store_true", help="delete the run in output.dir first")
    arguments = parser.parse_intermixed_args(argv)
    quiet()

    def work() -> int:
        config = load_config(settings, arguments.config, arguments.overrides)
        if arguments.checkpoint and not arguments.resume:
            raise ConfigError("--checkpoint needs --resume")
        command = resume_command(program, [arguments.config, *arguments.overrides])
        try:
            return run(Request(config, command, arguments.resume, arguments.checkpoint, arguments.overwrite))
        except FileError as error:
            last = choose_checkpoint(Path(config.output.dir) / "checkpoints", None)  # type: ignore[attr-defined]
            if last is None:
                raise
            raise FileError(f"{error}. {last.name} is complete; continue from it with:\n  {command}") from error

    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        return guarded(work)
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def resume_command(program: str, arguments: Sequence[str]) -> str:
    """The command that continues a run, as it is to be typed in the folder where the run was started.

    Args:
        program: a file in recipes/.
        arguments: of the first start: paths in them are relative to that folder, and so is the program's here.
    """
    # The interpreter by its short name only if that is the one that runs now.
    python = "python" if shutil.which("python") == sys.executable else sys.executable
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    launcher = ["-m", "torch.distributed.run", "--nproc_per_node", str(processes)] if processes > 1 else []
    return shlex.join([python, *launcher, os.path.relpath(ROOT / "recipes" / program), *arguments, "--resume"])


@dataclass
class Opened:
    """A run whose folder may be used.

    Args:
        request: what the command line asked for.
        accelerator: of this process.
        folder: the run folder.
        start: the checkpoint to continue from, or None to begin.
    """

    request: Request[Any]
    accelerator: Accelerator
    folder: Path
    start: Path | None

    @property
    def finished(self) -> bool:
        """Whether there is nothing left to do."""
        asked = self.request
        return asked.resume and asked.checkpoint is None and (self.folder / "metrics.json").is_file()

    def restore(
        self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, identity: Mapping[str, Any]
    ) -> RunState:
        """Fill model, optimizer and generators from `start`, if there is one, then claim the run folder.

        Args:
            model: unwrapped.
            optimizer: unwrapped.
            identity: must equal the identity in the checkpoint (data, number of processes).

        Raises:
            ConfigError: the checkpoint is damaged or belongs to other data; the folder is as it was.
        """
        accelerator, start, state = self.accelerator, self.start, RunState()
        if start is not None:
            saved = load_checkpoint(start, model, optimizer, identity, accelerator.process_index)
            state = RunState(**saved["run"])
            if accelerator.scaler is not None:
                accelerator.scaler.load_state_dict(saved["scaler"])
            before, now = saved.get("torch_threads"), torch.get_num_threads()
            if accelerator.device.type == "cpu" and before != now:
                accelerator.print(
                    f"note: saved with {before} threads, continued with {now}: sums are taken in another order, so the "
                    f"weights will equal those of an uninterrupted run within rounding; OMP_NUM_THREADS={before} "
                    "makes them equal bit for bit"
                )
        accelerator.wait_for_everyone()  # all processes have read it
        if accelerator.is_main_process:
            claim_folder(self.folder, dump_yaml(self.request.config), ROOT, self.request.resume)
            for name in discard_newer(start) if start is not None else []:
                print(f"discarded {name}, which is newer than {start.name}")
        return state


def open_run(request: Request[Any]) -> Opened:
    """Start Accelerate and look at the run folder; nothing is changed yet.

    Raises:
        ConfigError: the folder is in use or does not fit the request, or the precision needs another device.
    """
    train, folder = request.config.train, Path(request.config.output.dir)
    cpu = train.device == "cpu" or not torch.cuda.is_available()
    if cpu and train.mixed_precision == "fp16":
        raise ConfigError("train.mixed_precision is fp16, which needs a CUDA device; use bf16 or no")
    accelerator = Accelerator(cpu=cpu, mixed_precision=train.mixed_precision)
    if accelerator.is_main_process:
        check_folder(folder, dataclasses.asdict(request.config), request.resume, request.overwrite)
    accelerator.wait_for_everyone()
    start = choose_checkpoint(folder / "checkpoints", request.checkpoint) if request.resume else None
    opened = Opened(request, accelerator, folder, start)
    if opened.finished:
        accelerator.print(f"{folder} is finished; its results are in {folder / 'metrics.json'}")
    return opened
