"""Strict settings: a YAML file plus `section.key=value` overrides become nested dataclasses, or one ConfigError.

A section is a dataclass whose fields are made with `option(default, help, ...)` of snnk_peft/options.py, which also
checks the values. All faults in the file are collected and reported together, unknown keys with the closest valid
name. A section may define `check() -> list[str]` for faults that involve several of its values.

The command line of training recipes is read here as well. Nothing imports torch, so `--help` answers at once.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import os
import re
import shlex
import shutil
import sys
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import yaml

from snnk_peft.errors import ConfigError
from snnk_peft.options import Option, options_of
from snnk_peft.options import option as option  # creates the fields of settings
from snnk_peft.registry import did_you_mean
from snnk_peft.yaml_files import parse_yaml

Section = TypeVar("Section")
# YAML 1.1 reads 1e-3, which people write, as text (it requires 1.0e-3).
_NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?")
ROOT = Path(__file__).resolve().parents[1]
_REQUIRED = dataclasses.MISSING


def load_config(
    cls: type[Section], source: str | Path | Mapping[str, Any] | None, overrides: Sequence[str] = ()
) -> Section:
    """Read `source`, apply the overrides, and check everything.

    Args:
        cls: the dataclass of the whole file.
        source: a YAML file, its content as a mapping, or None to start from the defaults.
        overrides: strings `a.b=value`; the value is YAML, so `null`, `true`, `[q, v]` and `{r: 8}` work as in the file.

    Raises:
        ConfigError: lists every fault of the file and the overrides.
    """
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
    """Read the mapping in a YAML file; a ConfigError names the file and, for syntax errors, the line."""
    try:
        given = parse_yaml(Path(path).read_text(encoding="utf-8"), str(path))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror}); expected a YAML settings file") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from error
    if given is None:
        return {}
    if not isinstance(given, dict):
        raise ConfigError(f"{path}: expected sections such as `train:` at the top level, found {type(given).__name__}")
    return given


def dump_yaml(config: Any) -> str:
    """Return the resolved settings as YAML, in the order of the dataclasses."""
    return yaml.safe_dump(dataclasses.asdict(config), sort_keys=False, allow_unicode=True)


def flatten(mapping: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten nested mappings: {"a": {"b": 1}} -> {"a.b": 1}."""
    flat: dict[str, Any] = {}
    for key, value in mapping.items():
        if isinstance(value, Mapping) and value:
            flat.update(flatten(value, f"{prefix}{key}."))
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def describe(cls: type[Any], prefix: str = "") -> list[str]:
    """Return one line per setting for `--help`: name, default, explanation."""
    lines: list[str] = []
    hints, options = typing.get_type_hints(cls), options_of(typing.cast("Any", cls))
    for field in dataclasses.fields(cls):
        if dataclasses.is_dataclass(hints[field.name]):
            lines += describe(typing.cast("type[Any]", hints[field.name]), f"{prefix}{field.name}.")
            continue
        if field.default_factory is not _REQUIRED:
            default = repr(field.default_factory())
        else:
            default = "required" if field.default is _REQUIRED else repr(field.default)
        known = options[field.name]
        extra = f" One of: {', '.join(map(str, known.choices))}." if known.choices else ""
        lines.append(f"  {prefix}{field.name} ({default}): {known.help}{extra}")
    return lines


def build(cls: type[Section], given: Any, faults: list[str], path: str = "") -> Section | None:
    """Build the dataclass `cls` from a mapping; append faults to `faults`, and return None if there were any."""
    where = path.rstrip(".") or "the settings"
    if not isinstance(given, Mapping):
        faults.append(f"{where}: expected a section with keys, got {given!r}")
        return None
    before = len(faults)
    hints, options = typing.get_type_hints(cls), options_of(typing.cast("Any", cls))
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
            values[name] = _number(given[name], options[name])
            fault = options[name].fault(f"{path}{name}", values[name], yaml=True)
            faults += [fault] if fault else []
        elif field.default is _REQUIRED and field.default_factory is _REQUIRED:
            faults.append(f"{path}{name} is missing: {options[name].help}")
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
        value = parse_yaml(text, name)
    except ConfigError:
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


def _number(value: Any, known: Option) -> Any:
    """Convert `value` to float if the setting is a float and the value is a number, in any notation."""
    kinds = known.kinds()
    written = isinstance(value, str) and _NUMBER.fullmatch(value)
    whole = isinstance(value, int) and not isinstance(value, bool) and int not in kinds
    return float(value) if float in kinds and (written or whole) else value


@dataclass(frozen=True)
class Request:
    """A request from the command line, apart from the settings.

    Args:
        command: the command that continues this run; shown when it is stopped.
        resume: continue the run in output.dir.
        checkpoint: checkpoint to resume from instead of the newest, or None.
        overwrite: delete the run in output.dir first.
        file: settings file, or None if there are only overrides.
        overrides: overrides of single settings, each `section.key=value`.
    """

    command: str
    resume: bool
    checkpoint: str | None
    overwrite: bool
    file: str | None = None
    overrides: Sequence[str] = ()


def read_command_line(program: str, settings: type[Any], description: str | None, argv: list[str] | None) -> Request:
    """Parse the command line; `--help` and usage errors exit the program here.

    Args:
        program: the recipe's file in recipes/.
        settings: the dataclass of its settings.
        description: the text of `--help`.
        argv: the arguments, or None for those of this process.
    """
    parser = argparse.ArgumentParser(
        description=description,
        epilog="settings (default):\n" + "\n".join(describe(settings)),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("config", help="a YAML file, see recipes/configs")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="settings that override the file's")
    parser.add_argument("--resume", action="store_true", help="continue the run in output.dir")
    parser.add_argument("--checkpoint", metavar="NAME", help="with --resume: this checkpoint instead of the newest")
    parser.add_argument("--overwrite", action="store_true", help="delete the run in output.dir first")
    given = parser.parse_intermixed_args(argv)
    command = resume_command(program, [given.config, *given.overrides])
    return Request(command, given.resume, given.checkpoint, given.overwrite, given.config, given.overrides)


def resume_command(program: str, arguments: Sequence[str]) -> str:
    """Return the command that continues a run, for the folder where the run was started.

    Args:
        program: a file in recipes/.
        arguments: arguments of the first start; their paths and the program's are relative to that folder.
    """
    # Use the interpreter's short name only if it resolves to the one running now.
    python = "python" if shutil.which("python") == sys.executable else sys.executable
    if "ACCELERATE_MIXED_PRECISION" in os.environ:  # set by `accelerate launch`, which does not name its profile
        python, launcher = "accelerate", ["launch", "--config_file", "PROFILE"]
        return shlex.join([python, *launcher, os.path.relpath(ROOT / "recipes" / program), *arguments, "--resume"])
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    launcher = ["-m", "torch.distributed.run", "--nproc_per_node", str(processes)] if processes > 1 else []
    return shlex.join([python, *launcher, os.path.relpath(ROOT / "recipes" / program), *arguments, "--resume"])
