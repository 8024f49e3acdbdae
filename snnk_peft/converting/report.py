"""ConversionReport: the comparison after `convert`, as a table, a file and a plot."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from snnk_peft.arguments import folder_of
from snnk_peft.calibrating.report import AdapterReport, CalibrationReport, plain, png
from snnk_peft.planning.result import Plan, new_figure
from snnk_peft.saved_folder import whole_file

ENOUGH = 0.98  # share of the answers from which nothing needs a remedy
LEAST_COSINE = 0.99
RECALLED = 0.95  # share of what the original recalls
HARM = 0.05  # error of the last states, relative to their variance, above which its origin is reported
FILE, PICTURE = "conversion.json", "conversion.png"
SHOWN = {  # figure -> its name
    "agreement": "same answer",
    "divergence": "KL",
    "perplexity": "perplexity",
    "recall": "recall",
    "correlation": "correlation",
    "difference": "difference",
    "cosine": "cosine",
    "similarity_correlation": "similarities",
    "neighbours": "neighbours",
}


@dataclass(frozen=True)
class ConversionReport:
    """Original and conversion, side by side.

    Args:
        models: by name, the original first: `milliseconds` per batch (the minimum over passes that took turns),
            `parameters`, `bytes`; and for all but the original the figures of their answers on the held-out examples
            (see `snnk_peft.calibrating.answers.Comparison`). For a language model, including the original, also
            `recall`: the share of a passage's tokens that are predicted correctly when it is repeated after other text.
        examples: numbers of fitted and held-out examples.
        timed: shape of the batch that was timed.
        layers: after each layer, `error` and `psnr` of the states on the held-out examples.
        seconds: seconds of each stage.
        recovery: `steps` towards the original's answers, and the distance `before` and `after` on examples that were
            not trained on.
        plan: the plan that chose the parts; None if they were given.
        calibration: errors of the individual fits.
        warnings: problems found, with remedies.
        settings: the arguments.
    """

    models: Mapping[str, Mapping[str, float]]
    examples: Mapping[str, int]
    timed: str
    layers: Sequence[Mapping[str, float]]
    seconds: Mapping[str, float]
    recovery: Mapping[str, float]
    plan: Plan | None
    calibration: CalibrationReport | AdapterReport
    warnings: Sequence[str] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def figures(self) -> Mapping[str, float]:
        """The figures of the converted model."""
        return self.models["converted"]

    @property
    def speed_up(self) -> float:
        return self.models["original"]["milliseconds"] / self.models["converted"]["milliseconds"]

    def to_dict(self) -> dict[str, Any]:
        names = ("models", "examples", "timed", "layers", "seconds", "recovery", "warnings", "settings")
        return {
            "speed_up": self.speed_up,
            **{name: plain(getattr(self, name)) for name in names},
            "plan": None if self.plan is None else plain(self.plan.to_dict()),
            "calibration": plain(self.calibration.to_dict()),
        }

    def save(self, folder: str | os.PathLike[str], *, picture: bool = True) -> None:
        """Write conversion.json, the data of `to_dict` (null for values that are not finite), and conversion.png.

        Args:
            folder: created if it does not exist.
            picture: False leaves the plot out, and needs no matplotlib.

        Raises:
            ConfigError: not the path of a folder; matplotlib is not installed; nothing is written.
        """
        target = folder_of("folder", folder)
        drawn = draw(self) if picture else None
        target.mkdir(parents=True, exist_ok=True)
        with whole_file(target / FILE) as temporary:
            temporary.write_text(json.dumps(self.to_dict(), indent=2, allow_nan=False) + "\n", encoding="utf-8")
        if drawn is not None:
            with whole_file(target / PICTURE) as temporary:
                temporary.write_bytes(drawn)

    def __str__(self) -> str:
        names = [name for name in SHOWN if any(name in row for row in self.models.values())]
        width = max(map(len, self.models))
        head = "".join(f"  {SHOWN[name]:>12}" for name in names)
        lines = [f"{'model':<{width}}  {'ms':>8}  {'speed':>6}  {'parameters':>12}  {'MB':>8}{head}"]
        first = self.models["original"]["milliseconds"]
        for model, row in self.models.items():
            figures = "".join(f"  {_number(row.get(name)):>12}" for name in names)
            lines.append(
                f"{model:<{width}}  {row['milliseconds']:>8.2f}  {first / row['milliseconds']:>5.2f}x  "
                f"{int(row['parameters']):>12,}  {row['bytes'] / 1e6:>8.1f}{figures}"
            )
        lines.append(
            f"Answers of {self.examples['held_out']:,} examples that were held out, beside the original's; "
            f"{self.examples['fitted']:,} were fitted. Timed on {self.timed}"
        )
        if self.plan is not None:
            lines.append(f"plan: {told(self.plan)}")
        if (taken := self.recovery.get("steps")) is not None:
            lines.append(
                f"recovery: {int(taken)} steps, distance {self.recovery['before']:.4f} -> {self.recovery['after']:.4f}"
            )
        lines.append(", ".join(f"{name} {spent:.0f} s" for name, spent in self.seconds.items()))
        return "\n".join([*lines, *(f"warning: {each}" for each in self.warnings)])


def told(plan: Plan) -> str:
    """Summarise the choice of a plan in a line: "ffn 64 in layers 0, 2; narrow_heads 16 in layer 1"."""
    where: dict[tuple[str, str], list[int | None]] = {}
    for choice in plan.choices:
        where.setdefault((choice.part, choice.size), []).append(choice.layer)
    if not where:
        return "nothing is replaced"
    return "; ".join(
        f"{part} {size}"
        + ("" if layers == [None] else f" in layer{'s' if len(layers) > 1 else ''} {', '.join(map(str, layers))}")
        for (part, size), layers in where.items()
    )


def warnings_of(
    figures: Mapping[str, float], layers: Sequence[Mapping[str, float]], original: Mapping[str, float]
) -> list[str]:
    """List the problems found, with remedies."""
    found = []
    if figures.get("recall", 1.0) < RECALLED * original.get("recall", 0.0):
        found.append(
            f"of a passage that comes back {figures['recall']:.2f} is predicted, by the original "
            f"{original['recall']:.2f}: what stands far back is lost. A larger budget or cache keeps more of it"
        )
    if figures.get("cosine", 1.0) < LEAST_COSINE:
        found.append(
            f"the vectors are at a cosine of {figures['cosine']:.3f} to the original's: make stored ones anew with the "
            "converted model, and do not mix the two. A larger budget, or longer recovery, keeps them nearer"
        )
    kept = figures.get(main_figure(figures), 0.0)
    added = [now["error"] - before for before, now in zip([0.0, *(x["error"] for x in layers)], layers, strict=False)]
    worst = max(range(len(added)), key=added.__getitem__, default=0)
    if kept < ENOUGH and len(added) > 2 and layers[-1]["error"] > HARM and added[worst] > 0.5 * layers[-1]["error"]:
        found.append(
            f"most of the error arises in layer {worst}: its states are off by {layers[worst]['error']:.3f} of their "
            "variance, those before by "
            f"{layers[worst - 1]['error'] if worst else 0.0:.3f}. Leave that layer as it is (layers= of the parts), or "
            "give it more features"
        )
    return found


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}"


def main_figure(row: Mapping[str, float]) -> str:
    """Return the main figure of a model's answers."""
    return next((name for name in ("agreement", "cosine", "correlation") if name in row), "distance")


def draw(report: ConversionReport) -> bytes:
    """Plot, as a PNG, the share of answers kept over the time of a pass, and the error of the states after each layer.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    figure = new_figure(PICTURE, height=3.6)
    left, right = figure.subplots(1, 2)
    name = main_figure(report.figures)
    for model, row in report.models.items():
        kept = row.get(name, 0.0 if name == "distance" else 1.0)
        left.plot(row["milliseconds"], kept, "o")
        left.annotate(f" {model}", (row["milliseconds"], kept), fontsize=8)
    left.set(xlabel="milliseconds of a batch", ylabel=SHOWN.get(name, name), title="answers of held-out examples")
    left.set_xlim(left=0)
    left.margins(x=0.25, y=0.2)
    places = range(len(report.layers))
    right.bar(places, [layer["error"] for layer in report.layers])
    right.set(xlabel="layer", ylabel="squared error of the variance", title="states behind each layer")
    right.set_xticks(places)
    for axis in (left, right):
        axis.spines[["top", "right"]].set_visible(False)
    return png(figure)
