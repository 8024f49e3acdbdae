"""Reports of `calibrate` (errors on held-out tokens, slot by slot, and their plot) and of `calibrate_adapters`."""

from __future__ import annotations

import io
import json
import math
import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from snnk_peft.arguments import folder_of
from snnk_peft.errors import ConfigError, NumericalWarning
from snnk_peft.saved_folder import whole_file

SHOWN = 4  # slots that a warning names
POOR = 0.25  # attention error above which models were found to suffer: by 3 to 5 points, or completely
BEFORE, AFTER, SECONDS = "#b0b0b0", "#1f77b4", "#7a9e7e"


@dataclass(frozen=True)
class SlotReport:
    """Result of calibrating one slot.

    Args:
        path: the replaced module.
        num_features: rows of W, or the size of a part without W.
        tokens: tokens (examples for a pooler) fitted while choosing the regularisation.
        held_out_tokens: tokens on which it was chosen and the errors are measured; with `refit`, also fitted
            afterwards.
        ridge: the chosen regularisation, as a fraction of the mean feature variance; None if there is none.
        error_before: squared error of the slot as it was, relative to the target's variance, on held-out tokens.
        error_after: the same after fitting. 1 means no better than the mean.
        seconds: wall time, forward passes included.
        divergence_before: for attention, the Kullback-Leibler divergence of its weights from softmax in nats, averaged
            over held-out queries and heads; None for other slots.
        divergence_after: the same after fitting.
        needed_tokens: number of fitted tokens needed to determine the slot; None if unknown.
        settings: component and projection of its feature maps with their parameters; empty without feature maps.
        longest: for attention, number of tokens of the longest text it was fitted to; None for other slots.
    """

    path: str
    num_features: int
    tokens: int
    held_out_tokens: int
    ridge: float | None
    error_before: float
    error_after: float
    seconds: float
    divergence_before: float | None = None
    divergence_after: float | None = None
    needed_tokens: int | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    longest: int | None = None


@dataclass(frozen=True)
class CalibrationReport:
    """Result of `calibrate`, slot by slot, front to back.

    Args:
        slots: one entry per slot.
        settings: the arguments, and the number of batches and of processes.
    """

    slots: list[SlotReport] = field(default_factory=list)
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        return sum(slot.seconds for slot in self.slots)

    def to_dict(self) -> dict[str, Any]:
        return {"seconds": self.seconds, "settings": dict(self.settings), "slots": [asdict(s) for s in self.slots]}

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write calibration.json, the data of `to_dict`, and calibration.png, its plot; existing files are replaced.

        An error that is not finite is null in JSON.

        Args:
            folder: where to write; created if it does not exist.

        Raises:
            ImportError: matplotlib is not installed; nothing is written.
            ConfigError: the folder cannot be written to.
        """
        target = folder_of("folder", folder)
        text = json.dumps(plain(self.to_dict()), indent=2, allow_nan=False) + "\n"
        files = {target / "calibration.json": text.encode(), target / "calibration.png": draw(self.slots)}
        try:
            target.mkdir(parents=True, exist_ok=True)
            for path, content in files.items():
                with whole_file(path) as temporary:
                    temporary.write_bytes(content)
        except OSError as error:
            raise ConfigError(f"{target} cannot be written to: {error}; give another folder") from error

    def __str__(self) -> str:
        diverging = any(slot.divergence_after is not None for slot in self.slots)
        width = max([len(slot.path) for slot in self.slots], default=4)
        title = f"{'slot':<{width}}  features   tokens  error before -> after (held out)"
        lines = [f"{title}{'   KL before -> after' if diverging else ''}   ridge  seconds"]
        for s in self.slots:
            line = f"{s.path:<{width}}  {s.num_features:>8}  {s.tokens:>7}  {s.error_before:>12.4f} -> "
            line += f"{s.error_after:<15.4f}{f'  {_pair(s)}' if diverging else ''}"
            lines.append(f"{line}  {'-' if s.ridge is None else f'{s.ridge:.0e}':>7}  {s.seconds:>7.1f}")
        if fitted := {s.longest for s in self.slots if s.longest is not None}:
            lines.append(
                f"Attention was fitted to texts of at most {min(fitted)} tokens. Beyond that, a decoder's tokens "
                "see near keys alone (without a near field, longer texts are refused)"
            )
        return "\n".join(lines)


def warn_of_few_tokens(slots: Sequence[SlotReport]) -> None:
    """Warn (NumericalWarning) about slots fitted to too few tokens to determine them, with the number needed."""
    few = [slot for slot in slots if slot.needed_tokens is not None and slot.tokens < slot.needed_tokens]
    if few:
        named = [f"{s.path} ({s.tokens} fitted, {s.needed_tokens} needed)" for s in few[:SHOWN]]
        more = f" and {len(few) - SHOWN} more" if len(few) > SHOWN else ""
        # Least squares with p unknowns on n tokens adds p/(n − p − 1) to the error: it doubles at n = 2p, and
        # grows by a ninth at 10p. MiniLM's FFN blocks did no better: twice the error at p, a tenth more at 10p.
        most = max(10 * (slot.needed_tokens or 0) for slot in few)
        warnings.warn(
            f"too few tokens for {', '.join(named)}{more}: fewer than parameters to fit per output, so that "
            "many fits are equally good and the regularisation alone decides among them. Give more or longer texts: "
            f"with {most} tokens, ten times as many as parameters, about a tenth of the error is due to their number. "
            "Or use fewer features",
            NumericalWarning,
            stacklevel=3,
        )


def warn_of_poor_attention(slots: Sequence[SlotReport]) -> None:
    """Warn about attention that is approximated poorly by its feature maps, and suggest a remedy."""
    poor = [slot for slot in slots if slot.divergence_after is not None and not slot.error_after <= POOR]
    if poor:
        named = [f"{slot.path} ({slot.error_after:.2f})" for slot in poor[:SHOWN]]
        more = f" and {len(poor) - SHOWN} more" if len(poor) > SHOWN else ""
        warnings.warn(
            f"attention is lost: the error is more than {POOR} of the variance in {', '.join(named)}{more}. Heads that "
            "look for the same word elsewhere, as models of sentence pairs have them, need a feature for every word. "
            "Leave these layers as they are (layers= names the others), or give more features or steps",
            UserWarning,
            stacklevel=3,
        )


def _pair(slot: SlotReport) -> str:
    if slot.divergence_before is None or slot.divergence_after is None:
        return f"{'-':>18}"
    return f"{slot.divergence_before:>9.4f} -> {slot.divergence_after:<7.4f}"[:20]


def plain(data: Any) -> Any:
    """Return plain data, with None for NaN and infinity, which JSON lacks."""
    if isinstance(data, Mapping):
        return {str(key): plain(value) for key, value in data.items()}
    if isinstance(data, (list, tuple)):
        return [plain(value) for value in data]
    return None if isinstance(data, float) and not math.isfinite(data) else data


def png(figure: Any) -> bytes:
    """Return a matplotlib figure as a PNG file."""
    file = io.BytesIO()
    figure.savefig(file, dpi=120, format="png")
    return file.getvalue()


@dataclass(frozen=True)
class AdapterSlotReport:
    """Result for one adapter.

    Args:
        path: the module that it follows or runs in parallel with.
        num_features: rows of W.
        slope_before: decrease of the held-out loss per unit of change of the adapter's output (root mean square over
            tokens), for the step that is best on the fitted examples among linear features of the old rows. To first
            order, its square is the gain these rows can reach.
        slope_after: the same for rows made from the fitted examples.
        slope_of_all: the same if the step may be any linear map of the inputs.
        taken: whether the new rows were installed; the old ones stay if the new ones are no better.
        ridge: the chosen regularisation, as a fraction of the mean square of an input.
        tokens: number of tokens read.
    """

    path: str
    num_features: int
    slope_before: float
    slope_after: float
    slope_of_all: float
    taken: bool
    ridge: float
    tokens: int


@dataclass(frozen=True)
class AdapterReport:
    """Result of `calibrate_adapters`; print it for a table.

    Args:
        slots: one entry per adapter, front to back.
        seconds: wall time.
        settings: the arguments.
    """

    slots: list[AdapterSlotReport]
    seconds: float
    settings: Mapping[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        return {"seconds": self.seconds, "settings": dict(self.settings), "slots": [asdict(s) for s in self.slots]}

    def __str__(self) -> str:
        width = max(len(slot.path) for slot in self.slots)
        lines = [f"{'adapter at':<{width}}  rows  slope (held out) before -> after    of all rows    ridge   tokens"]
        lines += [
            f"{s.path:<{width}}  {s.num_features:>4}  {s.slope_before:>23.2e} -> {s.slope_after:<8.2e}   "
            f"{s.slope_of_all:>8.2e}  {s.ridge:>7.0e}  {s.tokens:>7}{'' if s.taken else '  not taken'}"
            for s in self.slots
        ]
        return "\n".join([*lines, f"{self.seconds:.1f} seconds"])


def draw(slots: Sequence[Any]) -> bytes:
    """Plot the slots of a report as a PNG; needs no display and leaves matplotlib's settings alone.

    Raises:
        ImportError: matplotlib is not installed.
    """
    try:
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
    return png(figure)


def _bars(axis: Any, values: Sequence[float | None], offset: float, colour: str, label: str | None) -> None:
    known = [(place, value) for place, value in enumerate(values) if value is not None and value < float("inf")]
    places, widths = [place - offset for place, _ in known], [value for _, value in known]
    bars = axis.barh(places, widths, 0.36 if label else 0.6, color=colour, label=label)
    axis.bar_label(bars, [f"{value:.3g}" for value in widths], padding=3, fontsize=7)


def _smallest(before: Sequence[float | None], after: Sequence[float | None]) -> float:
    """Return the value below which the axis is linear, since a logarithmic axis has no zero."""
    positive = [value for value in (*before, *after) if value]
    return max(min(positive, default=1.0), 1e-9)
