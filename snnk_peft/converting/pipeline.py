"""One conversion of a model that may be touched by nobody else: plan, calibrate, bundle, recover, compare."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from snnk_peft.bundling.bundle import bundle
from snnk_peft.calibrating.answers import Answers
from snnk_peft.calibrating.calibrate import calibrate
from snnk_peft.calibrating.report import AdapterReport, CalibrationReport
from snnk_peft.config import SNNKConfig
from snnk_peft.converting.compared import compared
from snnk_peft.converting.examples import Examples
from snnk_peft.converting.recover import Recovery, recover
from snnk_peft.parts import Part
from snnk_peft.planning.candidates import shared_copy
from snnk_peft.planning.plan import plan
from snnk_peft.planning.result import Plan
from snnk_peft.tuner.get_model import get_snnk_model

HALF = (torch.float16, torch.bfloat16)


class Stages:
    """Seconds of each stage, summed where one is run several times."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start


@dataclass(frozen=True)
class Result:
    """A converted model, as precise as the original, and what is known about it.

    Args:
        model: plain, in eval mode.
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
    stages: Stages = field(default_factory=Stages)

    def run(self, budget: str | float | None) -> Result:
        """Convert for a budget; None converts the parts as they are."""
        fitted, found = self.examples.fitted, None
        if budget is None:
            config = SNNKConfig(parts=self.parts or [], seed=self.seed, modules_to_save=[])
        else:
            with self.stages("plan"):
                how: dict[str, Any] = {"of": self.of, "parts": self.parts, "seed": self.seed}
                found = plan(self.original, fitted, budget, **how, progress=self.progress)
            config = found.config
        # Fits and steps are in full precision; what is stored and compared is as precise as the original.
        dtype = self.original.dtype
        full = shared_copy(self.original).float() if dtype in HALF else self.original
        with self.stages("calibrate"):
            patched = get_snnk_model(shared_copy(full), config)
            calibration = calibrate(patched, fitted, pooling=self.answers.pooling, progress=self.progress)
            small = bundle(patched.to(dtype))
        recovery = None
        if self.recover or self.steps:
            with self.stages("recover"):
                how = {"seconds": self.recover, "steps": self.steps, "seed": self.seed, "progress": self.progress}
                recovery = recover(small.float(), full, fitted, self.answers, **how)
                small.to(dtype)
        with self.stages("compare"):
            figures, layers = compared(self.original, small, self.examples.held_out, self.answers)
        return Result(small, found, calibration, recovery, figures, layers)
