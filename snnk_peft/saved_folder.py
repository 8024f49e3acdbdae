"""Atomic writes of files and folders: written elsewhere first, then renamed one by one, the config last.

If a full disk or a killed process interrupts a write, the previous content remains. A kill between two renames can
leave new weights next to an older config, whose digest of the weights then does not match (digests.py).
"""

from __future__ import annotations

import contextlib
import glob
import os
import shutil
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

from safetensors import SafetensorError

from snnk_peft.errors import ConfigError

CONFIGS = ("adapter_config.json", "config.json")  # a folder without one is not a model


@contextlib.contextmanager
def written_whole(
    folder: str | os.PathLike[str], outdated: Callable[[Path], bool] = lambda old: False
) -> Iterator[Path]:
    """Provide an empty folder in a context; on exit without an error, its files are moved to `folder`.

    Files with other names are kept, unless they are `outdated` and have no successor.

    Raises:
        ConfigError: the folder cannot be written to; existing files are unchanged.
    """
    target = Path(folder)
    made = [each for each in (target, *target.parents) if not each.exists()]
    temporary = target / f".saving.{os.getpid()}@{socket.gethostname()}.tmp"
    try:
        _remove_leftovers(target)
        staged = temporary / (target.resolve().name or "folder")  # a model card takes its title from the folder's name
        staged.mkdir(parents=True)
        yield staged
        _publish(staged, target, outdated)
    except (OSError, SafetensorError) as error:
        raise ConfigError(
            f"{target} cannot be written ({error}); what was there before is unchanged. Make room, or give another "
            "folder"
        ) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        with contextlib.suppress(OSError):  # stops at the first that is not empty
            for each in made:
                each.rmdir()


def _remove_leftovers(target: Path) -> None:
    """Delete unfinished files of this process, or of a dead one on this machine."""
    host = f"@{socket.gethostname()}.tmp"
    for found in target.glob(f".saving.*{glob.escape(host)}"):
        number = found.name.removeprefix(".saving.").removesuffix(host)
        try:
            if int(number) != os.getpid():
                os.kill(int(number), 0)  # only checks whether it is alive
                continue
        except (ValueError, PermissionError):
            continue
        except (ProcessLookupError, OverflowError):
            pass
        shutil.rmtree(found, ignore_errors=True)


def _publish(staged: Path, target: Path, outdated: Callable[[Path], bool]) -> None:
    for folder, inner, names in os.walk(staged):
        inner.sort()
        home = target / Path(folder).relative_to(staged)
        home.mkdir(exist_ok=True)
        gone = [old for old in home.iterdir() if old.name not in names and old.is_file() and outdated(old)]
        for name in sorted(names, key=lambda name: (name in CONFIGS, name)):
            if name in CONFIGS:
                _remove(gone)
            os.replace(Path(folder) / name, home / name)
        _remove(gone)


def _remove(files: list[Path]) -> None:
    for file in files:
        file.unlink(missing_ok=True)


@contextlib.contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Provide a temporary file name in a context; on exit without an error, the file replaces `path`.

    Leftovers of a killed process under that name are overwritten.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        yield temporary
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
