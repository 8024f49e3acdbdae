"""The page on how soon attention learns what matters."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from papers.lib.plots import score_panels
from papers.lib.reports import Table, alike
from snnk_cli.tables import grid, mean_in_words, spread, standard_error

LEVELS = (0.5, 0.9, 0.99)


def page(table: Table, out: Path) -> tuple[str, list[str]]:
    """Return the page, and the names of the figures drawn next to it."""
    panels = {title(task): {name: curve(cell) for name, cell in row.items()} for task, row in table.items()}
    score_panels(panels, out / "accuracy.png", "sums over pairs", "optimizer steps", "validation accuracy")
    return render(table), ["accuracy.png"]


def title(task: str) -> str:
    """Return "10 % relevant" for sparsity_10."""
    return f"{task.removeprefix('sparsity_')} % relevant"


def steps_to(report: dict[str, Any], level: float) -> int | None:
    """Return the first evaluated step whose accuracy, a running median of three evaluations, reaches `level`, or None.

    At a constant rate, accuracies are noisy: a single one means little. A run that has ended keeps its last accuracy.
    """
    steps, found = zip(*report["learning_curve"], strict=True)
    triples = zip(steps, (found[0], *found[:-1]), found, (*found[1:], found[-1]), strict=True)
    return next((step for step, *three in triples if statistics.median(three) >= level), None)


def curve(cell: list[dict[str, Any]]) -> list[tuple[float, float, float]]:
    """Return (step, mean accuracy, standard error) over seeds; a run that has ended keeps its last accuracy."""
    steps = sorted({step for report in cell for step, _ in report["learning_curve"]})
    points = []
    for step in steps:
        values = [[value for at, value in report["learning_curve"] if at <= step] for report in cell]
        known = [{"accuracy": own[-1]} for own in values if own]
        points.append((float(step), *standard_error(known, "accuracy")))
    return points


def render(table: Table) -> str:
    """Render the page: one table per accuracy, and one of costs."""
    lines = [
        "# How soon attention learns what counts",
        "",
        "Rendered by `study.py page sparsity` from the `.jsonl` beside this folder, which",
        "`study.py run sparsity` wrote; every line holds settings and environment of its run. Of pairs (v, a),",
        f"v = ±1 and a = 0 or 1, the sum Σ v·a is predicted, one of nine (chance is 11 %). {about(table)}",
        "Optimizer steps to an accuracy on validation sequences, mean ± standard error (number of seeds): the first",
        "evaluation that has it in the median with the one before and the one behind it. A run that never had it is",
        "not in the mean, and told of.",
    ]
    tasks = sorted(table)
    methods = list(dict.fromkeys(method for task in tasks for method in table[task]))
    for level in LEVELS:
        rows = [[name, *(steps(table[task].get(name, []), level) for task in tasks)] for name in methods]
        lines += ["", f"## Steps to {100 * level:g} %", "", *grid(["attention", *map(title, tasks)], rows)]
    costs = [[name, *cost([report for task in tasks for report in table[task].get(name, [])])] for name in methods]
    header = ["attention", "CPU s per step", "CPU min per run", "test accuracy %", "parameters"]
    lines += ["", "## Costs, over all tasks", "", *grid(header, costs), "", "![accuracy](accuracy.png)", ""]
    return "\n".join(lines)


def about(table: Table) -> str:
    """Return the settings that all runs share, or a warning."""
    reports = [report for row in table.values() for cell in row.values() for report in cell]

    def settings(report: dict[str, Any]) -> str:
        train = report["config"]["train"]
        return (
            f"{report['longest_sequence']} pairs, batches of {train['batch_size']}, learning rate "
            f"{train['learning_rate']:g}, at most {train['steps']:,} steps, scored every {train['eval_every']}"
        )

    return alike(map(settings, reports), "All runs: {}.")


def steps(cell: list[dict[str, Any]], level: float) -> str:
    """Format mean ± standard error of the steps (seeds)."""
    if not cell:
        return "–"
    found = [found for report in cell if (found := steps_to(report, level)) is not None]
    if not found:
        return f"not in {max(report['steps'] for report in cell):,} ({len(cell)})"
    count = str(len(cell)) if len(found) == len(cell) else f"{len(found)} of {len(cell)}"
    return f"{mean_in_words(found, ',.0f')} ({count})"


def cost(cell: list[dict[str, Any]]) -> list[str]:
    """Return the cost cells of one method."""
    return [
        f"{spread(cell, 'cpu_seconds_per_step')[0]:.3f}",
        f"{spread(cell, 'train_cpu_seconds')[0] / 60:.1f}",
        f"{100 * spread(cell, 'accuracy')[0]:.1f}",
        f"{spread(cell, 'total_parameters')[0]:,.0f}",
    ]
