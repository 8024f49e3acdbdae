"""The page on image tasks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from papers.lib.plots import score_points
from papers.lib.reports import Table
from snnk_cli.tables import grid, spread

# Remarks on the stored runs of a task that the figures do not show.
NOTES = {
    "cifar10": (
        "",
        "The pictures are JPEG copies (quality 75, 25,000 to train on), so these are no results on CIFAR-10: compare",
        "the methods. `scratch` is `configs/cifar10/scratch.yaml`; from its model, classifier included, the others",
        "start, and adapt it to a part of the pictures that it has seen. `ffn_256` replaces all feed-forward blocks by",
        "256 features, fits them to the originals and trains on; "
        "`recipes/benchmarks/convert_models.py cifar10` converts",
        "without training. The machine did other work besides: take no seconds from this table.",
    )
}


def page(table: Table, out: Path) -> tuple[str, list[str]]:
    """Return the page, and the names of the figures drawn next to it."""
    for task, row in table.items():
        points = {name: (cell[0]["trainable_parameters"], *spread(cell, "score")) for name, cell in row.items()}
        score_points(points, out / f"{task}.png", task, "test accuracy")
    return render(table), [f"{task}.png" for task in table]


def render(table: Table) -> str:
    """Render the Markdown page, with a section per task."""
    lines = [
        "# Image tasks",
        "",
        "Rendered by `study.py page vision` from the `.jsonl` beside this folder; every line holds the settings and",
        "the environment of its run. Accuracy on the test pictures in percent, after the last epoch unless `evaluated`",
        "says otherwise: mean ± standard deviation (number of seeds), then every seed.",
    ]
    for task, row in table.items():
        lines += ["", *section(task, row)]
    return "\n".join([*lines, ""])


def section(task: str, row: dict[str, list[dict[str, Any]]]) -> list[str]:
    """Return the section of one task, the best method first."""
    methods = sorted(row, key=lambda method: -spread(row[method], "score")[0])
    reports = [report for method in methods for report in row[method]]
    examples = reports[0]["examples"]
    models = ", ".join(sorted({f"`{report['config']['model']['name_or_path']}`" for report in reports}))
    devices = ", ".join(sorted({f"{r['device']} ({r['environment']['torch_threads']} threads)" for r in reports}))
    return [
        f"## {task}",
        "",
        f"Model {models}; {examples['test']:,} pictures to test: one of these is {100 / examples['test']:.2f} points.",
        *NOTES.get(task, ()),
        "",
        *grid(
            [
                *("method", "accuracy", "seeds", "trained", "outside the classifier"),
                *("pictures", "epochs", "evaluated", "s per epoch"),
            ],
            [cells(method, row[method]) for method in methods],
        ),
        "",
        f"Seconds per epoch of training, of the quickest seed, on {devices}.",
        "",
        f"![accuracy against trained parameters]({task}.png)",
    ]


def cells(method: str, reports: list[dict[str, Any]]) -> list[str]:
    """Return a row of the table."""
    mean, deviation = spread(reports, "score")
    train = reports[0]["config"]["train"]
    return [
        method,
        f"{100 * mean:.1f}" + (f" ± {100 * deviation:.1f} ({len(reports)})" if len(reports) > 1 else ""),
        ", ".join(f"{100 * report['score']:.1f}" for report in reports),
        f"{reports[0]['trainable_parameters']:,}",
        f"{reports[0]['trainable_parameters_without_classifier']:,}",
        f"{reports[0]['examples']['train']:,}",
        str(train["epochs"]),
        f"at {train['eval_every']}" if train["eval_every"] == "end" else f"best {train['eval_every']}",
        f"{min(report['seconds_per_epoch'] for report in reports):.1f}",
    ]
