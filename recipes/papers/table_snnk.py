"""Render the page of the SNNK paper's smaller experiments from the runs' metrics.json files, which are kept beside it.

    python recipes/papers/table_snnk.py                                  (runs/snnk -> model_cards/snnk)
    python recipes/papers/table_snnk.py --runs path/to/sweep --out path/to/folder

Stores RUNS/<task>/<method>/seed<k>/metrics.json as lines of OUT.jsonl, then writes OUT/README.md from all lines.
Without runs, the page is rendered from the stored lines alone.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from lib import tables
from lib.tables import Table, collect, grid, mean_in_words, read_reports, spread

# Task -> what it is, what its score is, and by what the score is multiplied on the page.
TITLES = {
    "siren": ("SIREN, one hidden layer, a picture", "decibels", 1.0),
    "siren_three": ("SIREN, the second of three hidden layers, a picture", "decibels", 1.0),
    "siren_photograph": ("SIREN, one hidden layer, a photograph", "decibels", 1.0),
    "two_bodies": ("QPNN, the potential of two particles", "1 − R²", 1.0),
    "covertype": ("CoverType, three layers", "test accuracy in percent", 100.0),
    "higgs": ("HIGGS, three layers", "test accuracy in percent", 100.0),
    "hepmass": ("HEPMASS, three layers", "test accuracy in percent", 100.0),
    "mnist": ("MNIST, three layers", "test accuracy in percent", 100.0),
}


def main(argv: list[str] | None = None) -> int:
    """Read the command line; 0 done, 2 nothing to render."""
    return tables.main(__doc__, "snnk", write, argv)


def write(runs: Path, out: Path) -> None:
    """Store the reports, then render the page."""
    from lib.files import write_text

    copied = collect(runs, out)
    write_text(out / "README.md", render(read_reports(out, "recipes/papers/sweep_snnk.py")))
    print(f"{copied} new or changed reports; wrote {out / 'README.md'}")


def render(table: Table) -> str:
    """The page: one table per task."""
    lines = [
        "# Experiments of *Scalable Neural Network Kernels* at our scale",
        "",
        "Rendered by `papers/table_snnk.py` from the `.jsonl` beside this folder, which `papers/sweep_snnk.py`",
        "wrote; every line holds settings and environment of its run. Mean ± standard error (number of seeds).",
    ]
    for task, (title, unit, factor) in TITLES.items():
        if task not in table:
            continue
        rows = [
            [method, score(reports, task, factor), counts(reports, "trainable_parameters"), extra(reports, task)]
            for method, reports in sorted(table[task].items())
        ]
        lines += [
            "",
            f"## {title}",
            "",
            f"{data(table[task])}.",
            "",
            *grid(["method", unit, "trained", EXTRA[kind(task)]], rows),
        ]
    return "\n".join(lines) + "\n"


def data(rows: Mapping[str, list[dict[str, Any]]]) -> str:
    """What a task was run on: the picture (all of them, should they differ) and its size, or numbers of examples."""
    reports = [report for some in rows.values() for report in some]
    pictures = {f"{report['picture']}, {report['config']['data']['size']}" for report in reports if "picture" in report}
    if pictures:
        return "; ".join(f"{text} pixels on each side" for text in sorted(pictures))
    return ", ".join(f"{size:,} {name}" for name, size in reports[0]["examples"].items())


EXTRA = {
    "siren": "error of the gradient, seconds per step",
    "two_bodies": "largest relative error of four energies",
    "mlp": "left when bundled",
}


def kind(task: str) -> str:
    """What a report of the task has besides its score."""
    return "siren" if task.startswith("siren") else "two_bodies" if task == "two_bodies" else "mlp"


def score(reports: list[dict[str, Any]], task: str, factor: float) -> str:
    """Mean ± standard error (seeds)."""
    if task == "two_bodies":
        told = mean_in_words([1 - report["score"] for report in reports], ".1e", ".0e")
    else:
        told = mean_in_words([factor * report["score"] for report in reports])
    return f"{told} ({len(reports)})"


def counts(reports: list[dict[str, Any]], key: str) -> str:
    """A number that is the same for all seeds."""
    return f"{reports[0][key]:,}"


def extra(reports: list[dict[str, Any]], task: str) -> str:
    """What else is measured."""
    if kind(task) == "siren":
        gradient, seconds = spread(reports, "gradient_error")[0], spread(reports, "processor_seconds_per_step")[0]
        return f"{gradient:.0%}, {seconds:.3f}"
    if kind(task) == "two_bodies":
        return f"{spread(reports, 'largest_relative_error_of_an_energy')[0]:.2%}"
    return counts(reports, "bundled_parameters")


if __name__ == "__main__":
    sys.exit(main())
