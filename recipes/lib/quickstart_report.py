"""What the quickstart shows: the rows of its comparison, two tables for the terminal and one picture."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.box import SIMPLE
from rich.markup import escape
from rich.table import Table

from lib.plots import make_axes, store

COLORS = ("#9aa5b1", "#6b9e78", "#3b82c4", "#e07a3f")


@dataclass(frozen=True)
class Row:
    """One model of the comparison.

    Attributes:
        name: what it is.
        correct: test sentences labelled correctly.
        total: test sentences.
        trained_parameters: numbers changed by gradient descent.
        parameters: numbers the model needs to run, frozen matrices included.
        bytes: size of the weight files it needs to run.
        latency_ms: median milliseconds of one batch.
    """

    name: str
    correct: int
    total: int
    trained_parameters: int
    parameters: int
    bytes: int
    latency_ms: float

    @property
    def accuracy(self) -> float:
        """Share of correct labels."""
        return self.correct / self.total

    @property
    def interval(self) -> tuple[float, float]:
        """95 % interval of the accuracy (Wilson 1927)."""
        z, p, n = 1.96, self.accuracy, self.total
        centre = (p + z * z / (2 * n)) / (1 + z * z / n)
        half = z / (1 + z * z / n) * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
        return centre - half, centre + half


def comparison(rows: Sequence[Row], unseen: str) -> Table:
    """The rows as a table for the terminal; speed-up is against the first row, `unseen` says what is in the test."""
    table = Table(title=f"accuracy on {unseen} (95 %), median latency of one batch", box=SIMPLE)
    for column in ("", "accuracy", "trained", "weights", "latency", "speed-up"):
        table.add_column(column, justify="right" if column else "left")
    for row in rows:
        low, high = row.interval
        table.add_row(
            row.name,
            f"{row.accuracy:.1%} ± {50 * (high - low):.1f}",
            f"{row.trained_parameters:,}",
            f"{row.bytes / 1e6:.1f} MB",
            f"{row.latency_ms:.0f} ms",
            f"{rows[0].latency_ms / row.latency_ms:.2f} x",
        )
    return table


def predictions(texts: Sequence[str], labels: Sequence[str], scores: Sequence[dict[str, float]]) -> Table:
    """Text, true label and best score, one line each; a wrong label is red."""
    table = Table(
        title="pipeline('text-classification') on the bundle, in a fresh process", box=SIMPLE, show_lines=True
    )
    for column in ("new sentence", "label", "predicted"):
        table.add_column(column)
    for text, label, score in zip(texts, labels, scores, strict=True):
        best = max(score, key=score.__getitem__)
        color = "green" if best == label else "red"
        table.add_row(escape(text), label, f"[{color}]{best}[/{color}] {score[best]:.0%}")
    return table


def draw(rows: Sequence[Row], title: str, unseen: str, batch: str, chance: float, file: Path) -> None:
    """Accuracy, latency and size of the models side by side.

    Args:
        rows: the models, at most four.
        title: of the picture.
        unseen: what the accuracy is of, e.g. "unseen sentences".
        batch: what the latency is of, e.g. "32 × 64 tokens".
        chance: accuracy of guessing.
        file: the PNG to write.
    """
    names = [row.name for row in rows]
    panels = [
        (f"accuracy on {unseen}", [100 * row.accuracy for row in rows], "{:.1f} %"),
        (f"latency of {batch}", [row.latency_ms for row in rows], "{:.0f} ms"),
        ("weights on disk", [row.bytes / 1e6 for row in rows], "{:.1f} MB"),
    ]
    figure, axes = make_axes(1, 3, size=(12, 3.6), sharey=True)
    for axis, (name, values, form) in zip(axes, panels, strict=True):
        axis.barh(names, values, color=COLORS[: len(rows)], height=0.62)
        for place, value in enumerate(values):
            axis.text(0.03 * max(values), place, form.format(value), color="white", weight="bold", va="center")
        axis.set_title(name, fontsize=11, loc="left")
        axis.set_xticks([])
        axis.spines[["top", "right", "bottom"]].set_visible(False)
        axis.tick_params(left=False)
    errors = [[abs(100 * (row.accuracy - bound)) for row in rows for bound in row.interval[i : i + 1]] for i in (0, 1)]
    axes[0].errorbar(panels[0][1], names, xerr=errors, fmt="none", color="#333333", capsize=4)
    axes[0].axvline(100 * chance, color="white", linestyle=":")
    axes[0].text(100 * chance, len(rows) - 0.55, "chance", ha="center", va="top", fontsize=8)
    axes[0].invert_yaxis()
    figure.suptitle(title)
    store(figure, file, dpi=150)
