"""Speed-ups over the original, for models timed in turn.

The fastest passes count. But other tenants of a machine may slow int8, and not fp32, for a minute at a time. So an int8
model is compared, pass by pass, with the original in int8, whose own speed-up is measured once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from _bench import alternate, ratio

from _conversions.finetuned import Batch

ORIGINAL, ROUNDED = "original", "original int8"


class Speeds:
    """Seconds of forward passes, in as many rounds as requested.

    Args:
        models: functions of model inputs by name, including ORIGINAL and ROUNDED, in eval mode.
        inputs: the inputs to time them on.
        repetitions: passes per round.
    """

    def __init__(self, models: Mapping[str, Callable[..., Any]], inputs: Batch, repetitions: int):
        self.runs = {name: partial(model, **inputs) for name, model in models.items()}
        self.repetitions = repetitions
        self.seconds: dict[str, list[float]] = {name: [] for name in models}

    @torch.inference_mode()
    def add_round(self) -> None:
        """Time each model for one more round."""
        for name, more in alternate(self.runs, self.repetitions).items():
            self.seconds[name] += more

    def original(self) -> float:
        """Return the seconds of the original's fastest pass."""
        return min(self.seconds[ORIGINAL])

    def speed_up(self, name: str, of_rounded: float | None = None) -> float:
        """Return the speed-up of a model over the original; for one in int8, pass that of ROUNDED."""
        if of_rounded is None:
            return self.original() / min(self.seconds[name])
        return of_rounded * ratio(self.seconds[ROUNDED], self.seconds[name])
