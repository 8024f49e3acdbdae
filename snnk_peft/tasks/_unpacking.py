"""Archives that are read within bounds, whatever their headers claim."""

from __future__ import annotations

import io
import lzma
import tarfile
import zlib
from typing import Any

LARGEST = 1 << 30
"""Bytes of the files that are read from one archive, all together; those of the tasks have less than half of it."""
# What the readers of archives raise about damaged ones.
DAMAGED = (tarfile.TarError, EOFError, OSError, ValueError, zlib.error, lzma.LZMAError, MemoryError, OverflowError)


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
