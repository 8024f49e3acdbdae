"""Archives and packed files that are read within bounds, whatever their headers claim and however far they expand."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import tarfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

LARGEST = 1 << 30
"""Bytes of the files that are read from one archive, all together; those of the tasks have less than half of it."""
LONGEST_LINE = 1 << 20
"""Characters of a line of numbers."""
MOST_PACKED = 20
"""Bytes that one packed byte of numbers may become; those of the tasks become about five."""
_SLACK = 1 << 24
# What the readers of archives raise about damaged ones.
DAMAGED = (tarfile.TarError, EOFError, OSError, ValueError, zlib.error, lzma.LZMAError, MemoryError, OverflowError)
_MAGIC: dict[bytes, Any] = {b"\x1f\x8b": gzip.open, b"BZh": bz2.open, b"\xfd7zXZ\x00": lzma.open}


class Bounded(io.RawIOBase):
    """A file that is read in pieces of at most `LARGEST` bytes, and up to a place.

    Args:
        stream: what is read.
        end: places behind it are refused; None for a file that is not packed, and so as long as it is.
    """

    def __init__(self, stream: Any, end: int | None):
        super().__init__()
        self._stream, self._end = stream, end

    def read(self, size: int | None = -1, /) -> bytes:
        """Up to `size` bytes; ValueError for more than `LARGEST`."""
        if size is None or size < 0 or size > LARGEST:
            raise ValueError(f"claims {'all' if size is None or size < 0 else format(size, ',')} bytes in one piece")
        content: bytes = self._stream.read(size)
        self._check(self._stream.tell())
        return content

    def seek(self, offset: int, whence: int = 0, /) -> int:
        """As of a file."""
        if whence == 0:
            self._check(offset)
        place: int = self._stream.seek(offset, whence)
        return place

    def tell(self) -> int:
        """As of a file."""
        place: int = self._stream.tell()
        return place

    def close(self) -> None:
        """And what is read."""
        self._stream.close()
        super().close()

    def _check(self, place: int) -> None:
        if self._end is not None and place > self._end:
            raise ValueError(f"unpacks to more than {self._end:,} bytes")


def unpacked(path: Path) -> Bounded:
    """The content of a file, unpacked if it is packed, of which no more than 2 * `LARGEST` bytes are."""
    with path.open("rb") as stream:
        start = stream.read(6)
    opener = next((opener for magic, opener in _MAGIC.items() if start.startswith(magic)), None)
    return Bounded(path.open("rb"), None) if opener is None else Bounded(opener(path, "rb"), 2 * LARGEST)


def gunzipped(content: bytes) -> bytes:
    """What gzip packed; ValueError for more than `LARGEST` bytes."""
    found, parts = 0, []
    with gzip.GzipFile(fileobj=io.BytesIO(content)) as stream:
        while part := stream.read(1 << 20):
            parts.append(part)
            found += len(part)
            if found > LARGEST:
                raise ValueError(f"unpacks to more than {LARGEST:,} bytes")
    return b"".join(parts)


def lines_of(path: Path) -> Iterator[str]:
    """The lines of a text, plain or packed by gzip (NAME.gz).

    Raises:
        ValueError: a line of more than `LONGEST_LINE` characters, or more than `MOST_PACKED` times the packed bytes.
    """
    packed = path.suffix == ".gz"
    end = path.stat().st_size * MOST_PACKED + _SLACK if packed else None
    read = 0
    with gzip.open(path, "rt", encoding="utf-8") if packed else path.open(encoding="utf-8") as stream:
        while line := stream.readline(LONGEST_LINE + 1):
            read += len(line)
            if len(line) > LONGEST_LINE:
                raise ValueError(f"a line of more than {LONGEST_LINE:,} characters")
            if end is not None and read > end:
                raise ValueError(f"unpacks to more than {MOST_PACKED} times its size")
            yield line
