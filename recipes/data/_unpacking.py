"""Packed files that are read within bounds, however far they expand."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from snnk_peft.tasks._files import LARGEST, Bounded

LONGEST_LINE = 1 << 20
"""Characters of a line of numbers."""
MOST_PACKED = 20
"""Bytes that one packed byte of numbers may become; those of the tasks become about five."""
_SLACK = 1 << 24
_MAGIC: dict[bytes, Any] = {b"\x1f\x8b": gzip.open, b"BZh": bz2.open, b"\xfd7zXZ\x00": lzma.open}


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
