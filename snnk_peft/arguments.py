"""Checks and descriptions of a function's arguments, before anything is done with them."""

from __future__ import annotations

import functools
import inspect
import math
import os
from collections.abc import Callable, Collection, Mapping
from numbers import Real
from pathlib import Path
from typing import Any, TypeVar, cast

from snnk_peft.errors import ConfigError, UnknownOptionError
from snnk_peft.options import Option
from snnk_peft.registry import did_you_mean

Function = TypeVar("Function", bound=Callable[..., Any])


def in_words(given: object) -> str:
    """Describe an argument, as "the text 'bert-base-uncased'", "the class FFNPart" or "a list"."""
    if given is None:
        return "None"
    if isinstance(given, (str, os.PathLike)):
        kind = "text" if isinstance(given, str) else "path"
        return f"the {kind} {os.fspath(given)[:80]!r}"
    if isinstance(given, type):
        return f"the class {given.__name__}"
    name = type(given).__name__
    return f"{'an' if name[0].lower() in 'aeio' else 'a'} {name}"


def refuse_arguments(function: Callable[..., Any], args: tuple[Any, ...], given: Mapping[str, Any]) -> None:
    """Raise UnknownOptionError for arguments that a function does not accept, and for missing ones."""
    signature = inspect.signature(function)
    try:
        signature.bind(*args, **given)
    except TypeError as error:
        known = {name: each for name, each in signature.parameters.items() if name != "self"}
        by_position = [name for name, each in known.items() if each.kind is each.POSITIONAL_OR_KEYWORD]
        count = len(args) - (len(signature.parameters) - len(known))
        faults = [did_you_mean("argument", name, list(known)) for name in given if name not in known]
        if not faults and count > len(by_position):
            rest = [name for name in known if name not in by_position]
            by_name = f", and by name any of {', '.join(rest)}" if rest else ""
            faults = [f"got {count} arguments by position; expected {', '.join(by_position)}{by_name}"]
        raise UnknownOptionError(f"{function.__qualname__}: {fault}" for fault in faults or [str(error)]) from None


def takes_declared(function: Function) -> Function:
    """Decorate a function to report unknown arguments with the valid ones; see `UnknownOptionError`."""

    @functools.wraps(function)
    def enter(*args: Any, **given: Any) -> Any:
        refuse_arguments(function, args, given)
        return function(*args, **given)

    return cast(Function, enter)


def number_faults(where: str, value: object, kind: type = float, **limits: float) -> list[str]:
    """List the faults of a number (an integer if kind is `int`), with limits as in `Option`, such as `above=0`."""
    fault = Option("", type=kind, **limits).fault(where, value)  # type: ignore[arg-type]
    return [] if fault is None else [fault]


def numbers_faults(where: str, values: object, *, low: float | None = None, above: float | None = None) -> list[str]:
    """List the faults of a non-empty list or array of finite numbers within a limit."""
    known = Option("", type=float, low=low, above=above)
    numbers = list(values) if isinstance(values, Collection) and not isinstance(values, (str, Mapping)) else []
    plain = [float(each) if isinstance(each, Real) and not isinstance(each, bool) else None for each in numbers]
    if plain and all(each is not None and math.isfinite(each) and known.fault("", each) is None for each in plain):
        return []
    limits = known.expected().removeprefix("a number")
    return [f"{where} is {repr(values)[:100]}; expected a list of finite numbers{limits}, one at least"]


def path_of(where: str, given: object) -> Path:
    """Return a string or path as a path.

    Raises:
        ConfigError: neither a string nor a path.
    """
    if isinstance(given, (str, os.PathLike)):
        return Path(given)
    raise ConfigError(f"{where} is {in_words(given)}; expected a path")


def folder_of(where: str, given: object) -> Path:
    """Return the path of a folder that exists or can be created.

    Raises:
        ConfigError: not a path, or the path of a file or of something inside one.
    """
    path = path_of(where, given)
    file = next((each for each in (path, *path.parents) if each.is_file()), None)
    if file is not None:
        inside = "which" if file == path else f"and {str(file)!r}"
        raise ConfigError(f"{where} is {str(path)!r}, {inside} is a file; expected the path of a folder")
    return path
