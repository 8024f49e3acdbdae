"""One writer at a time: the writer of a folder or a file holds a lock on it, from before the work to the end.

The lock is the kernel's (flock), on a file `.NAME.lock` next to the output, so that the folder itself may be deleted or
replaced in the meantime. It ends with its process, however that ends: a killed process leaves a file that nobody holds,
and the next one takes it over. Network file systems share it between machines (NFS since Linux 2.6.12).
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import fcntl
import json
import os
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from snnk_cli.files import check_writable, writing
from snnk_peft.errors import ConfigError

_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
_held: dict[int, Path] = {}
_to_the_end: dict[Path, contextlib.ExitStack] = {}


@contextlib.contextmanager
def alone(path: Path, setting: str = "--output") -> Iterator[None]:
    """Hold an exclusive lock on `path` in a context; system errors there become errors that name a path.

    Args:
        path: a file or folder, which need not exist.
        setting: the setting by which users choose another path.

    Raises:
        ConfigError: another process holds it; nothing was changed.
    """
    place = Path(os.path.realpath(path))
    check_writable(place.parent)
    file, process = place.with_name(f".{place.name}.lock"), os.getpid()
    made = [folder for folder in (place.parent, *place.parent.parents) if not folder.exists()]
    try:
        with writing(path):
            handle = _taken(file, path, setting)
        _held[handle] = file
        try:
            with writing(path, unless_named=True):
                yield
        finally:
            if os.getpid() == process:
                with contextlib.suppress(OSError):
                    file.unlink()  # while it is held, so that no one else can have it
                del _held[handle]
                os.close(handle)
    finally:
        for folder in made:  # if still empty
            with contextlib.suppress(OSError):
                folder.rmdir()


def hold(path: Path) -> None:
    """Hold the lock of `alone` until this process ends; SystemExit if another one holds it."""
    if path.absolute() not in _to_the_end:
        stack = contextlib.ExitStack()
        try:
            stack.enter_context(alone(path))
        except ConfigError as error:
            raise SystemExit(f"error: {error}") from error
        _to_the_end[path.absolute()] = stack
        atexit.register(stack.close)


def _taken(file: Path, path: Path, setting: str) -> int:
    """Open and lock the file, write the holder into it, and return the handle."""
    while True:
        file.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(handle), file.stat()):
                break
        except FileNotFoundError:
            pass  # its holder ended between these two lines, and removed it
        except BlockingIOError:
            holder = os.pread(handle, 4096, 0)
            os.close(handle)
            raise ConfigError(_refusal(holder, path, setting)) from None
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                os.close(handle)
                raise
            print(
                f"note: the file system of {file.parent} does not support locks ({error.strerror}); make sure that "
                f"nothing else writes {path} meanwhile",
                file=sys.stderr,
            )
            break
        os.close(handle)
    told = {"process": os.getpid(), "host": socket.gethostname(), "since": time.strftime("%Y-%m-%d %H:%M:%S")}
    with contextlib.suppress(OSError):  # a full disk is reported by the first file written
        os.ftruncate(handle, 0)
        os.pwrite(handle, json.dumps(told).encode(), 0)
    return handle


def _refusal(holder: bytes, path: Path, setting: str) -> str:
    try:
        told = json.loads(holder)
        who = f"process {told['process']} on {told['host']}, since {told['since']}"
    except (ValueError, KeyError, TypeError):  # the holder has only just started
        who = "another process"
    return (
        f"{path} is being written by {who}; wait until it has ended (its lock ends with it), stop it, or choose "
        f"another {setting}"
    )


def _forget() -> None:
    """Release the locks in a forked worker, which may outlive the run."""
    for handle in _held:
        os.close(handle)
    _held.clear()


os.register_at_fork(after_in_child=_forget)
