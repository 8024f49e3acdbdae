"""Figures of the papers' pages and programs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.ticker import MaxNLocator

from snnk_cli.plots import make_axes, marker, store


def loss_curves(curves: Mapping[str, Sequence[tuple[int, float]]], file: Path, title: str, unit: str) -> None:
    """Plot losses in the same unit over optimizer steps: one line of (step, loss) per name."""
    figure, axes = make_axes(size=(7, 4))
    for name, points in curves.items():
        axes.plot(*zip(*points, strict=True), marker=marker(points), label=name)
    axes.set(xlabel="optimizer step", ylabel=unit, title=title)
    axes.legend(frameon=False)
    store(figure, file)


def score_rows(
    table: Mapping[str, Mapping[str, tuple[float, float]]], file: Path, title: str, xlabel: str = "dev score"
) -> None:
    """Plot one panel per row of `table` with one line per method: its score (mean, standard deviation) as a point."""
    methods = _names(table)
    size = (2.6 * len(table) + 2.5, 0.25 * len(methods) + 1.5)
    figure, axes = make_axes(1, len(table), size=size, sharey=True, squeeze=False)
    for panel, (name, cells) in zip(axes[0], table.items(), strict=True):
        places = [methods.index(method) for method in cells]
        means, deviations = zip(*cells.values(), strict=True)
        panel.errorbar(means, places, xerr=deviations, fmt="o", capsize=3)
        panel.grid(axis="y", linewidth=0.4)
        panel.set(title=name, xlabel=xlabel)
        middle, half = sum(panel.get_xlim()) / 2, max(0.05, np.ptp(panel.get_xlim())) / 2
        panel.set_xlim(middle - half, middle + half)  # a tenth of a point should not look like a difference
        panel.xaxis.set_major_locator(MaxNLocator(4))
    axes[0, 0].set_yticks(range(len(methods)), methods)
    axes[0, 0].set_ylim(len(methods) - 0.5, -0.5)  # first method on top
    figure.suptitle(title)
    store(figure, file)


def score_points(points: Mapping[str, tuple[int, float, float]], file: Path, title: str, ylabel: str) -> None:
    """Plot scores over trained parameters: one point (parameters, mean, standard deviation) per method."""
    figure, axes = make_axes(size=(7, 4))
    for name, (parameters, mean, deviation) in points.items():
        axes.errorbar(parameters, mean, yerr=deviation, fmt="o", capsize=3, label=name)
    axes.set(xscale="log", xlabel="trained parameters", ylabel=ylabel, title=title)
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)
    store(figure, file)


def _names(groups: Mapping[str, Iterable[str]]) -> list[str]:
    """Return the names in all groups, each once, in the order of their first occurrence."""
    return list(dict.fromkeys(name for group in groups.values() for name in group))


def _side_by_side(count: int) -> tuple[Any, Any]:
    """Create a figure and axes (1, count) of panels with a shared scale."""
    return make_axes(1, count, size=(4 * count + 2, 4), sharey=True, squeeze=False)


def _beside_a_legend(figure: Any, axes: Any, drawn: Mapping[str, Any], ylabel: str, title: str, file: Path) -> None:
    """Write panels with a single legend to the right of the last one."""
    axes[0, 0].set_ylabel(ylabel)
    axes[0, -1].legend(list(drawn.values()), list(drawn), loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)
    figure.suptitle(title)
    store(figure, file)


def score_panels(
    panels: Mapping[str, Mapping[str, Sequence[tuple[float, float, float]]]],
    file: Path,
    title: str,
    xlabel: str,
    ylabel: str,
    level: tuple[float, float] | None = None,
) -> None:
    """Plot panels side by side, one line per name: points (x, mean, standard error).

    Args:
        panels: title of a panel -> name -> points.
        file: PNG file.
        title: title of the figure.
        xlabel: label of every x axis.
        ylabel: label of the first y axis.
        level: mean and standard error of a baseline independent of x, drawn as "dense"; None for none.
    """
    figure, axes = _side_by_side(len(panels))
    labels = _names(panels)
    drawn: dict[str, Any] = {}  # one entry of the legend per name, whatever the panel
    for panel, (name, lines) in zip(axes[0], panels.items(), strict=True):
        for label, points in lines.items():
            x, means, errors = zip(*sorted(points), strict=True)
            colour = f"C{labels.index(label)}"
            drawn[label] = panel.errorbar(x, means, yerr=errors, marker="o", capsize=3, color=colour)
        if level is not None:
            drawn["dense"] = panel.axhline(level[0], color="tab:gray", linestyle="--")
            panel.axhspan(level[0] - level[1], level[0] + level[1], color="tab:gray", alpha=0.2)
        panel.set(xlabel=xlabel, title=name)
    _beside_a_legend(figure, axes, drawn, ylabel, title, file)


def scatter_panels(
    panels: Mapping[str, Mapping[str, Sequence[tuple[float, float]]]], file: Path, title: str, labels: tuple[str, str]
) -> None:
    """Plot panels side by side, the points (x, y) of each name in its own colour.

    Args:
        panels: title of a panel -> name -> points.
        file: PNG file.
        title: title of the figure.
        labels: labels of x and y.
    """
    figure, axes = _side_by_side(len(panels))
    names = _names(panels)
    drawn: dict[str, Any] = {}  # one entry of the legend per name, whatever the panel
    for panel, (heading, points) in zip(axes[0], panels.items(), strict=True):
        for name, pairs in points.items():
            drawn[name] = panel.scatter(*zip(*pairs, strict=True), color=f"C{names.index(name)}", alpha=0.8)
        panel.set(xlabel=labels[0], title=heading)
    _beside_a_legend(figure, axes, drawn, labels[1], title, file)


def eigenvalue_panels(rows: Mapping[str, Mapping[str, Sequence[Sequence[float]]]], file: Path, title: str) -> None:
    """Plot spectra over the index of the eigenvalue: a row of panels per name, one panel per layer.

    The axis is logarithmic, so eigenvalues of 0 are missing.

    Args:
        rows: name -> layer -> spectra in descending order, each drawn as a thin line.
        file: PNG file.
        title: title of the figure.
    """
    shape = (len(rows), max(map(len, rows.values())))
    size = (3 * shape[1] + 1, 2.6 * shape[0] + 0.8)
    figure, axes = make_axes(*shape, size=size, sharey="row", squeeze=False)
    for line, (name, layers) in zip(axes, rows.items(), strict=True):
        for panel, (layer, spectra) in zip(line, layers.items(), strict=False):
            for spectrum in spectra:
                panel.plot(range(1, len(spectrum) + 1), [v or np.nan for v in spectrum], color="C0", linewidth=0.7)
            panel.axhline(1, color="tab:gray", linestyle="--", linewidth=0.8)
            panel.set(yscale="log", title=layer)
            panel.xaxis.set_major_locator(MaxNLocator(integer=True))
        for panel in line[len(layers) :]:
            panel.set_axis_off()
        line[0].set_ylabel(name)
    figure.supxlabel("index of the eigenvalue")
    figure.suptitle(title)
    store(figure, file)


def picture_grid(
    rows: Mapping[str, Sequence[Any]],
    columns: Sequence[str],
    file: Path,
    title: str,
    scales: Mapping[int, tuple[float, float]] | None = None,
) -> None:
    """Plot grey images (height, width): one row per name, with a common scale per column.

    Args:
        rows: name -> one image per column.
        columns: titles of the columns.
        file: PNG file.
        title: title of the figure.
        scales: column -> values shown as black and white; by default the extremes of the first row.
    """
    shape = (len(rows), len(columns))
    figure, axes = make_axes(*shape, size=(3 * shape[1], 3 * shape[0]), squeeze=False)
    first = {place: (float(part.min()), float(part.max())) for place, part in enumerate(next(iter(rows.values())))}
    limits = list({**first, **(scales or {})}.values())
    for line, (name, parts) in zip(axes, rows.items(), strict=True):
        for place, part, (low, high) in zip(line, parts, limits, strict=True):
            place.imshow(np.asarray(part), cmap="gray", vmin=low, vmax=high)
            place.set(xticks=[], yticks=[])
        line[0].set_ylabel(name)
    for place, column in zip(axes[0], columns, strict=True):
        place.set_title(column)
    figure.suptitle(title)
    store(figure, file)
