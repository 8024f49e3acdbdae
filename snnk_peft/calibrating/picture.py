"""Plot of a CalibrationReport: error of every slot before and after, and time."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

BEFORE, AFTER, SECONDS = "#b0b0b0", "#1f77b4", "#7a9e7e"


def draw(slots: Sequence[Any]) -> bytes:
    """A PNG of the slots of a report; needs no display and leaves matplotlib's settings alone.

    Raises:
        ImportError: matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ImportError(
            "plotting a calibration needs matplotlib, which is not installed: pip install snnk-peft[demo]; "
            "report.to_dict() needs nothing"
        ) from error
    panels: list[tuple[str, list[Any], list[Any]]] = [
        ("squared error, held out, of the variance", [s.error_before for s in slots], [s.error_after for s in slots])
    ]
    if any(slot.divergence_after is not None for slot in slots):
        first, second = [s.divergence_before for s in slots], [s.divergence_after for s in slots]
        panels.append(("divergence from softmax, nats", first, second))
    panels.append(("seconds", [], [slot.seconds for slot in slots]))
    figure = Figure(figsize=(4 * len(panels) + 2, 1.5 + 0.32 * max(len(slots), 1)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    for axis, (title, before, after) in zip(axes, panels, strict=True):
        _bars(axis, before, 0.2, BEFORE, "before")
        _bars(axis, after, -0.2 if before else 0.0, AFTER if before else SECONDS, "after" if before else None)
        if before:
            axis.set_xscale("symlog", linthresh=_smallest(before, after))
        axis.set_xlim(left=0)
        axis.set_title(title, fontsize=10, loc="left")
        axis.spines[["top", "right"]].set_visible(False)
        axis.margins(x=0.15)
    axes[0].set_yticks(range(len(slots)), [slot.path for slot in slots], fontsize=8)
    axes[0].invert_yaxis()
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower left", ncols=2, frameon=False)
    figure.suptitle(f"calibration: {len(slots)} places, {sum(slot.seconds for slot in slots):.0f} s")
    file = io.BytesIO()
    figure.savefig(file, dpi=120, format="png")
    return file.getvalue()


def _bars(axis: Any, values: Sequence[float | None], offset: float, colour: str, label: str | None) -> None:
    """Draw horizontal bars with their values; none where there is no value."""
    known = [(place, value) for place, value in enumerate(values) if value is not None and value < float("inf")]
    places, widths = [place - offset for place, _ in known], [value for _, value in known]
    bars = axis.barh(places, widths, 0.36 if label else 0.6, color=colour, label=label)
    axis.bar_label(bars, [f"{value:.3g}" for value in widths], padding=3, fontsize=7)


def _smallest(before: Sequence[float | None], after: Sequence[float | None]) -> float:
    """Below this the axis is linear: a logarithmic one has no zero."""
    positive = [value for value in (*before, *after) if value]
    return max(min(positive, default=1.0), 1e-9)
