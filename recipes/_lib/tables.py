"""Tables from many runs: their metrics.json files are copied, read by task and method, and set as Markdown."""

from __future__ import annotations

import argparse
import json
import math
import re
import statistics
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

# What imports torch is imported in the functions, so that `--help` answers at once.

ROOT = Path(__file__).resolve().parents[2]
Rates = dict[str, dict[float, dict[str, float]]]  # method -> learning rate -> task -> score on held-back examples
Value = TypeVar("Value")
Table = dict[str, dict[str, list[dict[str, Any]]]]  # task -> method -> one report per seed


def main(
    description: str | None,
    folder: str,
    write: Callable[..., None],
    argv: list[str] | None,
    also: Mapping[str, tuple[Path, str]] | None = None,
) -> int:
    """Read the command line of a program that renders a page; 0 done, 2 nothing to render.

    Args:
        description: the text of `--help`.
        folder: the name below runs and below model_cards; recipes/sweep_<folder>.py makes the runs.
        write: copies reports and renders, from the folder of the runs, that of the page, and the files of `also`.
        argv: the arguments, or None for those of this process.
        also: name of a further option -> default file and help; `write` gets it by that name.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    runs, cards = ROOT / "runs" / folder, ROOT / "model_cards" / folder
    parser.add_argument("--runs", type=Path, default=runs, help=f"folder of recipes/sweep_{folder}.py")
    parser.add_argument("--out", type=Path, default=cards, help="where files and page go")
    for name, (file, text) in (also or {}).items():
        parser.add_argument(f"--{name}", type=Path, default=file, help=text)
    arguments = parser.parse_args(argv)
    from _lib.guard import guarded

    further = {name: getattr(arguments, name) for name in also or {}}
    return guarded(lambda: write(arguments.runs, arguments.out, **further))


def collect(runs: Path, out: Path, beside: str | None = None) -> int:
    """Copy the reports of finished runs; returns how many were new or changed.

    Args:
        runs: folder of <task>/<method>/seed<k>/metrics.json.
        out: folder of the copies, <task>/<method>/seed<k>.json.
        beside: name of a second report of the same run, <beside>.json, which becomes the entry `beside` of the copy;
            runs without it are left.
    """
    from _lib.files import read_json, write_json

    changed = 0
    for file in sorted(runs.glob("*/*/seed*/metrics.json")):
        task, method, seed = file.relative_to(runs).parts[:3]
        target, report = out / task / method / f"{seed}.json", read_json(file)
        if beside is not None:
            second = file.with_name(f"{beside}.json")
            if not second.is_file():
                continue
            report[beside] = read_json(second)
        if not target.is_file() or read_json(target) != report:
            target.parent.mkdir(parents=True, exist_ok=True)
            write_json(target, report)
            changed += 1
    return changed


def read_reports(out: Path, sweep: str) -> Table:
    """All stored reports by task and method; `sweep` is the program that makes them."""
    from _lib.files import read_json
    from snnk_peft.errors import ConfigError

    table: defaultdict[str, defaultdict[str, list[dict[str, Any]]]] = defaultdict(lambda: defaultdict(list))
    for file in sorted(out.glob("*/*/seed*.json")):
        table[file.parts[-3]][file.parts[-2]].append(read_json(file))
    if not table:
        raise ConfigError(f"no */*/seed*.json in {out} and no finished run; run {sweep} first")
    return {task: dict(row) for task, row in table.items()}


def rates(folder: Path) -> Rates:
    """method -> learning rate -> task -> score on held-back examples, of rates that ran on every task of the folder.

    Args:
        folder: of reports, <task>/<method>@<rate>/seed<k>.json.
    """
    # Read without `_lib.files`, which loads torch: recipes/sweep_glue.py asks before it knows whether help is wanted.
    found: defaultdict[str, defaultdict[float, dict[str, float]]] = defaultdict(lambda: defaultdict(dict))
    for file in sorted(folder.glob("*/*@*/seed*.json")):
        method, _, rate = file.parts[-2].rpartition("@")
        found[method][float(rate)][file.parts[-3]] = json.loads(file.read_text(encoding="utf-8"))["score_held_back"]
    tasks = {task for tried in found.values() for scores in tried.values() for task in scores}
    whole = {
        method: {rate: scores for rate, scores in tried.items() if scores.keys() == tasks}
        for method, tried in found.items()
    }
    return {method: tried for method, tried in whole.items() if tried}


def by_model(runs: Mapping[str, Value]) -> dict[str, list[Value]]:
    """Runs that differ in their seed alone, together: {"a/seed0": x, "a/seed1": y} -> {"a": [x, y]}.

    Args:
        runs: by the names of their folders; what does not end in /seed<k> keeps its name.
    """
    found: defaultdict[str, list[Value]] = defaultdict(list)
    for name, value in runs.items():
        found[re.sub(r"/seed\d+$", "", name)].append(value)
    return dict(found)


def spread(reports: list[dict[str, Any]], key: str) -> tuple[float, float]:
    """Mean and standard deviation (n - 1; 0 for one seed) over seeds."""
    values = [report[key] for report in reports]
    return statistics.mean(values), statistics.stdev(values) if len(values) > 1 else 0.0


def standard_error(reports: list[dict[str, Any]], key: str) -> tuple[float, float]:
    """Mean and its standard error (0 for one seed) over seeds."""
    return mean_and_error([report[key] for report in reports])


def mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    """Mean and its standard error (0 for a single value)."""
    error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else 0.0
    return statistics.mean(values), error


def mean_in_words(values: Sequence[float], form: str = ".1f", error_form: str = "") -> str:
    """Mean and, of several values, its standard error, in the same form or in its own."""
    mean, error = mean_and_error(values)
    return f"{mean:{form}}" + (f" ± {error:{error_form or form}}" if len(values) > 1 else "")


def grid(header: list[str], rows: list[list[str]]) -> list[str]:
    """The lines of a Markdown table; all columns but the first are numbers."""
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    return ["| " + " | ".join(line) + " |" for line in lines]
