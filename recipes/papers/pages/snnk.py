"""The page on the smaller experiments of the SNNK paper."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from papers.lib.reports import Table
from snnk_cli.tables import grid, mean_in_words, spread

# Task -> title, unit of the score, and factor for the score on the page.
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


def page(table: Table, out: Path) -> tuple[str, list[str]]:
    """Return the page, and the names of the figures drawn next to it."""
    return render(table), []


def render(table: Table) -> str:
    """Render the page, with one table per task."""
    lines = [
        "# Experiments of *Scalable Neural Network Kernels* at our scale",
        "",
        "Rendered by `study.py page snnk` from the `.jsonl` beside this folder, which `study.py run snnk`",
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
    """Describe the data of a task: the image (all, if they differ) and its size, or the numbers of examples."""
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
    """Return the kind of extra figures in the task's reports."""
    return "siren" if task.startswith("siren") else "two_bodies" if task == "two_bodies" else "mlp"


def score(reports: list[dict[str, Any]], task: str, factor: float) -> str:
    """Format mean ± standard error (seeds)."""
    if task == "two_bodies":
        told = mean_in_words([1 - report["score"] for report in reports], ".1e", ".0e")
    else:
        told = mean_in_words([factor * report["score"] for report in reports])
    return f"{told} ({len(reports)})"


def counts(reports: list[dict[str, Any]], key: str) -> str:
    """Format a number that is the same for all seeds."""
    return f"{reports[0][key]:,}"


def extra(reports: list[dict[str, Any]], task: str) -> str:
    """Format the further figures."""
    if kind(task) == "siren":
        gradient, seconds = spread(reports, "gradient_error")[0], spread(reports, "processor_seconds_per_step")[0]
        return f"{gradient:.0%}, {seconds:.3f}"
    if kind(task) == "two_bodies":
        return f"{spread(reports, 'largest_relative_error_of_an_energy')[0]:.2%}"
    return counts(reports, "bundled_parameters")
