"""The command line of a recipe that trains. Nothing here imports torch, so `--help` answers at once."""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lib.config import describe

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Request:
    """What the command line asks for, besides the settings.

    Args:
        command: continues this run; shown when it is stopped.
        resume: continue the run in output.dir.
        checkpoint: from this checkpoint instead of the newest, or None.
        overwrite: delete the run in output.dir first.
        file: of the settings.
        overrides: of single settings, each `section.key=value`.
    """

    command: str
    resume: bool
    checkpoint: str | None
    overwrite: bool
    file: str = ""
    overrides: Sequence[str] = ()


def read_command_line(program: str, settings: type[Any], description: str | None, argv: list[str] | None) -> Request:
    """What the command line asks for; `--help` and faults of its form end the program here.

    Args:
        program: the recipe's file in recipes/.
        settings: the dataclass of its settings.
        description: the text of `--help`.
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
    given = parser.parse_intermixed_args(argv)
    command = resume_command(program, [given.config, *given.overrides])
    return Request(command, given.resume, given.checkpoint, given.overwrite, given.config, given.overrides)


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
