"""Running an experiment, and what is told when it goes wrong."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lib.command_line import Request, read_command_line
from lib.config import load_config
from lib.experiment import Experiment
from lib.files import FileError
from lib.guard import guarded
from lib.processes import lost_process
from lib.run import run
from lib.run_folder import choose_checkpoint
from lib.terminal import quiet
from snnk_peft.errors import ConfigError


def launch(recipe: type[Experiment[Any]], description: str | None, argv: list[str] | None) -> int:
    """Read settings from the command line and run; returns the exit code of `perform`.

    Args:
        recipe: the experiment.
        description: the text of `--help`.
        argv: the arguments, or None for those of this process.
    """
    return train(recipe, read_command_line(recipe.program, recipe.settings, description, argv))


def train(recipe: type[Experiment[Any]], request: Request) -> int:
    """Run an experiment with the settings that the command line names; returns the exit code of `perform`."""
    return perform(lambda: recipe(load_config(recipe.settings, request.file, request.overrides)), request)


def perform(prepare: Callable[[], Experiment[Any]], request: Request) -> int:
    """Run an experiment; returns the exit code (0 done, 1 diverged, 2 wrong input, 130 or 143 stopped).

    Args:
        prepare: makes the experiment; a ConfigError if the settings are wrong.
        request: what the command line asks for.
    """
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
