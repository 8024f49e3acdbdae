"""Options, declared once: default, type, range, choices and help in one place, for every dataclass of settings.

    scale: float = option(1.0, "factor on the input", above=0)

`option_faults` checks all of a dataclass and collects what is wrong; `documented` writes the help into its docstring.
"""

from __future__ import annotations

import dataclasses
import inspect
import textwrap
import typing
from collections.abc import Mapping
from typing import Any, TypeVar

from snnk_peft.registry import did_you_mean

KEY = "snnk_option"
Settings = TypeVar("Settings", bound=type)


@dataclasses.dataclass(frozen=True)
class Option:
    """What is known about one field.

    Args:
        help: one sentence or two.
        kind: bool, int, float, str, list or dict; None leaves the type to other checks.
        optional: whether None is a value.
        choices: the values of a string.
        low: the least number.
        above: a number that the value must exceed.
    """

    help: str
    kind: type | None = None
    optional: bool = False
    choices: tuple[str, ...] = ()
    low: float | None = None
    above: float | None = None

    def fault(self, where: str, name: str, value: Any) -> str | None:
        """A message about a value that does not fit, or None."""
        if value is None and self.optional:
            return None
        if self.choices:
            return None if value in self.choices else f"{where}: {did_you_mean(name, value, list(self.choices))}"
        if self.kind is None or self._fits(value):
            return None
        return f"{where} is {value!r}; expected {self.expected()}"

    def _fits(self, value: Any) -> bool:
        if self.kind in (int, float):
            number = isinstance(value, int if self.kind is int else (int, float)) and not isinstance(value, bool)
            return number and (self.low is None or value >= self.low) and (self.above is None or value > self.above)
        wanted = {list: (list, tuple), dict: Mapping}.get(typing.cast(Any, self.kind), self.kind)
        return isinstance(value, wanted)  # type: ignore[arg-type]

    def expected(self) -> str:
        """What fits, in words."""
        names: dict[Any, str] = {bool: "True or False", int: "an integer", float: "a number", str: "a string"}
        text = {**names, list: "a list", dict: "a dict of arguments"}[self.kind]
        text += f" >= {self.low:g}" if self.low is not None else ""
        text += f" > {self.above:g}" if self.above is not None else ""
        return f"{text}, or None" if self.optional else text


def option(default: Any, help: str, **known: Any) -> Any:
    """A dataclass field; the type follows from a default that is not None.

    Args:
        default: the value, or for lists and dicts the class, `list` or `dict`.
        help: what it does.
        **known: further fields of `Option`.
    """
    made = isinstance(default, type)
    kind = known.pop("kind", default if made else None if default is None else type(default))
    metadata = {KEY: Option(help, kind=kind, optional=known.pop("optional", default is None), **known)}
    given: dict[str, Any] = {"default_factory": default} if made else {"default": default}
    return dataclasses.field(**given, metadata=metadata)


def options_of(cls: Any) -> dict[str, Option]:
    """The options of a dataclass, or of an instance, by name."""
    return {field.name: field.metadata[KEY] for field in dataclasses.fields(cls) if KEY in field.metadata}


def option_faults(where: str, settings: Any) -> list[str]:
    """Messages about every value that does not fit its option, each starting with the path of the field."""
    found = (
        known.fault(f"{where}.{name}", name, getattr(settings, name)) for name, known in options_of(settings).items()
    )
    return [fault for fault in found if fault is not None]


def documented(cls: Settings) -> Settings:
    """Put the options of a dataclass into its docstring, as its arguments."""
    lines = ["Args:"]
    for name, known in options_of(cls).items():
        lines += textwrap.wrap(f"{name}: {known.help}", 115, initial_indent="    ", subsequent_indent="        ")
    text, mark, rest = inspect.cleandoc(cls.__doc__ or "").partition("\n\nExample:")
    cls.__doc__ = "\n".join([text, "", *lines]) + (mark + rest if mark else "") + "\n"
    return cls
