"""Files that are read whole: only regular ones, up to a size. A pipe would wait for ever, a device never ends."""

from __future__ import annotations

import errno
import stat
from pathlib import Path


class NotRegularError(OSError):
    """A pipe, a device, a socket or a folder where a file was expected, or a file that is too large."""


def check_regular(path: Path, limit: int | None = None) -> None:
    """Refuse what is no regular file, or holds more than `limit` bytes.

    Raises:
        NotRegularError: which of the two it is, and what was expected.
        OSError: there is no such file, or links that lead nowhere.
    """
    found = path.stat()
    if not stat.S_ISREG(found.st_mode):
        names = {stat.S_IFIFO: "a pipe", stat.S_IFDIR: "a folder", stat.S_IFSOCK: "a socket"}
        what = names.get(stat.S_IFMT(found.st_mode), "a device")
        raise NotRegularError(errno.EINVAL, f"{what}; expected a regular file: write its content into one", str(path))
    if limit is not None and found.st_size > limit:
        raise NotRegularError(
            errno.EFBIG, f"{found.st_size:,} bytes; expected at most {limit:,}: the file is damaged", str(path)
        )


def read_bytes(path: Path, limit: int | None = None) -> bytes:
    """The content of a regular file; raises like `check_regular`."""
    check_regular(path, limit)
    return path.read_bytes()
