"""Plan: the decision of `plan`, its measurements and predictions, as a table, a file and a plot."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from snnk_peft.arguments import folder_of
from snnk_peft.config import SNNKConfig
from snnk_peft.config_parts import part_name
from snnk_peft.digests import DIGESTS, entry_faults, notes, refuse
from snnk_peft.errors import ConfigError
from snnk_peft.json_files import read_json
from snnk_peft.parts import Part
from snnk_peft.planning.choices import Candidate, Choices
from snnk_peft.planning.settle import unreachable
from snnk_peft.saved_folder import whole_file
from snnk_peft.stamps import stamp_entries

FILE, PICTURE = "plan.json", "plan.png"
POINTS = 200  # points of the curve that are kept


@dataclass(frozen=True)
class Plan:
    """The chosen parts, with layers and sizes.

    Args:
        config: the config for `get_snnk_model`, to be followed by `calibrate`.
        of: unit of the budget: "latency", "macs" or "bytes".
        budget: the share of the original's cost to keep.
        predicted: "cost", the share that remains, the sum over the places; "speed_up", its reciprocal; "error", the sum
            of the output errors; "measured", the cost of all chosen parts together, before calibration;
            "measured_error", the error of the held-out answers with all of them, fitted to the sample. A plan from `at`
            has "expected", the predicted cost of all parts together, instead of the measured ones.
        candidates: all measured candidates, front to back, and the chosen sizes in between.
        curve: the predicted Pareto curve: dicts of "cost" and "error", from the original to the cheapest choice.
        settings: the settings that determine the measurements.
        kinds: the parts of which candidates are sizes, as plain data.
    """

    config: SNNKConfig
    of: str
    budget: float
    predicted: Mapping[str, float]
    candidates: list[Candidate] = field(default_factory=list)
    curve: list[dict[str, float]] = field(default_factory=list)
    settings: Mapping[str, Any] = field(default_factory=dict)
    kinds: list[dict[str, Any]] = field(default_factory=list)

    def at(self, budget: str | float) -> Plan:
        """Return the plan for another budget from the same measurements, without running anything.

        The joint saving of parts is expected to deviate from the sum of their own by the same ratio as in this plan.

        Args:
            budget: as for `plan`.

        Raises:
            ConfigError: an invalid budget, or one that no choice meets; a plan from a version that did not store kinds.
        """
        share, fault = share_of(budget)
        if fault is not None:
            raise ConfigError(fault)
        if not self.kinds:
            raise ConfigError(
                "this plan does not hold the options of its candidates; expected one that plan() made now"
            )
        together = 1.0
        if "measured" in self.predicted and self.predicted["cost"] < 1:
            together = (1 - self.predicted["measured"]) / (1 - self.predicted["cost"])
        together = self.predicted.get("together", together)
        choices = Choices(self.candidates, _parts(self.kinds), self.config.seed)
        cost = 1 - (1 - share) / together
        point = next((each for each in choices.points if each.cost <= cost + 1e-9), None)
        if point is None:
            raise unreachable(1 - (1 - choices.points[-1].cost) * together, share, self.of, "as measured")
        expected = 1 - (1 - point.cost) * together
        predicted = {"cost": point.cost, "speed_up": 1 / point.cost, "error": point.error, "expected": expected}
        return dataclasses.replace(
            self,
            config=choices.config(point),
            budget=share,
            predicted={**predicted, "together": together},
            candidates=choices.marked(point),
        )

    @property
    def choices(self) -> list[Candidate]:
        return [candidate for candidate in self.candidates if candidate.chosen]

    def to_dict(self) -> dict[str, Any]:
        parts = [{"part": part_name(type(part)), **dataclasses.asdict(part)} for part in self.config.parts]
        return {
            "config": {"parts": parts, "seed": self.config.seed, "modules_to_save": self.config.modules_to_save},
            **{name: getattr(self, name) for name in ("of", "budget")},
            "predicted": dict(self.predicted),
            "candidates": [dataclasses.asdict(candidate) for candidate in self.candidates],
            "curve": self.curve,
            "settings": dict(self.settings),
            "kinds": self.kinds,
        }

    def save(self, folder: str | os.PathLike[str], *, picture: bool = True) -> None:
        """Write plan.json, and plan.png with the predicted curve.

        Args:
            folder: created if it does not exist.
            picture: False leaves plan.png out, and needs no matplotlib.

        Raises:
            ConfigError: not the path of a folder; matplotlib is not installed; nothing is written.
        """
        target = folder_of("folder", folder)
        drawn = self._draw() if picture else None
        target.mkdir(parents=True, exist_ok=True)
        with whole_file(target / FILE) as temporary:
            temporary.write_text(json.dumps(self.to_dict(), indent=2), encoding="utf-8")
            stamp_entries(temporary, ())
        if drawn is not None:
            with whole_file(target / PICTURE) as temporary:
                drawn.savefig(temporary, format="png", dpi=120)

    @classmethod
    def load(cls, folder: str | os.PathLike[str]) -> Plan:
        """Read a plan written by `save`.

        Raises:
            ConfigError: no plan.json in the folder, or an invalid one.
        """
        file = folder_of("folder", folder) / FILE
        try:
            entries = read_json(file)
            if DIGESTS not in entries:
                notes.warning("%s carries no digests of its entries, so a changed one would not be noticed", file)
            else:
                remedy = f"was changed. If that is meant, remove {DIGESTS!r} from it; otherwise make the plan again"
                refuse(file, remedy, entry_faults(entries, entries[DIGESTS], ()))
            config = SNNKConfig(**entries["config"])
            candidates = [Candidate(**candidate) for candidate in entries["candidates"]]
            kinds: dict[str, Any] = {
                "of": str,
                "budget": (int, float),
                "predicted": dict,
                "curve": list,
                "settings": dict,
            }
            for name, kind in kinds.items():
                if not isinstance(entries[name], kind):
                    raise TypeError(f"{name} is {str(entries[name])[:100]!r}")
            known = {name: entries[name] for name in kinds}
            return cls(config=config, candidates=candidates, kinds=_kinds(entries), **known)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                f"{str(file)!r} cannot be read as a plan ({type(error).__name__}: {error}); expected a folder that "
                "Plan.save wrote. Make the plan again, or update the package if a newer snnk_peft wrote it"
            ) from error

    def _draw(self) -> Any:
        figure = new_figure(PICTURE, height=3.8)
        left, right = figure.subplots(1, 2)
        left.plot([point["cost"] for point in self.curve], [point["error"] for point in self.curve])
        left.plot(self.predicted["cost"], self.predicted["error"], "o", label="plan")
        left.axvline(self.budget, color="grey", linestyle=":", label="budget")
        left.set(xlabel=f"share of the {self.of} that remains", ylabel="predicted error", title="all choices")
        left.legend()
        lines: dict[tuple[int | None, str], list[Candidate]] = {}
        for candidate in self.candidates:
            lines.setdefault((candidate.layer, candidate.part), []).append(candidate)
        for (layer, part), line in lines.items():
            name = part if layer is None else f"{part}, layer {layer}"
            right.plot([c.saved for c in line], [c.output_error for c in line], marker=".", label=name)
        for candidate in self.choices:
            right.plot(candidate.saved, candidate.output_error, "ko", fillstyle="none")
        right.set(xlabel=f"share of the {self.of} saved", ylabel="error of the output", yscale="log", title="places")
        if len(lines) <= 12:
            right.legend(fontsize=6)
        return figure

    def __str__(self) -> str:
        lines = [f"{'layer':>7}  {'part':<14} {'size':>6}  {'saves':>6}  {'fit error':>9}  {'output error':>12}"]
        for each in self.choices:
            layer = "outside" if each.layer is None else str(each.layer)
            fit = "–" if each.fit_error is None else f"{each.fit_error:.4f}"
            lines.append(
                f"{layer:>7}  {each.part:<14} {each.size:>6}  {each.saved:>6.1%}  {fit:>9}  {each.output_error:>12.5f}"
            )
        told = self.predicted
        cost = "measured" if "measured" in told else "expected"
        error = f", {told['measured_error']:.5f} measured with all of them" if "measured_error" in told else ""
        lines.append(
            f"{told['cost']:.1%} of the {self.of} remains as predicted ({told['speed_up']:.2f} times less), "
            f"{told[cost]:.1%} as {cost}; at most {self.budget:.1%} was asked for. Error {told['error']:.5f}{error}"
        )
        return "\n".join(lines)


def _kinds(entries: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the kinds of a stored plan, checked; empty for versions that did not store them."""
    kinds = entries.get("kinds", [])
    if not isinstance(kinds, list):
        raise TypeError(f"kinds is {str(kinds)[:100]!r}")
    _parts(kinds)
    return kinds


def _parts(kinds: list[Any]) -> list[Part]:
    return list(SNNKConfig(parts=kinds).parts) if kinds else []


def new_figure(picture: str, height: float) -> Any:
    """Return an empty matplotlib figure for the file `picture`.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError(
            f"matplotlib is not installed, and {picture} is drawn with it; pip install matplotlib, or save with "
            "picture=False"
        ) from error
    return Figure(figsize=(9, height), layout="constrained")


def share_of(budget: object) -> tuple[float, str | None]:
    """Return the share of the original's cost to keep, in (0, 1), and the fault of the budget, if any."""
    share = math.nan
    if isinstance(budget, str) and (times := re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*[xX×]\s*", budget)):
        share = 1 / float(times[1]) if float(times[1]) else math.nan
    elif isinstance(budget, (int, float)) and not isinstance(budget, bool):
        share = float(budget)
    if 0 < share < 1:
        return share, None
    return share, (
        f"budget is {repr(budget)[:100]}; expected a factor above 1 such as '2x', or the share of the cost that may "
        f"remain, between 0 and 1, such as 0.5{_meant(budget)}"
    )


def _meant(budget: object) -> str:
    """Return a "did you mean" for a number above 1, or an empty string."""
    try:
        factor = float(budget)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return ""
    return f". Did you mean '{factor:g}x'?" if 1 < factor < math.inf else ""
