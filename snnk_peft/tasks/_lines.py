"""The lines of text files, and what is wrong with them in messages of bounded length."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from snnk_peft.errors import ConfigError
from snnk_peft.tasks._regular import NotRegularError, read_bytes

MAX_FAULTS = 10
"""Faults listed per file; the rest is counted."""


def empty_text(column: str, cell: str) -> str | None:
    """A text has at least one character that is not a space."""
    return None if cell.strip() else f"{column} is empty; expected a text"


def decode(path: Path) -> tuple[list[str], list[str]]:
    """The lines of a UTF-8 file without their ends, and a fault for each line that is not UTF-8."""
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
    """Names with commas between them; behind the twentieth, their number."""
    names = list(names)
    return ", ".join(names[:20]) + (f", ... ({len(names)} in all)" if len(names) > 20 else "")


def capped(faults: list[str], path: Path | str) -> list[str]:
    """The first faults of a file, and how many more there are."""
    extra = len(faults) - MAX_FAULTS
    return faults if extra <= 0 else [*faults[:MAX_FAULTS], f"{path}: ... and {extra} more"]
