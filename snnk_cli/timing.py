"""Timing of models in alternation, and counting of dispatched torch operations."""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from snnk_cli.terminal import bar
from snnk_peft.turns import taking_turns


def alternate(
    candidates: Mapping[str, Callable[[], Any]],
    repetitions: int,
    warmup: int = 2,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[float]]:
    """Time candidates by `taking_turns`, with a progress bar; return the seconds of each per repetition."""
    return taking_turns(candidates, bar(range(-warmup, repetitions), "timing"), clock)


def ratio(numerator: list[float], denominator: list[float]) -> float:
    """Return the median of the ratios within one repetition."""
    return statistics.median(a / b for a, b in zip(numerator, denominator, strict=True))


def forward_seconds(
    models: Mapping[str, nn.Module], inputs: Mapping[str, torch.Tensor], repetitions: int
) -> dict[str, list[float]]:
    """Time forward passes in eval mode without gradients, by `alternate`."""

    def run(model: nn.Module) -> Callable[[], None]:
        def forward() -> None:
            with torch.inference_mode():
                model(**inputs)
                if torch.cuda.is_available():
                    torch.cuda.synchronize()

        return forward

    return alternate({name: run(model.eval()) for name, model in models.items()}, repetitions)


class _Counting(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        view = any(out.alias_info and not out.alias_info.is_write for out in function._schema.returns)
        if not view and function.name() != "aten::_unsafe_view":
            self.found[function.name()] += 1
        return function(*args, **(kwargs or {}))


def operations(run: Callable[[], Any]) -> Counter[str]:
    """Count the operations dispatched in one call, by name; views, which touch no data, do not count."""
    with _Counting() as counting:
        run()
    return counting.found
