"""Files that are either complete or absent: written under a temporary name, flushed to disk, then renamed.

System errors (a full disk, a folder that is not writable) become a `FileError` that names the path and says what to do;
the temporary file is removed. `guarded` reports such errors in one line, not a traceback.
"""

from __future__ import annotations

import contextlib
import errno
import glob
import hashlib
import json
import os
import re
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from snnk_peft.errors import ConfigError, UnsupportedError
from snnk_peft.saved_folder import remove, remove_leftovers, temporary_name

_FULL = "free some space, or write to another disk"
_CLOSED = "choose a folder that you may write to"
_REMEDIES = {
    errno.ENOSPC: _FULL,
    errno.EDQUOT: _FULL,
    errno.EFBIG: "raise the limit on the size of files (ulimit -f), or write to another disk",
    errno.EACCES: _CLOSED,
    errno.EPERM: _CLOSED,
    errno.EROFS: _CLOSED,
    errno.ENOTDIR: "a part of this path is a file; expected folders",
}
# safetensors gives the system error number only in its message.
_OS_ERROR = re.compile(r"\(os error (\d+)\)")


class FileError(ConfigError):
    """A file or folder that cannot be read or written; says which, why, and what to do."""


def file_fault(error: BaseException, path: Path | None = None) -> str | None:
    """Describe a system error for users; None if the error is about something else.

    Args:
        error: an exception, for example an OSError.
        path: the path being written, if the caller knows better than the error.
    """
    number = error.errno if isinstance(error, OSError) and not isinstance(error, ConnectionError) else None
    if isinstance(error, SafetensorError) and (match := _OS_ERROR.search(str(error))):
        number = int(match[1])
    if number is None:
        return None
    where = path or getattr(error, "filename", None) or "a file"
    remedy = _REMEDIES.get(number, "check the path and try again")
    return f"{where}: {os.strerror(number)}; {remedy}"


def check_writable(folder: Path) -> None:
    """Reject a folder that cannot be created or written to, before any work is done."""
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not there.is_dir():
        inside = "" if there == folder else f", but {there} is a file"
        raise ConfigError(f"the output folder is {folder}{inside or ', which is a file'}; expected a folder")
    if not os.access(there, os.W_OK | os.X_OK):
        raise ConfigError(f"the output folder is {folder}, but {there} cannot be written to; choose another folder")


@contextlib.contextmanager
def writing(path: Path, unless_named: bool = False) -> Iterator[None]:
    """Turn system errors inside the context into a FileError about `path`; `unless_named`, about the path they name."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        fault = file_fault(error, None if unless_named and getattr(error, "filename", None) else path)
        if fault is None:
            raise
        raise FileError(fault) from error


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary name next to `path`, for a file or folder that replaces `path` at the end.

    If anything fails before that, it is removed and `path` is unchanged.
    """
    temporary = temporary_name(path)
    with writing(path):
        try:
            yield temporary
            for file in [*temporary.rglob("*"), temporary]:
                flush(file)
            if temporary.is_dir() and path.is_dir():
                shutil.rmtree(path)
            os.replace(temporary, path)
        except BaseException as error:
            remove(temporary)
            # A package's error names the temporary path, which means nothing to users.
            refused = error.__cause__ if isinstance(error, ConfigError) and str(temporary) in str(error) else None
            if refused is not None and (fault := file_fault(refused, path)) is not None:
                raise FileError(fault) from error
            raise


def sha256(path: Path) -> str:
    """Return the hexadecimal digest of a file's content."""
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while block := stream.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def flush(path: Path) -> None:
    """Wait until the file, or the folder's list of entries, is on disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_text(path: Path, text: str) -> None:
    """Replace `path` atomically; a reader sees the old text or the new, never half of it."""
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_json(path: Path, value: Any) -> None:
    """Write indented JSON with `write_text`; NaN is rejected, because JSON has none."""
    write_text(path, json.dumps(value, indent=2, allow_nan=False, ensure_ascii=False) + "\n")


def read_json(path: Path) -> Any:
    """Return the content of a JSON file, or raise a ConfigError that names the file."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: not valid JSON ({error}); the file is damaged") from error


def write_folder(path: Path, fill: Callable[[Path], Any]) -> None:
    """Create the folder `path` with what `fill(temporary_folder)` writes; an existing one is replaced at the end."""
    remove_leftovers(path.parent, f"{glob.escape(path.name)}.*")
    with replacing(path) as temporary:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        fill(temporary)
    flush(path.parent)


STOPPED = 128 + signal.SIGINT
"""Exit code of a program that Ctrl-C ended."""


def guarded(work: Callable[[], int | None]) -> int:
    """Run the work of a recipe; return its exit code.

    Input errors and system errors (files, folders, a full disk) are reported on stderr, with code 2; Ctrl-C gives 130.
    Any other exception is a bug and keeps its traceback.
    """
    try:
        return work() or 0
    except (ConfigError, UnsupportedError) as error:
        fault: str | None = str(error)
    except (OSError, SafetensorError) as error:
        fault = file_fault(error)
        if fault is None:
            raise
    except KeyboardInterrupt:
        print("stopped by Ctrl-C; no incomplete output was left under its final name", file=sys.stderr)
        return STOPPED
    print(f"error: {fault}", file=sys.stderr)
    return 2
