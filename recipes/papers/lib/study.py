"""The studies of the papers: each is one YAML in recipes/papers/studies, read here into tasks, methods and settings.

    about      text of `--help`
    program, config, settings, methods     defaults of every task; settings come before a method's
    tasks      a list, or a mapping from tasks to their own entries; `data` names folders below --data
    further    tasks that are run only on request
    seeds      default of --seeds
    of         a study whose entries are used where this one has none
    only, without   names of its methods
    page       the file in recipes/papers/pages, if its name is not that of the study

A method is a list of settings. One whose name has <places> stands for all combinations of their entries in `for`:
values or, by value, fields for the settings; <place> and <place.field> are replaced.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import yaml

from papers.lib.reports import chosen_rates

PAPERS = Path(__file__).resolve().parents[1]
RECIPES = PAPERS.parent
STUDIES = {file.stem: file for file in sorted((PAPERS / "studies").glob("*.yaml"))}
PRETRAINING = "pretraining"  # the task that other tasks start from
Methods = dict[str, list[str]]


@dataclass(frozen=True)
class Task:
    """An experiment.

    Args:
        program: program file.
        config: settings file.
        methods: settings of each method, including those of the task.
        data: folder below `--data`; several, for the first image in them; "listops_files", which are written; or None.
    """

    program: Path
    config: Path
    methods: Methods
    data: str | list[str] | None = None


@dataclass(frozen=True)
class Study:
    """The runs of a study, and its page.

    Args:
        name: name of its file.
        about: the text of `--help`.
        tasks: all tasks that can be run.
        chosen: default of `--tasks`.
        seeds: default of `--seeds`.
        page: the file in recipes/papers/pages.
        draws: number of fresh draws of features to score each model on, or None.
    """

    name: str
    about: str
    tasks: Mapping[str, Task]
    chosen: list[str]
    seeds: list[int] = field(default_factory=lambda: [0])
    page: str = ""
    draws: int | None = None


def load(name: str) -> Study:
    """Load a study by its name, a key of `STUDIES`."""
    given = entries(name)
    own = given["tasks"] if isinstance(given["tasks"], dict) else dict.fromkeys(given["tasks"])
    every = {**own, **dict.fromkeys(given.get("further", []))}
    methods = expanded(given["methods"])
    for method, module in given.get("needs", {}).items():
        if find_spec(module) is None:
            del methods[method]
    if source := given.get("rates_from"):
        for method, rate in chosen_rates(RECIPES.parent / f"model_cards/{source}.jsonl").items():
            if method in methods:
                methods[method].append(f"train.learning_rate={rate:g}")
    if "rates" in given:
        methods = {
            f"{method}@{rate}": [*settings, f"train.learning_rate={rate}"]
            for method, settings in methods.items()
            for rate in given["rates_of"].get(method, given["rates"])
        }

    of_all = {"": []} if PRETRAINING in given else methods  # methods are then those of the pretraining

    def task(title: str) -> Task:
        mine = every[title] or {}
        shared = [*given.get("settings", []), *mine.get("settings", [])]
        of_task = expanded(mine["methods"]) if "methods" in mine else of_all
        program, config = (mine.get(key, given.get(key)) for key in ("program", "config"))
        return Task(
            program_file(program),
            settings_file(config.format(task=title)),
            {method: [*shared, *settings] for method, settings in of_task.items()},
            mine.get("data"),
        )

    tasks = {title: task(title) for title in every}
    if first := given.get(PRETRAINING):
        tasks[PRETRAINING] = Task(program_file(first["program"]), settings_file(first["config"]), methods)
    rest = {key: given[key] for key in ("seeds", "draws") if key in given}
    return Study(name, given["about"], tasks, list(own), page=given.get("page", name), **rest)


def entries(name: str) -> dict[str, Any]:
    """Read the entries of a study's file, completed with those of its study `of`."""
    given = yaml.safe_load(STUDIES[name].read_text(encoding="utf-8"))  # without torch, for `--help`
    if other := given.pop("of", None):
        known = entries(other)
        without = {"rates_from", "further", "page", *given}
        given = {**{key: value for key, value in known.items() if key not in without}, **given}
    methods, without = given["methods"], given.get("without", ())
    only = given.get("only", methods)
    return {**given, "methods": {key: methods[key] for key in methods if key in only and key not in without}}


def expanded(methods: Mapping[str, Any]) -> Methods:
    """Expand the methods to full names, each with its settings in one list."""
    found: Methods = {}
    for name, given in methods.items():
        if not isinstance(given, dict):
            found[name] = list(flat(given))
            continue
        axes = {
            place: values if isinstance(values, dict) else {value: {} for value in values}
            for place, values in given["for"].items()
        }
        for chosen in itertools.product(*axes.values()):
            texts = {place: str(value) for place, value in zip(axes, chosen, strict=True)}
            for place, value in zip(axes, chosen, strict=True):
                texts |= {f"{place}.{key}": str(text) for key, text in axes[place][value].items()}
            found[filled(name, texts)] = [filled(setting, texts) for setting in flat(given["settings"])]
    return found


def filled(text: str, texts: Mapping[str, str]) -> str:
    """Replace the <places> in a text."""
    return re.sub(r"<([\w.]+)>", lambda match: texts[match[1]], text)


def flat(settings: list[Any]) -> Iterator[str]:
    """Flatten nested lists of settings, as YAML aliases produce them."""
    for each in settings:
        if isinstance(each, list):
            yield from flat(each)
        else:
            yield each


def program_file(name: str) -> Path:
    """Return a program of the papers, or else one of recipes/."""
    own = PAPERS / "programs" / name
    return own if own.is_file() else RECIPES / name


def settings_file(name: str) -> Path:
    """Return a settings file of the papers, or else one in recipes/configs."""
    own = PAPERS / "configs" / name
    return own if own.is_file() else RECIPES / "configs" / name
