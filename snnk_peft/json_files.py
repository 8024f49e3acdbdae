"""Read JSON files that may be damaged or malicious: every fault is a ConfigError."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from snnk_peft.errors import ConfigError

DEEPEST = 64  # nested containers; ours have six levels
LARGEST_JSON = 1 << 26  # bytes; a file of this size still fits into memory when parsed


def read_json(path: str | os.PathLike[str]) -> Any:
    """Read a JSON file; ConfigError if it is not a regular file (a pipe, a folder), or not JSON."""
    path = Path(path)
    if not path.is_file():  # opening a pipe would block until someone writes
        raise ConfigError(f"{path} is {'no file' if os.path.lexists(path) else 'missing'}; expected a JSON file")
    try:
        if path.stat().st_size > LARGEST_JSON:
            raise ConfigError(f"{path} has {path.stat().st_size:,} bytes; expected at most {LARGEST_JSON:,} of JSON")
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read as text ({error}); copy or download it again") from error
    return parse_json(text, str(path))


def parse_json(text: str, where: str) -> Any:
    """Parse a JSON text, called `where` in messages.

    Raises:
        ConfigError: not JSON, nested too deeply, or with integers too large for other programs.
    """
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        what = "is nested too deeply" if isinstance(error, RecursionError) else f"is not valid JSON ({error})"
        raise ConfigError(f"{where} {what}; copy or download it again") from error
    check_limits(found, where)
    return found


def check_limits(found: object, where: str) -> None:
    """Raise ConfigError if a JSON value is nested too deeply, or holds a number that other programs cannot read."""
    level: list[Any] = [found]
    depth = 0
    while level:
        if depth > DEEPEST:
            raise ConfigError(f"{where} is nested more than {DEEPEST} deep; copy or download it again")
        for value in level:
            if isinstance(value, int) and value.bit_length() > 64:
                raise ConfigError(f"{where} holds a whole number of {value.bit_length()} bits; expected at most 64")
        inner = [value for value in level if isinstance(value, (dict, list))]
        level = [each for value in inner for each in (value.values() if isinstance(value, dict) else value)]
        depth += 1
