"""Reports of finished runs: their metrics.json files are stored as the lines of one file per study."""

from __future__ import annotations

import glob
import json
import re
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from snnk_cli.files import read_json, remove_leftovers, write_text
from snnk_peft.errors import ConfigError

Value = TypeVar("Value")
Run = tuple[str, str, int]  # task, method, seed
Report = dict[str, Any]
Rates = dict[str, dict[float, dict[str, float]]]  # method -> learning rate -> task -> score on held-back examples
Table = dict[str, dict[str, list[Report]]]  # task -> method -> one report per seed


def lines_of(study: Path) -> Path:
    """Return the file of a study's finished runs, one per line: model_cards/glue.jsonl for model_cards/glue."""
    return study if study.suffix == ".jsonl" else Path(f"{study.resolve()}.jsonl")


def read_runs(study: Path) -> dict[Run, Report]:
    """Read the stored reports of a study, sorted by task, method and seed; empty if it has no file yet.

    Args:
        study: name or file of the study, see `lines_of`.

    Raises:
        ConfigError: a line is damaged, or the reports are in an earlier layout with one file each.
    """
    file = lines_of(study)
    if not file.is_file():
        if next(file.with_suffix("").glob("*/*/seed*.json"), None) is not None:
            fault = (
                f"{file.with_suffix('')} holds reports as <task>/<method>/seed<k>.json; expected {file}, a line for "
                "each. Rename the folder and give its new name once as --runs to `study.py page` of the study"
            )
            raise _config_error(fault)
        return {}
    found: dict[Run, Report] = {}
    for number, line in enumerate(file.read_bytes().removesuffix(b"\n").split(b"\n"), 1):
        try:
            run, report = _run_of(line)
            if run in found:
                raise ValueError(f"a second report of {'/'.join(map(str, run))}")
        except (ValueError, RecursionError) as error:
            remedy = "restore the file, or delete the line and repeat this run"
            raise _config_error(f"{file}, line {number}: {error}; {remedy}") from error
        found[run] = report
    return dict(sorted(found.items()))


def _run_of(line: bytes) -> tuple[Run, Report]:
    entry = json.loads(line)
    kinds = {"task": str, "method": str, "seed": int, "report": dict}
    if not isinstance(entry, dict) or {key: type(value) for key, value in entry.items()} != kinds:
        raise ValueError("expected an object of task and method (texts), seed (a whole number) and report (an object)")
    return (entry["task"], entry["method"], entry["seed"]), entry["report"]


def _config_error(fault: str) -> Exception:
    return ConfigError(fault)


def collect(runs: Path, study: Path, beside: str | None = None) -> int:
    """Store the reports of finished runs, one writer at a time; return the number that were new or changed.

    Args:
        runs: folder of <task>/<method>/seed<k>/metrics.json, or of <task>/<method>/seed<k>.json.
        study: see `lines_of`; its file is replaced atomically.
        beside: name of a second report of the same run, <beside>.json, which becomes the entry `beside` of the first;
            runs without it are skipped.
    """
    file, stored = lines_of(study), read_runs(study)
    remove_leftovers(file.parent, f"{glob.escape(file.name)}.*")
    changed = 0
    for path in sorted([*runs.glob("*/*/seed*/metrics.json"), *runs.glob("*/*/seed*.json")]):
        task, method, name = path.relative_to(runs).parts[:3]
        if not (number := re.fullmatch(r"seed(\d+)(\.json)?", name)):
            raise _config_error(f"{path}: expected seed and its number as the name of a run; rename or move it")
        run, report = (task, method, int(number[1])), read_json(path)
        if beside is not None and path.name == "metrics.json":
            second = path.with_name(f"{beside}.json")
            if not second.is_file():
                continue
            report[beside] = read_json(second)
        if stored.get(run) != report:
            stored[run] = report
            changed += 1
    if changed:
        write_text(file, "".join(_line(run, report) for run, report in sorted(stored.items())))
    return changed


def _line(run: Run, report: Report) -> str:
    entry = dict(zip(("task", "method", "seed"), run, strict=True)) | {"report": report}
    return json.dumps(entry, allow_nan=False, separators=(",", ":")) + "\n"


def read_reports(study: Path, name: str) -> Table:
    """Return all stored reports by task and method; `name` is that of the study that produces them."""
    table: defaultdict[str, defaultdict[str, list[Report]]] = defaultdict(lambda: defaultdict(list))
    for (task, method, _), report in read_runs(study).items():
        table[task][method].append(report)
    if not table:
        raise _config_error(
            f"no reports in {lines_of(study)} and no finished run; start: python recipes/papers/study.py run {name}"
        )
    return {task: dict(row) for task, row in table.items()}


def alike(settings: Iterable[str], told: str = "{}.") -> str:
    """Return what all runs share, put into `told`, or a warning that they differ."""
    found = sorted(set(settings))
    return told.format(*found) if len(found) == 1 else f"**The runs differ ({' / '.join(found)}): compare with care.**"


def by_model(runs: Mapping[str, Value]) -> dict[str, list[Value]]:
    """Group runs that differ only in their seed: {"a/seed0": x, "a/seed1": y} -> {"a": [x, y]}.

    Args:
        runs: runs by the names of their folders; names that do not end in /seed<k> are kept.
    """
    found: defaultdict[str, list[Value]] = defaultdict(list)
    for name, value in runs.items():
        found[re.sub(r"/seed\d+$", "", name)].append(value)
    return dict(found)


def rates(study: Path) -> Rates:
    """Return method -> learning rate -> task -> score on held-back examples, for rates run on every task of the study.

    Args:
        study: a study whose methods are named <method>@<rate>.
    """
    found: defaultdict[str, defaultdict[float, dict[str, float]]] = defaultdict(lambda: defaultdict(dict))
    for (task, name, _), report in read_runs(study).items():
        method, at, rate = name.rpartition("@")
        if at:
            found[method][float(rate)][task] = report["score_held_back"]
    tasks = {task for tried in found.values() for scores in tried.values() for task in scores}
    whole = {
        method: {rate: scores for rate, scores in tried.items() if scores.keys() == tasks}
        for method, tried in found.items()
    }
    return {method: tried for method, tried in whole.items() if tried}


def chosen_rates(study: Path) -> dict[str, float]:
    """Return the learning rate of every method: the best by mean score of those tried on all tuning tasks."""
    means = {
        method: {rate: statistics.mean(scores.values()) for rate, scores in tried.items()}
        for method, tried in rates(study).items()
    }
    return {method: max(tried, key=lambda rate: tried[rate]) for method, tried in means.items()}
