"""The parts of a config, as objects or as plain data (JSON, YAML), and the notation of a config with a part."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from snnk_peft.arguments import in_words
from snnk_peft.parts import PARTS, Part
from snnk_peft.registry import did_you_mean

SHORTCUTS = ("adapter", "pooler", "ffn", "attention", "low_rank")  # parts with a field of their own


def part_name(cls: type[Part]) -> str:
    """Return the name under which a part is registered."""
    return next(name for name in PARTS if PARTS[name] is cls)


def part_from(where: str, cls: type[Part], given: object) -> tuple[Any, list[str]]:
    """Build a part from an instance or a plain dict (JSON, YAML) of its fields; also return the faults."""
    if given is None or isinstance(given, cls):
        return given, []
    if not isinstance(given, Mapping):
        return given, [
            f"{where} is {in_words(given)}; expected {cls.__name__}(...), a dict of its fields or None"
            + _elsewhere(given)
        ]
    valid = [f.name for f in dataclasses.fields(cls)]
    wrong = [f"{where}.{did_you_mean('field', key, valid)}" for key in given if key not in valid]
    return (None, wrong) if wrong else (cls(**given), [])


def listed_part(where: str, given: object) -> tuple[Any, list[str]]:
    """Like `part_from`, for an entry of `parts`, which names its part."""
    if isinstance(given, Mapping):
        name = given.get("part")
        if name not in PARTS:
            known = did_you_mean("part", name, PARTS.names())
            return None, [f"{where}.part: {known}. A part of your own is known once its file is imported"]
        return part_from(where, PARTS[str(name)], {key: value for key, value in given.items() if key != "part"})
    if isinstance(given, Part) and any(PARTS[name] is type(given) for name in PARTS):
        return given, []
    kinds = ", ".join(PARTS[name].__name__ for name in PARTS)
    return None, [
        f"{where} is {in_words(given)}; expected one of {kinds}, such as FFNPart(...), or a dict with 'part' and its "
        "fields"
    ]


def config_with(cls: type[Part]) -> str:
    """Return the code that creates a config with such a part."""
    own = next((name for name in SHORTCUTS if PARTS[name] is cls), None)
    return f"SNNKConfig({f'parts=[{cls.__name__}(...)]' if own is None else f'{own}={cls.__name__}(...)'})"


def _elsewhere(given: object) -> str:
    """Return a sentence about where the given object belongs, or an empty string."""
    if isinstance(given, Part):
        return f". This part goes elsewhere: {config_with(type(given))}"
    if isinstance(given, (list, tuple)):
        return ". Several parts of a kind go into parts=[...]"
    return ""
