"""Files that are either complete or absent: written under a temporary name, flushed to disk, then renamed.

A temporary name carries the process that uses it, so that what a killed one left can be told from a live one's.
"""

from __future__ import annotations

import glob
import hashlib
import json
import os
import re
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

from snnk_peft.errors import ConfigError


def sha256(path: Path) -> str:
    """Hexadecimal digest of a file's content."""
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while block := stream.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def flush(path: Path) -> None:
    """Wait until the file or the folder's list of names is on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def temporary_name(path: Path) -> Path:
    """Where this process prepares `path`: beside it, hidden."""
    return path.with_name(f".{path.name}.{os.getpid()}@{socket.gethostname()}.tmp")


def remove_leftovers(folder: Path, pattern: str = "*") -> list[str]:
    """Delete what processes of this machine that are no more left under temporary names; returns the names.

    Args:
        folder: where to look, not below it; it need not exist.
        pattern: names of the files or folders that were prepared.
    """
    removed = []
    for entry in sorted(folder.glob(f".{pattern}.tmp")):
        owner = re.fullmatch(rf"\..+\.(\d+)@{re.escape(socket.gethostname())}\.tmp", entry.name)
        if owner is None or _is_alive(int(owner[1])):
            continue
        if entry.is_dir():
            shutil.rmtree(entry)
        else:
            entry.unlink()
        removed.append(entry.name)
    return removed


def _is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        pass  # somebody else's
    return True


def write_text(path: Path, text: str) -> None:
    """Replace `path` in one step; a reader sees the old text or the new, never half of it."""
    temporary = temporary_name(path)
    temporary.write_text(text, encoding="utf-8")
    flush(temporary)
    os.replace(temporary, path)


def write_json(path: Path, value: Any) -> None:
    """`write_text` of indented JSON; NaN is refused, because JSON has none."""
    write_text(path, json.dumps(value, indent=2, allow_nan=False, ensure_ascii=False) + "\n")


def read_json(path: Path) -> Any:
    """The content of a JSON file; a ConfigError names the file otherwise."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})") from error
    except ValueError as error:
        raise ConfigError(f"{path}: not valid JSON ({error}); the file is damaged") from error


def write_folder(path: Path, fill: Callable[[Path], Any]) -> None:
    """Create the folder `path` with what `fill(temporary_folder)` writes; an older one is replaced at the end."""
    remove_leftovers(path.parent, f"{glob.escape(path.name)}.*")
    temporary = temporary_name(path)
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    fill(temporary)
    for file in temporary.rglob("*"):
        flush(file)
    if path.exists():
        shutil.rmtree(path)
    os.replace(temporary, path)
    flush(path.parent)
