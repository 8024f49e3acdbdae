"""Strict settings: a YAML file plus `section.key=value` overrides become nested dataclasses, or one ConfigError.

A section is a dataclass whose fields are made with `setting(default, help, ...)`. Unknown keys, wrong types and values
out of range are collected over the whole file and reported together, each with the closest valid name. A section may
define `check() -> list[str]` for faults that involve several of its values.

The package, and with it torch, is imported where it is needed, so that `--help` answers at once.
"""

from __future__ import annotations

import copy
import dataclasses
import re
import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import yaml

Section = TypeVar("Section")
# YAML 1.1 reads 1e-3 as text (it wants 1.0e-3); people write 1e-3.
_NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?")
_REQUIRED = dataclasses.MISSING


def setting(
    default: Any,
    help: str,
    *,
    low: float | None = None,
    high: float | None = None,
    above: float | None = None,
    choices: Sequence[Any] | None = None,
) -> Any:
    """A dataclass field with its explanation and limits.

    Args:
        default: the value when the file says nothing; `dataclasses.MISSING` makes the key required.
        help: one line for `--help`.
        low: smallest number allowed.
        high: largest number allowed.
        above: numbers must be greater than this.
        choices: the only values allowed.
    """
    metadata = {"help": help, "low": low, "high": high, "above": above, "choices": choices}
    if isinstance(default, (dict, list)):
        return dataclasses.field(default_factory=lambda: type(default)(default), metadata=metadata)
    if default is _REQUIRED:
        return dataclasses.field(metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def load_config(
    cls: type[Section], source: str | Path | Mapping[str, Any] | None, overrides: Sequence[str] = ()
) -> Section:
    """Read `source`, apply the overrides, and check everything.

    Args:
        cls: the dataclass of the whole file.
        source: a YAML file, its content as a mapping, or None to start from the defaults.
        overrides: texts `a.b=value`; the value is YAML, so `null`, `true`, `[q, v]` and `{r: 8}` mean what they say.

    Raises:
        ConfigError: with every fault of the file and of the overrides.
    """
    from snnk_peft.errors import ConfigError

    faults: list[str] = []
    given = copy.deepcopy(dict(source or {})) if isinstance(source, Mapping | None) else read_yaml(source)
    for override in overrides:
        _apply(given, override, faults)
    config = build(cls, given, faults)
    if faults:
        raise ConfigError(faults)
    assert config is not None
    return config


def read_yaml(path: str | Path) -> dict[str, Any]:
    """The mapping in a YAML file; a ConfigError names the file and the line otherwise."""
    from snnk_peft.errors import ConfigError

    try:
        given = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror}); expected a YAML settings file") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from error
    if given is None:
        return {}
    if not isinstance(given, dict):
        raise ConfigError(f"{path}: expected sections such as `train:` at the top, found {type(given).__name__}")
    return given


def dump_yaml(config: Any) -> str:
    """The resolved settings as YAML, in the order of the dataclasses."""
    return yaml.safe_dump(dataclasses.asdict(config), sort_keys=False, allow_unicode=True)


def flatten(mapping: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"a": {"b": 1}} -> {"a.b": 1}."""
    flat: dict[str, Any] = {}
    for key, value in mapping.items():
        if isinstance(value, Mapping) and value:
            flat.update(flatten(value, f"{prefix}{key}."))
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def describe(cls: type[Any], prefix: str = "") -> list[str]:
    """One line per setting, for `--help`: name, default, explanation."""
    lines: list[str] = []
    hints = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        if dataclasses.is_dataclass(hints[field.name]):
            lines += describe(typing.cast("type[Any]", hints[field.name]), f"{prefix}{field.name}.")
            continue
        if field.default_factory is not _REQUIRED:
            default = repr(field.default_factory())
        else:
            default = "required" if field.default is _REQUIRED else repr(field.default)
        choices = field.metadata["choices"]
        extra = f" One of: {', '.join(map(str, choices))}." if choices else ""
        lines.append(f"  {prefix}{field.name} ({default}): {field.metadata['help']}{extra}")
    return lines


def build(cls: type[Section], given: Any, faults: list[str], path: str = "") -> Section | None:
    """An instance of the dataclass `cls` from a mapping; faults are appended, and None returned if there were any."""
    from snnk_peft.registry import did_you_mean

    where = path.rstrip(".") or "the settings"
    if not isinstance(given, Mapping):
        faults.append(f"{where}: expected a section with keys, got {given!r}")
        return None
    before = len(faults)
    hints = typing.get_type_hints(cls)
    fields = {field.name: field for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
    for key in given:
        if key not in fields:
            faults.append(f"{path}{key}: {did_you_mean('setting', key, list(fields))}")
    values: dict[str, Any] = {}
    for name, field in fields.items():
        hint = hints[name]
        if dataclasses.is_dataclass(hint):
            section = given.get(name)
            values[name] = build(
                typing.cast("type[Any]", hint), {} if section is None else section, faults, f"{path}{name}."
            )
        elif name in given:
            values[name] = _checked(given[name], hint, field.metadata, f"{path}{name}", faults)
        elif field.default is _REQUIRED and field.default_factory is _REQUIRED:
            faults.append(f"{path}{name} is missing: {field.metadata['help']}")
    if len(faults) > before:
        return None
    section = cls(**values)
    check = getattr(section, "check", None)
    if check is not None:
        faults.extend(f"{path}{fault}" for fault in check())
    return section


def _apply(given: dict[str, Any], override: str, faults: list[str]) -> None:
    """Write one `a.b=value` into the mapping."""
    name, equals, text = override.partition("=")
    keys = name.split(".")
    if not equals or not all(keys):
        faults.append(f"{override!r}: expected section.key=value, for example train.epochs=1")
        return
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        faults.append(f"{override!r}: the value is not valid YAML; put text with special characters in quotes")
        return
    target = given
    for depth, key in enumerate(keys[:-1]):
        inner = target.get(key)
        if inner is None:
            inner = target[key] = {}
        if not isinstance(inner, dict):
            faults.append(f"{override!r}: {'.'.join(keys[: depth + 1])} is {inner!r}, not a section")
            return
        target = inner
    target[keys[-1]] = value


def _checked(value: Any, hint: Any, limits: Mapping[str, Any], name: str, faults: list[str]) -> Any:
    """`value` converted to `hint` if it fits type and limits; otherwise a fault."""
    from snnk_peft.registry import did_you_mean

    allowed = typing.get_args(hint) if isinstance(hint, types.UnionType) or _is_union(hint) else (hint,)
    if float in allowed and isinstance(value, str) and _NUMBER.fullmatch(value):
        value = float(value)
    if float in allowed and isinstance(value, int) and not isinstance(value, bool) and int not in allowed:
        value = float(value)
    if not any(_fits(value, option) for option in allowed):
        expected = " or ".join(_type_name(option) for option in allowed)
        faults.append(f"{name} is {value!r}; expected {expected}")
        return value
    if limits["choices"] is not None and value not in limits["choices"]:
        faults.append(f"{name}: {did_you_mean('value', value, [str(choice) for choice in limits['choices']])}")
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        low, high, above = limits["low"], limits["high"], limits["above"]
        # Written so that NaN, which compares false with everything, is refused too.
        if low is not None and not value >= low:
            faults.append(f"{name} is {value}; expected at least {low}")
        elif above is not None and not value > above:
            faults.append(f"{name} is {value}; expected more than {above}")
        elif high is not None and not value <= high:
            faults.append(f"{name} is {value}; expected at most {high}")
    return value


def _is_union(hint: Any) -> bool:
    return typing.get_origin(hint) is typing.Union


def _fits(value: Any, hint: Any) -> bool:
    origin = typing.get_origin(hint) or hint
    if origin in (int, float) and isinstance(value, bool):
        return False
    if not isinstance(value, origin):
        return False
    if origin is list:
        (inner,) = typing.get_args(hint)
        return all(_fits(item, inner) for item in value)
    if origin is dict:
        return all(isinstance(key, str) for key in value)
    return True


def _type_name(hint: Any) -> str:
    if hint is type(None):
        return "null"
    names = {int: "a whole number", float: "a number", bool: "true or false", str: "text", dict: "a section with keys"}
    if typing.get_origin(hint) is list:
        return "a list"
    return names.get(typing.get_origin(hint) or hint, str(hint))
