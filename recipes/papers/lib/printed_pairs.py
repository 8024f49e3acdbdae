"""Spectraformer's Table 2, as printed, next to our runs of the same pairs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import mean
from typing import Any, NamedTuple

from scipy.stats import spearmanr

from snnk_cli.tables import grid, mean_in_words

COMPONENTS = ("posrf", "oprf", "saderf")
MATRICES = ("orf", "sorf", "qmc", "mm", "sgq", "fastfood_learned")
BASE = "posrf_orf"  # times are given as multiples of its time


class Printed(NamedTuple):
    """Printed figures of a pair on one task.

    Attributes:
        accuracy: percent, on the test set.
        hours: hours of training.
        gigabytes: peak memory.
    """

    accuracy: float
    hours: float
    gigabytes: float


# Rows in the order of MATRICES: accuracy, hours, gigabytes.
_LISTOPS = {
    "posrf": "37.35 1.30 1.17, 22.98 1.29 1.17, 37.50 1.30 1.17, 38.05 1.31 1.17, 37.45 1.30 1.17, 24.95 2.69 0.78",
    "oprf": "37.50 1.61 1.36, 32.11 1.57 1.36, 38.41 1.61 1.36, 38.71 1.61 1.36, 22.53 1.60 1.36, 37.40 2.81 0.85",
    "saderf": "37.35 1.61 1.44, 32.31 1.58 1.44, 37.70 1.61 1.44, 38.00 1.61 1.44, 36.79 1.61 1.44, 28.63 2.81 0.92",
}
_TEXT = {
    "posrf": "61.60 2.84 2.31, 63.31 2.81 2.31, 60.41 2.84 2.31, 61.85 2.84 2.31, 62.68 2.83 2.31, 64.76 5.59 1.56",
    "oprf": "59.35 3.45 2.71, 64.34 3.37 2.71, 60.32 3.46 2.71, 60.39 3.46 2.71, 61.34 3.45 2.71, 64.04 5.84 1.69",
    "saderf": "61.37 3.52 2.86, 64.49 3.44 2.86, 59.89 3.52 2.86, 60.80 3.52 2.86, 63.55 3.52 2.86, 64.64 5.89 1.83",
}
PRINTED = {
    task: {
        f"{component}_{matrix}": Printed(*map(float, cell.split()))
        for component, cells in rows.items()
        for matrix, cell in zip(MATRICES, cells.split(","), strict=True)
    }
    for task, rows in (("listops", _LISTOPS), ("text", _TEXT))
}


def beside(task: str, row: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[str]:
    """Return the lines of two tables, component by matrix: measured accuracy and time, with printed ones in brackets.

    Args:
        task: task of the runs; the result is empty if it has no printed column.
        row: method -> reports; the result is empty for fewer than half of the pairs.
    """
    printed = PRINTED.get(task, {})
    pairs = [name for name in printed if name in row]
    if BASE not in pairs or len(pairs) < len(printed) / 2:
        return []
    accuracies = {name: [100 * report["accuracy"] for report in row[name]] for name in pairs}
    seconds = {name: mean(report["cpu_seconds_per_step"] for report in row[name]) for name in pairs}

    def right(name: str) -> str:
        return f"{mean_in_words(accuracies[name])} ({printed[name].accuracy:.1f})"

    def slower(name: str) -> str:
        return f"{seconds[name] / seconds[BASE]:.2f} ({printed[name].hours / printed[BASE].hours:.2f})"

    return [
        "Accuracy of the pairs in percent, ± the standard error over seeds, in brackets that of the paper's Table 2:",
        "",
        *_square(pairs, right),
        "",
        f"Processor time of a step as a multiple of {BASE}'s, in brackets the paper's hours of training likewise:",
        "",
        *_square(pairs, slower),
        "",
        *_orders(task, [mean(accuracies[name]) for name in pairs], [printed[name].accuracy for name in pairs]),
    ]


def _square(pairs: Sequence[str], cell: Callable[[str], str]) -> list[str]:
    """Return a table with a row per matrix and a column per component."""
    names = {matrix: [f"{component}_{matrix}" for component in COMPONENTS] for matrix in MATRICES}
    rows = [[matrix, *(cell(name) if name in pairs else "" for name in own)] for matrix, own in names.items()]
    return grid(["", *COMPONENTS], rows)


def _orders(task: str, ours: Sequence[float], printed: Sequence[float]) -> list[str]:
    found = spearmanr(ours, printed)
    return [
        f"Rank correlation of our accuracies and the printed ones over {len(ours)} pairs, {task}: "
        f"ρ = {found.statistic:+.2f} (p = {found.pvalue:.2f}).",
        "",
    ]
