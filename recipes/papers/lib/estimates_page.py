"""Page, plot and terminal tables of papers/programs/attention_estimates.py, from its metrics.json alone."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from snnk_cli.plots import error_curves
from snnk_cli.tables import grid
from snnk_cli.terminal import show_table

UNIFORM, CENTROIDS = "uniform", "centroids"  # maps that are not pairs
DRAWN = ("posrf-orf", "posrf-gaussian", "posrf-sorf", "posrf-mm", "oprf-orf", "oprf-sorf", "saderf-orf")  # in error.png
BY_LAYER = 128  # number of features of the per-layer table
TITLES = {
    "kl": "Divergence from softmax, nats per query",
    "error": "Relative error ‖Â − A‖ / ‖A‖ (Frobenius)",
    "error_median": "The same, the median over matrices instead of their mean",
}


def draw(figures: dict[str, Any], file: Path) -> None:
    """Plot divergences over the number of features; uniform attention is a horizontal line."""
    rows = [each for each in figures["rows"] if each["kl"] is not None]
    shown = [each for each in rows if each["map"] in DRAWN or each["map"].startswith(CENTROIDS)]
    curves = {
        name: [(each["features"], each["kl"], each["kl_se"] or 0.0) for each in shown if each["map"] == name]
        for name in dict.fromkeys(each["map"] for each in shown)
    }
    sizes = sorted({point[0] for points in curves.values() for point in points} or {1})
    curves[UNIFORM] = [(size, _uniform(figures)["kl"], 0.0) for size in sizes]
    labels = ("features", "divergence from softmax, nats per query")
    least = min(point[1] for points in curves.values() for point in points)
    error_curves(curves, file, f"attention weights of {figures['model']} on {figures['texts']}", labels, least / 2)


def _uniform(figures: dict[str, Any]) -> dict[str, Any]:
    return next(each for each in figures["rows"] if each["map"] == UNIFORM)


def beats(figures: dict[str, Any], name: str, key: str) -> str:
    """Describe from which number of features a map is closer to softmax than uniform attention is."""
    level = _uniform(figures)[key]
    mine = [each for each in figures["rows"] if each["map"] == name and each[key] is not None]
    better = [each["features"] for each in mine if each[key] < level]
    return f"{min(better):,}" if better else ("no divergence" if not mine else f"none up to {mine[-1]['features']:,}")


def table(figures: dict[str, Any], key: str) -> tuple[list[str], list[list[str]]]:
    """Return header and lines: one map per line, one number of features per column, and when it beats uniform."""
    rows = [each for each in figures["rows"] if each["map"] != UNIFORM]
    asked = {*figures["settings"]["features"], *figures["settings"]["fitted"]}
    odd = {each["map"]: each for each in rows if each["features"] not in asked}
    sizes = sorted({each["features"] for each in rows if each["map"] not in odd})
    lines = []
    for name in dict.fromkeys(each["map"] for each in rows):
        if name in odd:  # has only one size, shown in the first column
            lines.append([f"{name} ({odd[name]['features']})", _cell(odd[name], key), *[""] * (len(sizes) - 1)])
        else:
            mine = {each["features"]: each for each in rows if each["map"] == name}
            lines.append([name, *(_cell(mine[size], key) if size in mine else "" for size in sizes)])
        lines[-1].append(beats(figures, name, key))
    level = f"{_uniform(figures)[key]:.3f}"
    lines.append([f"{UNIFORM} (0)", *[level] * len(sizes), ""])
    return ["map", *(f"{size:,}" for size in sizes), "beats uniform from"], lines


def _cell(found: dict[str, Any], key: str) -> str:
    if found[key] is None:
        return "negative"
    return f"{found[key]:.3f}" if found[key] < 100 else f"{found[key]:.1e}"


def render(figures: dict[str, Any]) -> str:
    """Render the Markdown page."""
    settings, count = figures["settings"], figures["tokens"]
    noise = [each["kl_se"] / each["kl"] for each in figures["rows"] if each["kl_se"] and each["kl"]]
    lines = [
        "# Attention weights: random features, calibrated ones, and none",
        "",
        "Rendered by `papers/programs/attention_estimates.py` from metrics.json beside this page; its docstring",
        "says what is measured. Columns are numbers of features.",
        "",
        f"Model `{figures['model']}` ({figures['layers']} layers, {figures['heads']} heads of {figures['head_dim']}), "
        f"{len(count)} sentences of `{figures['texts']}` with {min(count)} to {max(count)} tokens, "
        f"{settings['draws']} draws; calibrated on {settings['calibration']} other sentences without labels.",
    ]
    if noise:
        lines.append(
            f"Standard errors over the draws are {statistics.median(noise):.1%} of a divergence (median), at most "
            f"{max(noise):.1%}."
        )
    for key, title in TITLES.items():
        lines += ["", f"## {title}", "", *grid(*table(figures, key))]
        if key == "kl":
            lines += ["", "“negative”: some weights are below 0, so there is no divergence.", ""]
            lines += ["![divergence over the number of features](error.png)"]
            lines += _by_layer(figures)
    return "\n".join([*lines, ""])


def _by_layer(figures: dict[str, Any]) -> list[str]:
    """Return the lines of a section: divergences by layer at `BY_LAYER` features, if there are such maps."""
    rows = [each for each in figures["rows"] if each["features"] == BY_LAYER and each["kl"] is not None]
    if not rows:
        return []
    header = ["map", *(f"layer {layer + 1}" for layer in range(figures["layers"])), "nearer than uniform"]
    lines = [
        [each["map"], *(f"{value:.3f}" for value in each["kl_by_layer"]), f"{each['nearer']:.0%}"] for each in rows
    ]
    level = [UNIFORM, *(f"{value:.3f}" for value in _uniform(figures)["kl_by_layer"]), ""]
    text = f"The last column is the share of heads and sentences of which the divergence is below that of {UNIFORM}."
    return ["", f"## Layer by layer, {BY_LAYER} features", "", text, "", *grid(header, [*lines, level])]


def show(figures: dict[str, Any]) -> None:
    """Print the tables of both errors."""
    for key in ("kl", "error"):
        header, lines = table(figures, key)
        show_table(TITLES[key], header, lines, text=["map"])
