"""Does what lies in a run folder belong to the run that is to be continued there?

Settings, checkpoints and results may come from another run: copied there, restored from a backup, or left behind. What
decides the weights is compared before any work is done, and whatever differs is named.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

import snnk_peft
from lib.checkpoint import list_checkpoints, read_state
from lib.config import flatten, load_config
from lib.files import read_json, sha256
from lib.settings import FREE_ON_RESUME, PATHS
from snnk_peft.errors import ConfigError

REPORT = "metrics.json"


def check_settings(folder: Path, config: Any) -> None:
    """The settings in config.yaml must be those of now in everything that decides the weights."""
    try:
        stored = load_config(type(config), folder / "config.yaml")
    except ConfigError as error:
        raise refusal(folder, [f"{folder / 'config.yaml'}: {fault}" for fault in error.faults]) from error
    if faults := [f"{key} was {before!r} and is now {now!r}" for key, before, now in changes(stored, config)]:
        raise ConfigError(
            [f"--resume in {folder} needs the settings that the run was started with: {faults[0]}", *faults[1:]]
        )


def check_checkpoint(checkpoint: Path, config: Any, records: Sequence[str]) -> None:
    """A checkpoint, and the best one that it names, must be of a run with these settings and of these records.

    Args:
        checkpoint: to continue from.
        config: the resolved settings.
        records: files of the run folder that a continuation reads besides the checkpoint.

    Raises:
        ConfigError: it is damaged, or of another run.
    """
    state = read_state(checkpoint)
    best = state["run"].get("best")
    named = checkpoint if best is None else checkpoint.with_name(f"step-{best['step']:07d}")
    if not named.is_dir():
        raise ConfigError(f"{checkpoint} names {named.name} as the best one, and that is gone; put it back")
    faults = []
    for other in dict.fromkeys((checkpoint, named)):
        found = state if other == checkpoint else read_state(other)
        faults += _strange_settings(other, found, config)
        if found["identity"] != state["identity"]:
            faults.append(f"{other} was saved with other data or batches than {checkpoint.name}")
    folder, known = checkpoint.parent.parent, state.get("records") or {}
    for name in records:
        file = folder / name
        if not file.is_file():
            faults.append(f"{file} is missing, which {checkpoint.name} goes with")
        elif name in known and sha256(file) != known[name]:
            faults.append(f"{file} is not the file that {checkpoint.name} was saved with: it was altered or exchanged")
    if faults:
        advice = "Put back what belongs to this run, or start it again with --overwrite"
        raise ConfigError([*faults[:-1], f"{faults[-1]}. {advice}"])


def _strange_settings(checkpoint: Path, state: Mapping[str, Any], config: Any) -> list[str]:
    """What differs; earlier versions did not say."""
    if "settings" not in state:
        return []
    try:
        stored = load_config(type(config), yaml.safe_load(state["settings"]))
    except (ConfigError, yaml.YAMLError, AttributeError, TypeError, ValueError) as error:
        raise refusal(checkpoint.parent.parent, [f"{checkpoint / 'state.json'}: {error}"]) from error
    return [
        f"{checkpoint} is of another run: {key} was {before!r} there and is {now!r} here"
        for key, before, now in changes(stored, config)
    ]


def check_finished(folder: Path, common: Mapping[str, Any]) -> None:
    """metrics.json, whose presence says that the run is complete, must be this run's.

    Args:
        folder: the run folder.
        common: what every metrics.json says of such a run: task, method, seed, config.

    Raises:
        ConfigError: it is not.
    """
    file = folder / REPORT
    report = read_json(file)
    faults = []
    if not isinstance(report, dict) or not isinstance(report.get("config"), dict):
        faults.append("it has no settings (config)")
    else:
        here = json.loads(json.dumps(common))
        before, now = (flatten({key: given.get(key) for key in here}) for given in (report, here))
        # A setting that did not exist when the run was made is not in its report.
        faults = [
            f"{key} is {before[key]!r} there and {now[key]!r} here"
            for key in sorted(before.keys() & now.keys())
            if before[key] != now[key] and not key.removeprefix("config.").startswith(FREE_ON_RESUME)
        ]
        faults += [f"{key} is {before[key]!r} there" for key in sorted(before.keys() - now.keys())]
    if not faults and (found := list_checkpoints(folder / "checkpoints")):
        run = read_state(found[-1])["run"]
        mine = {"best_step": (run.get("best") or {}).get("step"), "train_seconds": run.get("train_seconds")}
        faults = [
            f"{key} is {report.get(key)!r} there and {value!r} in {found[-1].name}"
            for key, value in mine.items()
            if report.get(key) != value
        ]
    if faults:
        head = f"{file} is not the report of this run; move it away to continue the run, or restore the whole folder"
        raise ConfigError([head, *faults])


def reported_settings(config: Any, paths: Sequence[tuple[str, str]]) -> dict[str, Any]:
    """The settings as metrics.json has them: paths of this machine are of no use to a reader of the numbers.

    Args:
        config: the resolved settings.
        paths: (section, key) of those that are paths, besides those of the data.
    """
    settings = dataclasses.asdict(config)
    del settings["output"]
    settings["data"] = {key: value for key, value in settings["data"].items() if key not in PATHS}
    for section, key in paths:
        del settings[section][key]
    return settings


def changes(stored: Any, config: Any) -> list[tuple[str, Any, Any]]:
    """(name, before, now) of the settings that decide the weights and differ."""
    before, now = flatten(dataclasses.asdict(stored)), flatten(dataclasses.asdict(config))
    return [
        (key, before.get(key), now.get(key))
        for key in sorted(before.keys() | now.keys())
        if before.get(key) != now.get(key) and not key.startswith(FREE_ON_RESUME)
    ]


def refusal(folder: Path, faults: list[str]) -> ConfigError:
    """A run that another version wrote, and that this one cannot continue for these reasons."""
    file = folder / "environment.json"
    try:
        written = read_json(file)
        version = written["packages"]["snnk-peft"]
    except (ConfigError, KeyError, TypeError):
        written, version = {}, "unknown"
    return ConfigError(
        [
            f"{folder} cannot be continued by snnk-peft {snnk_peft.__version__}; it was written by version {version}, "
            f"git commit {written.get('git_commit') or 'unknown'}: continue it with that one, or start again with "
            "--overwrite",
            *faults,
        ]
    )
