"""One conversion of a model that may be touched by nobody else: plan, calibrate, bundle, recover, compare."""

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
from snnk_peft.planning.candidates import shared_copy
from snnk_peft.planning.full_heads import cache_part
from snnk_peft.planning.plan import plan
from snnk_peft.planning.result import Plan
from snnk_peft.tuner.get_model import get_snnk_model

HALF = (torch.float16, torch.bfloat16)
TOKENS, EXAMPLES, BATCHES = 32_000, 400, 10  # that a fit reads, about; of few data all
FEW = 16  # batches; below that all are fitted


def enough(batches: Sequence[Batch]) -> list[Batch]:
    """As many of the batches as determine a fit: of 2,500 sentences, those of 1,200 gave the same."""
    totals = sum(map(tokens_of, batches)), sum(map(examples_in, batches))
    share = max(TOKENS / max(1, totals[0]), EXAMPLES / max(1, totals[1]), BATCHES / max(1, len(batches)))
    return [batch for number, batch in enumerate(batches) if spread(number, share)]


class Stages:
    """Seconds of each stage, summed where one is run several times."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start


class Fitted(NamedTuple):
    """A patched model, the plan that decided its parts, or None, and the report of its fit."""

    model: Any
    plan: Plan | None
    calibration: Any


@dataclass(frozen=True)
class Result:
    """A converted model and what is known about it.

    Args:
        model: plain, in eval mode, in the precision in which it was compared.
        plan: what chose the parts, or None.
        calibration: of the fits.
        recovery: of the steps; None without any.
        figures: of the answers on the held-out examples, `distance` among them.
        layers: errors of the states behind each layer.
    """

    model: Any
    plan: Plan | None
    calibration: CalibrationReport | AdapterReport
    recovery: Recovery | None
    figures: Mapping[str, float]
    layers: Sequence[Mapping[str, float]]


@dataclass
class Pipeline:
    """What stays the same from one conversion to the next.

    On a CPU, where half precision saves bytes but no time, a model in half precision works in float32.

    Args:
        original: in eval mode; its tensors may be those of the user's model and are not written to.
        examples: to fit and to compare.
        answers: how models are read.
        of: what budgets are of.
        parts: the candidates, or what is converted where there is no budget.
        recover: seconds of steps; 0 for none.
        steps: so many instead of the seconds; None for the seconds.
        seed: of all draws.
        progress: show progress bars.
        inputs: whose cost a budget is of, and which are timed; empty for the batch of median size.
        fit: further arguments of `calibrate`.
        cache: of a decoder, the share of its cache that may remain, beside the parts and in the place of a budget.

    Attributes:
        stored: precision of the original as it was given, in which a conversion is stored.
        measured: the first plan, of whose measurements later ones are made.
    """

    original: Any
    examples: Examples
    answers: Answers
    of: str
    parts: list[Part] | None
    recover: float
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

    def run(self, budget: str | float | None) -> Result:
        """Convert for a budget; None converts the parts as they are."""
        return self.finished(self.fitted(budget))

    def planned(self, budget: str | float) -> Plan:
        """Parts and sizes for a budget; measured once, for the first one that can be met."""
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
        """All batches but those by which the steps behind are judged; all if there are few."""
        batches = self.examples.fitted
        if not (self.recover or self.steps) or len(batches) < FEW:
            return batches
        held = judging(len(batches))
        return [batch for number, batch in enumerate(batches) if number not in held]

    def finished(self, fitted: Fitted) -> Result:
        """Bundle, recover, and compare on what was held out, rounded as it will be stored."""
        with self.stages("calibrate"):
            small = bundle(fitted.model.to(self.stored))
        recovery = self.recovered(small.float())
        small.to(self.stored).to(self.original.dtype)
        with self.stages("compare"):
            figures, layers = compared(self.original, small, self.examples.held_out, self.answers)
        return Result(small, fitted.plan, fitted.calibration, recovery, figures, layers)

    def recovered(self, small: Any) -> Recovery | None:
        """Bring a bundle in full precision nearer to the original, in place; None if no time is given for that."""
        if not (self.recover or self.steps):
            return None
        with self.stages("recover"):
            how: dict[str, Any] = {"seconds": self.recover, "steps": self.steps, "seed": self.seed}
            return recover(small, self.full(), self.examples.fitted, self.answers, progress=self.progress, **how)

    def full(self) -> Any:
        """The original in the precision of fits and steps."""
        return shared_copy(self.original).float() if self.original.dtype in HALF else self.original
