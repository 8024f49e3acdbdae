"""Learning rates: the schedules of transformers as functions of the step, so that no state has to be saved."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from transformers import get_scheduler

from lib.experiment import Schedule

# train.schedule of a budget of steps -> transformers' name of it
SCHEDULES = {"constant": "constant_with_warmup", "linear": "linear", "cosine": "cosine", "rsqrt": "inverse_sqrt"}


def learning_rate(name: str, peak: float, warmup: int, total: int, **options: float) -> Callable[[int, float], float]:
    """The rate of the step that comes next, from the steps done and the position in the schedule (see `Schedule`).

    Args:
        name: as in `transformers.get_scheduler`.
        peak: the rate behind the warm-up.
        warmup: optimizer steps in which the rate rises linearly.
        total: optimizer steps of the whole run.
        options: of this schedule.
    """
    # A scheduler wants an optimizer; of this one nothing is asked but the function of the step.
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=peak)
    # The fall begins behind the warm-up, also where the run is too short to get there.
    factor = get_scheduler(name, optimizer, warmup, max(total, warmup + 1), options or None).lr_lambdas[0]

    def rate(step: int, position: float) -> float:
        # transformers' first step has rate 0. Here the first step learns, and the last one of the warm-up has the full
        # rate; the inverse root counts from 1 throughout, as in Long Range Arena.
        return peak * factor(step + 1 if step < warmup or name == "inverse_sqrt" else position)

    return rate


def of_epochs(train: Any, per_epoch: int) -> Schedule:
    """Whole epochs, of so many optimizer steps, as a TrainSection says; the warm-up is a part of all steps."""
    total = train.epochs * per_epoch
    named = {"epoch": per_epoch, "end": total}
    return Schedule(
        total=total,
        eval_every=named.get(train.eval_every, train.eval_every),
        rate=learning_rate(train.schedule, train.learning_rate, math.ceil(train.warmup_ratio * total), total),
    )


def of_steps(train: Any) -> Schedule:
    """`train.steps` optimizer steps without warm-up."""
    rate = learning_rate(train.schedule, train.learning_rate, 0, train.steps)
    return Schedule(total=train.steps, eval_every=train.eval_every, rate=rate)


def of_budget(train: Any) -> Schedule:
    """`train.steps` optimizer steps or `train.max_cpu_minutes` of processor time, whichever ends first."""
    peak, warmup = train.learning_rate, train.warmup_steps
    if train.schedule == "rsqrt":  # Long Range Arena: learning_rate is the rate of a single step of warm-up
        warmup = max(1, warmup)
        peak /= math.sqrt(warmup)
    return Schedule(
        total=train.steps,
        eval_every=train.eval_every,
        rate=learning_rate(SCHEDULES[train.schedule], peak, warmup, train.steps),
        budget_seconds=None if train.max_cpu_minutes is None else 60 * train.max_cpu_minutes,
    )
