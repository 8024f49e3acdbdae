"""Parsing of table cells: texts, words, tags, classes and numbers; ConfigError describes a faulty cell."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from snnk_peft.errors import ConfigError
from snnk_peft.tasks._files import empty_text, listed

_NUMBER = re.compile(r"\s*[-+]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?\s*")
_COMMA = re.compile(r"\s*[-+]?[0-9]+,[0-9]+\s*")
_LIST = re.compile(r"\s*\[\s*(?:['\"].*|[-+.0-9].*)?\]\s*", re.DOTALL)
_EXACT = 2.0**53  # integers below it are exact in 64 bits


def missing(value: Any) -> bool:
    """Return True for a missing value: None, spaces, NaN."""
    return (
        value is None or (isinstance(value, str) and not value.strip()) or (isinstance(value, float) and value != value)
    )


def text(column: str, value: Any) -> str:
    """Parse a non-empty text."""
    if value is not None and not isinstance(value, str):
        raise ConfigError(f"{column} is {_shown(value)}; expected a text")
    if fault := empty_text(column, value or ""):
        raise ConfigError(fault)
    return str(value)


def words(column: str, value: Any) -> list[str]:
    """Parse a list of words, or a text of space-separated words."""
    listed_words = value.split() if isinstance(value, str) else value
    if listed_words is not None and not isinstance(listed_words, (list, tuple)):
        raise ConfigError(f"{column} is {_shown(value)}; expected a list of words")
    if not listed_words:
        raise ConfigError(f"{column} is empty; expected a list of words")
    faults = []
    for at, word in enumerate(listed_words, start=1):
        try:
            text(f"word {at} of {column}", word)
        except ConfigError as error:
            faults += error.faults
    if faults:
        raise ConfigError(faults)
    return list(listed_words)


def tags(column: str, value: Any) -> list[Any]:
    """Parse a list of raw tags, or a text of space-separated tags."""
    if missing(value):
        raise ConfigError(f"{column} is missing; expected a list of tags")
    cells = value.split() if isinstance(value, str) else value
    if not isinstance(cells, (list, tuple)):
        raise ConfigError(f"{column} is {_shown(value)}; expected a list of tags")
    return list(cells)


def several(column: str, value: Any) -> list[Any]:
    """Parse the raw labels of an example, possibly none, or a text of comma-separated labels."""
    if missing(value):
        return []
    cells = value.split(",") if isinstance(value, str) else value
    if not isinstance(cells, (list, tuple)):
        raise ConfigError(f"{column} is {_shown(value)}; expected a list of labels")
    return list(cells)


def class_name(column: str, value: Any) -> str:
    """Parse the name of a class, which may be given as a number or a boolean."""
    if missing(value):
        raise ConfigError(f"{column} is missing; expected a label")
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if not isinstance(value, (str, int, float)):
        raise ConfigError(f"{column} is {_shown(value)}; expected one label")
    return str(value).strip()


def class_id(column: str, value: Any, names: Sequence[str] | None, ids: Mapping[str, int]) -> int:
    """Parse the id of a class; `names` are the source's own names of the ids in the column."""
    if names is not None and isinstance(value, int):  # the Hub uses -1 for hidden labels
        value = names[value] if 0 <= value < len(names) else None
    name = class_name(column, value)
    if name not in ids:
        name = whole_name(name)
    if name not in ids:
        remedy = ""
        if name.isdecimal() and int(name) < len(ids) <= 20:
            numbers = ",".join(map(str, range(len(ids))))
            remedy = f"; if the column numbers them in this order, data.labels=[{numbers}] says so"
        raise ConfigError(f"{column} is {name!r}, which is not among the labels: {listed(ids)}{remedy}")
    return ids[name]


def is_written_list(value: Any) -> bool:
    """Return True if a text is a list as printed by Python or numpy."""
    return isinstance(value, str) and _LIST.fullmatch(value) is not None


def has_decimal_comma(value: Any) -> bool:
    """Return True if a text is a number with a decimal comma."""
    return isinstance(value, str) and _COMMA.fullmatch(value) is not None


def is_torn(value: Any) -> bool:
    """Return True if a text, or one in a list, contains an unpaired surrogate, which UTF-8 cannot encode."""
    if isinstance(value, list):
        return any(isinstance(item, str) and is_torn(item) for item in value)
    return isinstance(value, str) and any("\ud800" <= character <= "\udfff" for character in value)


def start(value: Any) -> str:
    """Return the beginning of a value, for messages."""
    text = repr(value[:40] if isinstance(value, str) else value)
    return text if len(text) <= 60 else f"{text[:60]}..."


def number(column: str, value: Any) -> float:
    """Parse a finite number."""
    if missing(value):
        raise ConfigError(f"{column} is missing; expected a number")
    parsed = or_number(value)
    if isinstance(parsed, bool) or not isinstance(parsed, (int, float)) or not math.isfinite(parsed):
        comma = ", with a point and not a comma" if has_decimal_comma(value) else ""
        raise ConfigError(f"{column} is {_shown(value)}; expected a number{comma}")
    return float(parsed)


def or_number(value: Any) -> Any:
    """Convert a text to a number if it is one; otherwise return it unchanged."""
    if not isinstance(value, str) or _NUMBER.fullmatch(value) is None:
        return value
    for convert in (int, float):
        try:
            return convert(value)
        except ValueError:
            continue
    return value


def is_whole(value: Any) -> bool:
    """Return True if a value is an integer, or the text of one."""
    parsed = or_number(value)
    return (isinstance(parsed, int) and not isinstance(parsed, bool)) or (
        isinstance(parsed, float) and parsed.is_integer() and abs(parsed) < _EXACT
    )


def whole_name(name: str) -> str:
    """Convert "1.0", as pandas writes integers in a column with gaps, to "1"; return anything else unchanged."""
    parsed = or_number(name)
    return str(int(parsed)) if isinstance(parsed, float) and is_whole(parsed) else name


def _shown(value: Any) -> str:
    text = repr(value)
    return (text if len(text) <= 40 else f"{text[:40]}...") + f" ({type(value).__name__})"
