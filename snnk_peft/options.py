"""Options, declared once: default, type, range, choices and help in one place, and one check for all of them.

A field of a dataclass (parts, settings of recipes), or an argument of a constructor (components, projections):

    scale: float = option(1.0, "factor on the input", above=0)
    def __init__(self, scale: Annotated[float, Option("factor on the input", above=0)] = 1.0): ...

The type is the annotation's. `value_faults` checks all values and collects the faults; `documented` writes the help
into the docstring. Nothing else of the package is imported here, so that `--help` of a recipe does not need torch.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import inspect
import operator
import re
import textwrap
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Annotated, Any, TypeVar

OPTION_KEY = "snnk_option"
AnyClass = TypeVar("AnyClass", bound=type)
# Names of types, in Python and in YAML.
TYPE_WORDS: dict[Any, tuple[str, str]] = {
    bool: ("True or False", "true or false"),
    int: ("an integer", "an integer"),
    float: ("a number", "a number"),
    str: ("a string", "a string"),
    list: ("a list", "a list"),
    Sequence: ("a list", "a list"),
    dict: ("a dict of arguments", "a section with keys"),
    Mapping: ("a dict of arguments", "a section with keys"),
    Callable: ("a function", "a function"),
}
MOST = 1 << 28  # entries of a matrix, and so of its rows and columns: a gigabyte in fp32
MOST_SEED = (1 << 63) - 1
LIMITS = {
    "above": (">", operator.gt),
    "low": (">=", operator.ge),
    "below": ("<", operator.lt),
    "high": ("<=", operator.le),
}


def closest(given: object, valid: Iterable[str]) -> str | None:
    """Return the valid name that `given` was probably meant to be."""
    return next(iter(difflib.get_close_matches(str(given).lower(), list(valid), n=1, cutoff=0.5)), None)


@dataclasses.dataclass(frozen=True)
class Option:
    """Description of one value.

    Attributes:
        help: one or two sentences.
        choices: the only allowed values of their types.
        low: the minimum; `high` the maximum.
        above: exclusive lower bound; `below` exclusive upper bound.
        checked: False if the value has its own check.
        type: filled in by `options_of`: the annotation.
    """

    help: str
    choices: tuple[Any, ...] = ()
    low: float | None = None
    high: float | None = None
    above: float | None = None
    below: float | None = None
    checked: bool = True
    type: Any = Any

    def fault(self, where: str, value: Any, yaml: bool = False) -> str | None:
        """Return a message about an invalid value, or None; with `yaml`, in terms of null and true."""
        if not self.checked or self._fits(value):
            return None
        close = closest(value, [choice for choice in self.choices if isinstance(choice, str)])
        hint = f". Did you mean {close!r}?" if close else ""
        return f"{where} is {repr(value)[:100]}; expected {self.expected(yaml)}{hint}"

    def kinds(self) -> tuple[Any, ...]:
        """Return the types of the annotation, with unions split into their members."""
        union = typing.get_origin(self.type) in (typing.Union, types.UnionType)
        return typing.get_args(self.type) if union else (self.type,)

    def _fits(self, value: Any) -> bool:
        # 1 == True, but 1 is not a valid boolean.
        if any(
            isinstance(value, bool) == isinstance(choice, bool)
            and isinstance(value, (str, int, float))
            and value == choice
            for choice in self.choices
        ):
            return True
        if not any(fits_type(value, kind) for kind in self._free_kinds()):
            return False
        # NaN compares false with everything, so it violates every limit.
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        return not number or all(holds(value, limit) for _, holds, limit in self._limits())

    def _free_kinds(self) -> list[Any]:
        """Return the types of which any value in range is valid, except those of the choices."""
        return [kind for kind in self.kinds() if kind not in {type(choice) for choice in self.choices}]

    def _limits(self) -> list[tuple[str, Callable[[Any, Any], bool], float]]:
        return [(*known, getattr(self, name)) for name, known in LIMITS.items() if getattr(self, name) is not None]

    def expected(self, yaml: bool = False) -> str:
        """Describe the valid values."""
        limits = " and ".join(f"{sign} {limit:.10g}" for sign, _, limit in self._limits())
        words = [repr(choice) for choice in self.choices]
        for kind in self._free_kinds():
            if kind is not type(None):
                word = TYPE_WORDS.get(typing.get_origin(kind) or kind, (str(kind),) * 2)[yaml]
                words.append(f"{word} {limits}" if limits and kind in (int, float) else word)
        words = list(dict.fromkeys(words))
        text = " or ".join(part for part in (", ".join(words[:-1]), words[-1]) if part)
        return text + (f", or {'null' if yaml else 'None'}" if type(None) in self.kinds() else "")


def fits_type(value: Any, kind: Any) -> bool:
    """Return whether a value matches an annotated type; unsupported annotations accept everything."""
    origin, inner = typing.get_origin(kind) or kind, typing.get_args(kind)
    if origin is Any:
        return True
    if origin in (typing.Union, types.UnionType):
        return any(fits_type(value, one) for one in inner)
    if origin in (int, float):
        return isinstance(value, int if origin is int else (int, float)) and not isinstance(value, bool)
    if origin in (list, Sequence):
        return isinstance(value, (list, tuple)) and all(fits_type(item, kind) for item in value for kind in inner[:1])
    if origin in (dict, Mapping):
        return isinstance(value, Mapping) and all(isinstance(key, str) for key in value)
    return not isinstance(origin, type) or isinstance(value, origin)


def option(default: Any, help: str, **known: Any) -> Any:
    """Create a dataclass field with a help text and further fields of `Option`.

    `default` is the class `list` or `dict` for an empty one, and `dataclasses.MISSING` for a required field.
    """
    given: dict[str, Any] = {"default_factory": default} if isinstance(default, type) else {"default": default}
    return dataclasses.field(**given, metadata={OPTION_KEY: Option(help, **known)})


@functools.cache
def options_of(cls: Any) -> dict[str, Option]:
    """Return the options by name: the fields of a dataclass, or the arguments of a class or function."""
    if dataclasses.is_dataclass(cls):
        hints = typing.get_type_hints(cls)
        known = {field.name: field.metadata.get(OPTION_KEY) for field in dataclasses.fields(cls)}
    elif isinstance(cls, type):
        merged: dict[str, Option] = {}
        for base in reversed(cls.__mro__):
            own = options_of(vars(base)["__init__"]) if "__init__" in vars(base) else {}
            merged |= {name: known for name, known in own.items() if known.help or name not in merged}
        return merged
    else:
        hints, known = {}, {}
        annotations = typing.get_type_hints(cls, include_extras=True)
        for name, argument in inspect.signature(cls).parameters.items():
            if name == "self" or argument.kind in (argument.VAR_POSITIONAL, argument.VAR_KEYWORD):
                continue
            hint = annotations.get(name, Any)
            hints[name] = typing.get_args(hint)[0] if typing.get_origin(hint) is Annotated else hint
            marks = getattr(hint, "__metadata__", ())
            known[name] = next((mark for mark in marks if isinstance(mark, Option)), Option("", checked=False))
    return {name: dataclasses.replace(found, type=hints[name]) for name, found in known.items() if found is not None}


def value_faults(where: str, options: Mapping[str, Option], values: Mapping[str, Any]) -> list[str]:
    """List the invalid values of options; `where` is a prefix of each name, such as "adapter." or "orf "."""
    found = (options[name].fault(where + name, value) for name, value in values.items() if name in options)
    return [fault for fault in found if fault is not None]


def option_faults(where: str, settings: Any) -> list[str]:
    """List the faults of a dataclass of options."""
    cls: Any = type(settings)
    return value_faults(where, options_of(cls), vars(settings))


def argument_faults(
    where: str, cls: type, given: Mapping[str, Any], kind: str = "", reserved: Sequence[str] = ()
) -> list[str]:
    """List the unknown, reserved and invalid keyword arguments of a class, called `where` in messages."""
    options = {name: known for name, known in options_of(cls).items() if name not in reserved}
    found = []
    for name in given:
        if name not in options:
            close = closest(name, options)
            hint = f". Did you mean {close!r}?" if close else ""
            valid = ", ".join(sorted(options)) or "none"
            found.append(f"{kind} {where!r} parameter {name!r} is unknown; valid: {valid}{hint}".lstrip())
    return found + value_faults(f"{where} ", options, given)


def documented(cls: AnyClass) -> AnyClass:
    """Add the options of a dataclass or constructor to the docstring, before other arguments listed there."""
    lines, declaring = [], typing.cast(Any, cls)
    for name, known in options_of(cls if dataclasses.is_dataclass(cls) else declaring.__init__).items():
        if known.help:
            lines += textwrap.wrap(f"{name}: {known.help}", 115, initial_indent="    ", subsequent_indent="        ")
    text, *rest = re.split(
        r"\n\n(?=(?:Args|Attributes|Raises|Example):\n)", inspect.cleandoc(cls.__doc__ or ""), maxsplit=1
    )
    others, sections = "", "".join(f"\n\n{section}" for section in rest)
    if sections.startswith("\n\nArgs:\n"):
        others, sections = sections.removeprefix("\n\nArgs:"), ""
    if lines:
        cls.__doc__ = "\n".join([text, "", "Args:", *lines]) + others + sections + "\n"
    return cls
