"""The page on fresh draws of learned mixtures."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from papers.lib.plots import scatter_panels
from papers.lib.reports import Table, alike
from snnk_cli.tables import grid, mean_in_words

BESIDE = "evaluation"  # the second report of each run


def page(table: Table, out: Path) -> tuple[str, list[str]]:
    """Return the page, and the names of the figures drawn next to it."""
    points = {
        task: {name: [point for report in cell for point in voted(report)] for name, cell in row.items()}
        for task, row in table.items()
    }
    labels = ("accuracy of one draw", "accuracy of the majority")
    scatter_panels(points, out / "draws.png", "one fresh draw, and what most draws of a model say", labels)
    return render(table), ["draws.png"]


def figures(report: dict[str, Any]) -> dict[str, Any]:
    """Return the figures of a report's draws (`lib/draws.py`), on the only scored split."""
    (found,) = report["evaluation"]["draws"]["splits"].values()
    return dict(found)


def voted(report: dict[str, Any]) -> list[tuple[float, float]]:
    """Return (accuracy of a draw, accuracy of the vote of all) for every draw."""
    return [(score, figures(report)["voting_accuracy"]) for score in report["evaluation"]["draws"]["scores"]]


def render(table: Table) -> str:
    """Render the page, with a table per task."""
    lines = [
        "# Fresh draws of learned mixtures",
        "",
        "Rendered by `study.py page draws` from the `.jsonl` beside this folder, which `study.py run draws`",
        "wrote; every line holds settings and environment of its run. Models that add up pairs (sparsity_50: half of",
        "them count) with attention over features of a mixture. Training drew them anew every 100 steps, so that no",
        "draw was learned by heart; fresh draws of the same mixture were then scored. Mean ± standard error over",
        "models (their number), in percent:",
        "",
        "- saved draw: the accuracy of the model as it is saved;",
        "- one draw: the mean accuracy of a fresh draw, and the standard deviation among draws of a model;",
        "- majority: the accuracy of what most draws of a model say (VA), and its ratio to that of one draw (AGV, no",
        "  percent);",
        "- against the majority: the share of draws that do not say what most of them do (PI / n).",
    ]
    for task in sorted(table):
        rows = [[name, *cells(cell)] for name, cell in sorted(table[task].items())]
        header = ["attention", "saved draw", "one draw", "among draws", "majority", "AGV", "against the majority"]
        lines += ["", f"## {task}", "", about(table[task]), "", *grid([*header, "training, CPU s"], rows)]
    lines += ["", "![accuracy of one draw and of all](draws.png)", ""]
    return "\n".join(lines)


def cells(cell: list[dict[str, Any]]) -> list[str]:
    """Return the cells of the models of one method."""
    drawn = [figures(report) for report in cell]

    def percent(values: list[float]) -> str:
        return mean_in_words([100 * value for value in values])

    # None if no draw of a model is ever right.
    gains = [each["voting_gain"] for each in drawn if each["voting_gain"] is not None]
    return [
        f"{percent([report['evaluation']['score'] for report in cell])} ({len(cell)})",
        percent([each["accuracy"] for each in drawn]),
        percent([report["evaluation"]["draws"]["score_std"] for report in cell]),
        percent([each["voting_accuracy"] for each in drawn]),
        mean_in_words(gains, ".2f") if gains else "–",
        percent([each["pi_share"] for each in drawn]),
        f"{statistics.mean(report['train_cpu_seconds'] for report in cell):,.0f}",
    ]


def about(row: dict[str, list[dict[str, Any]]]) -> str:
    """Return the settings that all runs of a task share, or a warning."""
    return alike(
        f"{report['longest_sequence']} pairs, at most {report['config']['train']['steps']:,} steps of "
        f"{report['config']['train']['batch_size']}, {report['evaluation']['draws']['number']} draws, "
        f"{sum(report['evaluation']['examples'].values()):,} sequences"
        for cell in row.values()
        for report in cell
    )
