"""Learning rates: the schedules of transformers as functions of the step, so that no state has to be saved."""

from __future__ import annotations

from collections.abc import Callable

import torch
from transformers import get_scheduler


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
