"""Figures, drawn without a display."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import LogFormatter

from snnk_cli.files import replacing


def learning_curve(rows: Sequence[Mapping[str, Any]], file: Path, title: str) -> None:
    """Plot training loss and evaluation score over optimizer steps, from the rows of log.jsonl."""
    losses = [(row["step"], row["loss"]) for row in rows if "loss" in row]
    scores = [(row["step"], row["score"]) for row in rows if "score" in row]
    figure, left = make_axes(size=(7, 4))
    left.plot(*zip(*losses, strict=True), color="tab:gray", marker=marker(losses), label="training loss")
    left.set(xlabel="optimizer step", ylabel="training loss", title=title)
    right = left.twinx()
    right.plot(*zip(*scores, strict=True), color="tab:blue", marker="o", label="evaluation score")
    right.set_ylabel("evaluation score", color="tab:blue")
    store(figure, file)


def error_curves(
    curves: Mapping[str, Sequence[tuple[float, float, float]]],
    file: Path,
    title: str,
    labels: tuple[str, str],
    bottom: float,
) -> None:
    """Plot errors over a size, both logarithmic: a line of (size, mean, standard error) per name, at least `bottom`."""
    figure, axes = make_axes(size=(8, 4.5))
    for name, points in curves.items():
        sizes, means, deviations = zip(*points, strict=True)
        axes.errorbar(sizes, [max(mean, bottom) for mean in means], yerr=deviations, fmt=".-", capsize=3, label=name)
    axes.set(xscale="log", yscale="log", xlabel=labels[0], ylabel=labels[1], title=title)
    axes.set_ylim(bottom=bottom / 1.5)
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)
    store(figure, file)


def score_over_seconds(lines: Mapping[str, Sequence[tuple[float, float]]], file: Path, title: str) -> None:
    """Plot scores over seconds of training, on a logarithmic axis: one line of (seconds, score) per name."""
    figure, axes = make_axes(size=(7, 4))
    for name, points in lines.items():
        axes.plot(*zip(*sorted(points), strict=True), marker="o", label=name)
    axes.set(xscale="log", xlabel="seconds of training", ylabel="evaluation score", title=title)
    for give in (axes.xaxis.set_major_formatter, axes.xaxis.set_minor_formatter):
        give(LogFormatter(minor_thresholds=(2, 0.5)))  # 20, not 2 × 10¹
    axes.legend(frameon=False)
    store(figure, file)


def make_axes(*shape: int, size: tuple[float, float], **shared: Any) -> tuple[Any, Any]:
    """Create a figure of this size in inches and its axes, without touching pyplot's state (a notebook may use it)."""
    figure = Figure(figsize=size, layout="constrained")
    return figure, figure.subplots(*shape, **shared)


def marker(points: Sequence[Any]) -> str | None:
    """Return a marker for short lines: without one, the single point of a short run would be invisible."""
    return "o" if len(points) < 30 else None


def store(figure: Any, file: Path, dpi: int = 120) -> None:
    """Write a figure as a PNG file."""
    with replacing(file) as temporary:
        figure.savefig(temporary, dpi=dpi, format="png")
