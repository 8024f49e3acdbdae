"""Atomic writes of files and folders: written elsewhere first, then renamed one by one, the config last.

If a full disk or a killed process interrupts a write, the previous content remains. A kill between two renames can
leave new weights next to an older config, whose digest of the weights then does not match (digests.py). The id of the
process is part of a temporary name, so that leftovers of a killed process can be told from the files of a live one.
"""

from __future__ import annotations

import contextlib
import os
import re
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
    temporary = temporary_name(target / "saving")
    try:
        remove_leftovers(target, "saving.*")
        shutil.rmtree(temporary, ignore_errors=True)  # of a dead process with the same number
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


def temporary_name(path: Path) -> Path:
    """Return the hidden name next to `path` under which this process prepares it."""
    return path.with_name(f".{path.name}.{os.getpid()}@{socket.gethostname()}.tmp")


def remove_leftovers(folder: Path, pattern: str = "*") -> list[str]:
    """Delete temporary files left by dead processes of this machine, and return their names.

    Args:
        folder: folder to search, without its subfolders; it need not exist.
        pattern: glob pattern of the files or folders that were prepared.
    """
    removed = []
    for entry in sorted(folder.glob(f".{pattern}.tmp")):
        owner = re.fullmatch(rf"\..+\.(\d+)@{re.escape(socket.gethostname())}\.tmp", entry.name)
        if owner is None or _is_alive(int(owner[1])):
            continue
        remove(entry)
        removed.append(entry.name)
    return removed


def remove(path: Path) -> None:
    """Delete a file or folder if it exists and can be deleted."""
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink()


def _is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)  # only checks whether it is alive
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        pass  # another user's process
    return True


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
