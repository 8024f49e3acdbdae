"""The stages of a conversion: plan, calibrate, bundle, recover, compare."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from snnk_peft.bundling.bundle import bundle
from snnk_peft.calibrating.answers import Answers
from snnk_peft.calibrating.batches import Batch, examples_in, spread, tokens_of
from snnk_peft.calibrating.calibrate import calibrate
from snnk_peft.calibrating.report import AdapterReport, CalibrationReport
from snnk_peft.config import SNNKConfig
from snnk_peft.converting.compared import compared
from snnk_peft.converting.examples import Examples
from snnk_peft.converting.recover import Recovery, judging, recover
from snnk_peft.parts import Part
from snnk_peft.planning.cache_part import cache_part
from snnk_peft.planning.candidates import shared_copy
from snnk_peft.planning.plan import plan
from snnk_peft.planning.result import Plan
from snnk_peft.tuner.get_model import get_snnk_model

HALF = (torch.float16, torch.bfloat16)
TOKENS, EXAMPLES, BATCHES = 32_000, 400, 10  # approximately what a fit reads; all of a small data set
FEW = 16  # batches; below that all are fitted


def enough(batches: Sequence[Batch]) -> list[Batch]:
    """Return enough of the batches to determine a fit: 1,200 of 2,500 sentences gave the same result."""
    totals = sum(map(tokens_of, batches)), sum(map(examples_in, batches))
    share = max(TOKENS / max(1, totals[0]), EXAMPLES / max(1, totals[1]), BATCHES / max(1, len(batches)))
    return [batch for number, batch in enumerate(batches) if spread(number, share)]


class Stages:
    """Seconds of each stage, summed over repeated runs."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start


class Fitted(NamedTuple):
    """A patched model, the plan that chose its parts (or None), and the report of its fit."""

    model: Any
    plan: Plan | None
    calibration: Any


@dataclass(frozen=True)
class Result:
    """A converted model and its reports.

    Args:
        model: plain, in eval mode, in the precision in which it was compared.
        plan: the plan that chose the parts, or None.
        calibration: report of the fits.
        recovery: report of the recovery steps; None if there were none.
        figures: figures of the answers on the held-out examples, including `distance`.
        layers: errors of the states after each layer.
    """

    model: Any
    plan: Plan | None
    calibration: CalibrationReport | AdapterReport
    recovery: Recovery | None
    figures: Mapping[str, float]
    layers: Sequence[Mapping[str, float]]


@dataclass
class Pipeline:
    """State shared by successive conversions.

    On a CPU, where half precision saves memory but no time, a half-precision model runs in float32.

    Args:
        original: the model, in eval mode; its tensors may be the user's and are not written to.
        examples: examples to fit and to compare on.
        answers: reader of the models' answers.
        of: unit of the budgets.
        parts: the candidates, or the parts to convert if there is no budget.
        recover: seconds of recovery steps; 0 for none, None for the default of `recover`.
        steps: number of recovery steps; None to use the seconds.
        seed: seed of all random draws.
        progress: show progress bars.
        inputs: inputs on which cost and time are measured; empty for the batch of median size.
        fit: further arguments of `calibrate`.
        cache: for a decoder, the share of its cache to keep, in addition to the parts and instead of a budget.

    Attributes:
        stored: precision of the given model, in which a conversion is stored.
        measured: the first plan, whose measurements later plans reuse.
    """

    original: Any
    examples: Examples
    answers: Answers
    of: str
    parts: list[Part] | None
    recover: float | None
    steps: int | None
    seed: int
    progress: bool
    inputs: Mapping[str, Any] = field(default_factory=dict)
    fit: Mapping[str, Any] = field(default_factory=dict)
    cache: float | None = None
    stages: Stages = field(default_factory=Stages)
    measured: Plan | None = None

    def __post_init__(self) -> None:
        self.stored: torch.dtype = self.original.dtype
        if self.original.device.type == "cpu":
            self.original = self.full()
        if not self.inputs:
            self.inputs = sorted(self.examples.fitted, key=tokens_of)[len(self.examples.fitted) // 2]

    @property
    def recovers(self) -> bool:
        """Whether recovery steps are asked for."""
        return self.recover != 0 or bool(self.steps)

    def run(self, budget: str | float | None) -> Result:
        """Convert for a budget; None converts the parts as they are."""
        return self.finished(self.fitted(budget))

    def planned(self, budget: str | float) -> Plan:
        """Choose parts and sizes for a budget; costs are measured once, for the first budget that can be met."""
        how: dict[str, Any] = {"of": self.of, "parts": self.parts, "seed": self.seed, "progress": self.progress}
        how |= {"pooling": self.answers.pooling, "inputs": self.inputs, "check": False}
        with self.stages("plan"):
            if self.measured is not None:
                return self.measured.at(budget)
            self.measured = plan(self.original, self.examples.fitted, budget, **how)
            return self.measured

    def fitted(self, budget: str | float | None) -> Fitted:
        """Plan, patch a copy, and fit it."""
        how: dict[str, Any]
        found = None if budget is None else self.planned(budget)
        parts = self.parts or []
        if self.cache is not None:
            with self.stages("plan"):
                how = {"seed": self.seed, "progress": self.progress}
                parts = [cache_part(self.full(), self.examples.fitted, self.cache, **how), *parts]
        config = SNNKConfig(parts=parts, seed=self.seed, modules_to_save=[]) if found is None else found.config
        with self.stages("calibrate"):
            patched = get_snnk_model(shared_copy(self.full()), config)
            how = {"pooling": self.answers.pooling, "progress": self.progress}
            calibration = calibrate(patched, enough(self.to_fit()), **how, **self.fit)
        return Fitted(patched, found, calibration)

    def to_fit(self) -> Sequence[Batch]:
        """Return the batches that are not used to evaluate the recovery steps; all if there are few."""
        batches = self.examples.fitted
        if not self.recovers or len(batches) < FEW:
            return batches
        held = judging(batches)
        return [batch for number, batch in enumerate(batches) if number not in held]

    def finished(self, fitted: Fitted) -> Result:
        """Bundle, recover, and compare on the held-out examples, rounded to the stored precision."""
        with self.stages("calibrate"):
            small = bundle(fitted.model.to(self.stored))
        recovery = self.recovered(small.float())
        small.to(self.stored).to(self.original.dtype)
        with self.stages("compare"):
            figures, layers = compared(self.original, small, self.examples.held_out, self.answers)
        return Result(small, fitted.plan, fitted.calibration, recovery, figures, layers)

    def recovered(self, small: Any) -> Recovery | None:
        """Train a full-precision bundle towards the original, in place; return None if no recovery is asked for."""
        if not self.recovers:
            return None
        with self.stages("recover"):
            how: dict[str, Any] = {"seconds": self.recover, "steps": self.steps, "seed": self.seed}
            return recover(small, self.full(), self.examples.fitted, self.answers, progress=self.progress, **how)

    def full(self) -> Any:
        """Return the original in the precision of fits and recovery steps."""
        return shared_copy(self.original).float() if self.original.dtype in HALF else self.original
