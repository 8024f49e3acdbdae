"""A name -> object table that finds its members by importing every module in a folder and its subfolders.

Adding a member means adding a file: `projections/sorf.py` with `@PROJECTIONS.register("sorf")` is enough. Discovery
happens on first use, so importing the package stays cheap.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar

from snnk_peft.errors import ConfigError, UnknownOptionError
from snnk_peft.options import closest

T = TypeVar("T")


def did_you_mean(kind: str, given: object, valid: list[str]) -> str:
    """Return the text "unknown KIND 'GIVEN'; did you mean 'X'? Available: ..."."""
    close = closest(given, valid)
    hint = f"; did you mean {close!r}?" if close else "."
    shown = " ".join(repr(given).split())[:100]
    return f"unknown {kind} {shown}{hint} Available: {', '.join(valid) or 'none'}"


class NamedOptions:
    """Base class whose constructor reports all unknown options at once; see `UnknownOptionError`."""

    def __new__(cls, *args: Any, **given: Any) -> Any:
        """Check the names; the values are checked by the constructor."""
        known = inspect.signature(cls.__init__).parameters
        names = list(known)[1:]
        if not any(p.kind is p.VAR_KEYWORD for p in known.values()) and not given.keys() <= set(names):
            faults = [cls.unknown_option(name, names) for name in given if name not in names]
            # PEFT recognises a newer version's entries in a file by these words, and ignores them with a warning.
            raise UnknownOptionError([*faults[:-1], f"{faults[-1]} (got an unexpected keyword argument)"])
        return object.__new__(cls)

    @classmethod
    def unknown_option(cls, name: str, known: list[str]) -> str:
        """Return a message about an option that the class does not have."""
        return f"{cls.__name__}: {did_you_mean('option', name, known)}"


class Registry(Generic[T]):
    """Members of one kind by name, discovered from the modules of `package`.

    Args:
        kind: name of a member in messages, e.g. "projection".
        package: dotted name of the folder whose modules, including those of its subfolders, register members when
            imported.
    """

    def __init__(self, kind: str, package: str):
        self.kind = kind
        self._package = package
        self._members: dict[str, T] = {}
        self._discovered = False

    def register(self, name: str, member: T | None = None) -> Callable[[T], T]:
        """Add `member` under `name`; without `member`, return a decorator.

        A second, different member is a ConfigError.
        """

        def add(item: T) -> T:
            if name in self._members and self._members[name] is not item:
                raise ConfigError(f"{self.kind} {name!r} is already registered as {self._members[name]!r}")
            self._members[name] = item
            return item

        if member is not None:
            add(member)
        return add

    def _discover(self) -> None:
        if self._discovered:
            return
        self._discovered = True
        package = importlib.import_module(self._package)
        for module in pkgutil.walk_packages(package.__path__, f"{self._package}."):
            if not module.name.rpartition(".")[2].startswith(("_", "base")):
                importlib.import_module(module.name)

    def names(self) -> list[str]:
        """Return all member names, sorted."""
        self._discover()
        return sorted(self._members)

    def fault(self, name: object) -> str | None:
        """Return None for a known name, else the message for a ConfigError."""
        return None if name in self.names() else did_you_mean(self.kind, name, self.names())

    def __getitem__(self, name: str) -> T:
        if (fault := self.fault(name)) is not None:
            raise ConfigError(fault)
        return self._members[name]

    def __contains__(self, name: object) -> bool:
        return name in self.names()

    def __iter__(self) -> Iterator[str]:
        return iter(self.names())

    def __len__(self) -> int:
        return len(self.names())
