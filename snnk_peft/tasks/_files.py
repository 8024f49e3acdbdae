"""Bounded reading of files and archives, lists of faults of bounded length, and optional packages.

Only regular files are read, up to a maximum size: a pipe would wait forever, a device never ends. An archive is read
within bounds, whatever its headers claim.
"""

from __future__ import annotations

import errno
import importlib
import io
import lzma
import stat
import tarfile
import zlib
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

from snnk_peft.errors import ConfigError

MAX_FAULTS = 10
"""Faults listed per file; the rest is counted."""
LARGEST = 1 << 30
"""Bytes of the files that are read from one archive, all together; those of the tasks have less than half of it."""
# Raised by archive readers for damaged archives.
DAMAGED = (tarfile.TarError, EOFError, OSError, ValueError, zlib.error, lzma.LZMAError, MemoryError, OverflowError)


def empty_text(column: str, cell: str) -> str | None:
    """Return a message for a text that is only spaces, or None."""
    return None if cell.strip() else f"{column} is empty; expected a text"


def decode(path: Path) -> tuple[list[str], list[str]]:
    """Return the lines of a UTF-8 file without line endings, and a fault for each line that is not UTF-8."""
    lines, faults = [], []
    try:
        content = read_bytes(path)
    except NotRegularError as error:
        raise ConfigError(f"{path} is {error.strerror}") from error
    raw = content.removeprefix(b"\xef\xbb\xbf").split(b"\n")
    while raw and not raw[-1].strip():
        raw.pop()
    for number, line in enumerate(raw, start=1):
        if b"\0" in line:
            faults.append(f"{path}, line {number}: a NUL byte; expected UTF-8 text (is it UTF-16, or damaged?)")
        try:
            lines.append(line.removesuffix(b"\r").decode("utf-8"))
        except UnicodeDecodeError as error:
            faults.append(
                f"{path}, line {number}: byte 0x{line[error.start]:02x} at position {error.start + 1} is not UTF-8; "
                "expected UTF-8 text (convert the file, for example with iconv)"
            )
    return lines, faults


def listed(names: Iterable[str]) -> str:
    """Join names with commas; after the twentieth, give the number of others."""
    names = list(names)
    return ", ".join(names[:20]) + (f", ... ({len(names)} in all)" if len(names) > 20 else "")


def capped(faults: list[str], path: Path | str) -> list[str]:
    """Return the first faults of a file, and the number of others."""
    extra = len(faults) - MAX_FAULTS
    return faults if extra <= 0 else [*faults[:MAX_FAULTS], f"{path}: ... and {extra} more"]


class NotRegularError(OSError):
    """Raised for a pipe, a device, a socket or a folder instead of a file, or for a file that is too large."""


def check_regular(path: Path, limit: int | None = None) -> None:
    """Reject anything but a regular file of at most `limit` bytes.

    Raises:
        NotRegularError: not a regular file, or too large.
        OSError: no such file, or a broken link.
    """
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        names = {stat.S_IFIFO: "a pipe", stat.S_IFDIR: "a folder", stat.S_IFSOCK: "a socket"}
        what = names.get(stat.S_IFMT(status.st_mode), "a device")
        raise NotRegularError(errno.EINVAL, f"{what}; expected a regular file: write its content into one", str(path))
    if limit is not None and status.st_size > limit:
        raise NotRegularError(
            errno.EFBIG, f"{status.st_size:,} bytes; expected at most {limit:,}: the file is damaged", str(path)
        )


def read_bytes(path: Path, limit: int | None = None) -> bytes:
    """Read a regular file; raises like `check_regular`."""
    check_regular(path, limit)
    return path.read_bytes()


class Bounded(io.RawIOBase):
    """A file that is read in pieces of at most `LARGEST` bytes, up to a maximum position.

    Args:
        stream: the file to read.
        end: maximum position; None for an uncompressed file, which has a known size.
    """

    def __init__(self, stream: Any, end: int | None):
        super().__init__()
        self._stream, self._end = stream, end

    def read(self, size: int | None = -1, /) -> bytes:
        """Read up to `size` bytes; ValueError for more than `LARGEST`."""
        if size is None or size < 0 or size > LARGEST:
            raise ValueError(f"claims {'all' if size is None or size < 0 else format(size, ',')} bytes in one piece")
        content: bytes = self._stream.read(size)
        self._check(self._stream.tell())
        return content

    def seek(self, offset: int, whence: int = 0, /) -> int:
        if whence == 0:
            self._check(offset)
        place: int = self._stream.seek(offset, whence)
        return place

    def tell(self) -> int:
        place: int = self._stream.tell()
        return place

    def close(self) -> None:
        self._stream.close()
        super().close()

    def _check(self, place: int) -> None:
        if self._end is not None and place > self._end:
            raise ValueError(f"unpacks to more than {self._end:,} bytes")


def require(module: str) -> ModuleType:
    """Import `module` (dotted name); ImportError with the pip command if the package is not installed."""
    package = module.partition(".")[0]
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != package:
            raise
        raise ImportError(
            f"this needs the package {package!r}, which is not installed: pip install snnk-peft[recipes]"
        ) from error
