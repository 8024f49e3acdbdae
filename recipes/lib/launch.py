"""The command line of a recipe that trains. Torch is imported once it is read, so that `--help` answers at once."""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lib.config import describe, load_config
from lib.experiment import Experiment

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Request:
    """What the command line asks for, besides the settings.

    Args:
        command: continues this run; shown when it is stopped.
        resume: continue the run in output.dir.
        checkpoint: from this checkpoint instead of the newest, or None.
        overwrite: delete the run in output.dir first.
    """

    command: str
    resume: bool
    checkpoint: str | None
    overwrite: bool


def launch(recipe: type[Experiment[Any]], description: str | None, argv: list[str] | None) -> int:
    """Read settings from the command line and run; returns the exit code of `perform`.

    Args:
        recipe: the experiment.
        description: the text of `--help`.
        argv: the arguments, or None for those of this process.
    """
    parser = argparse.ArgumentParser(
        description=description,
        epilog="settings (default):\n" + "\n".join(describe(recipe.settings)),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("config", help="a YAML file, see recipes/configs")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="settings that replace the file's")
    parser.add_argument("--resume", action="store_true", help="continue the run in output.dir")
    parser.add_argument("--checkpoint", metavar="NAME", help="with --resume: this checkpoint instead of the newest")
    parser.add_argument("--overwrite", action="store_true", help="delete the run in output.dir first")
    given = parser.parse_intermixed_args(argv)
    command = resume_command(recipe.program, [given.config, *given.overrides])

    def prepare() -> Experiment[Any]:
        return recipe(load_config(recipe.settings, given.config, given.overrides))

    return perform(prepare, Request(command, given.resume, given.checkpoint, given.overwrite))


def perform(prepare: Callable[[], Experiment[Any]], request: Request) -> int:
    """Run an experiment; returns the exit code (0 done, 1 diverged, 2 wrong input, 130 or 143 stopped).

    Args:
        prepare: makes the experiment; a ConfigError if the settings are wrong.
        request: what the command line asks for.
    """
    from lib.files import FileError
    from lib.guard import guarded
    from lib.processes import lost_process
    from lib.run import run
    from lib.run_folder import choose_checkpoint
    from lib.terminal import quiet
    from snnk_peft.errors import ConfigError

    quiet()

    def work() -> int:
        experiment = prepare()
        if request.checkpoint and not request.resume:
            raise ConfigError("--checkpoint needs --resume")
        checkpoints = Path(experiment.config.output.dir) / "checkpoints"
        try:
            return run(experiment, request)
        except RuntimeError as error:
            if (cause := lost_process(error)) is None:
                raise
            last = choose_checkpoint(checkpoints, None)
            kept = "no checkpoint had been written yet" if last is None else f"{last.name} is complete"
            print(f"error: {cause}. {kept}; continue with:\n  {request.command}", file=sys.stderr, flush=True)
            return 1
        except FileError as error:
            last = choose_checkpoint(checkpoints, None)
            if last is None:
                raise
            raise FileError(f"{error}. {last.name} is complete; continue from it with:\n  {request.command}") from error

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
    if "ACCELERATE_MIXED_PRECISION" in os.environ:  # set by `accelerate launch`, which does not tell its profile
        python, launcher = "accelerate", ["launch", "--config_file", "PROFILE"]
        return shlex.join([python, *launcher, os.path.relpath(ROOT / "recipes" / program), *arguments, "--resume"])
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    launcher = ["-m", "torch.distributed.run", "--nproc_per_node", str(processes)] if processes > 1 else []
    return shlex.join([python, *launcher, os.path.relpath(ROOT / "recipes" / program), *arguments, "--resume"])
