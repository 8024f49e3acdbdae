"""Timing of several models, taking turns."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

ROUNDS = 7


def side_by_side(runs: Mapping[str, Callable[[], Any]], clock: Callable[[], float]) -> dict[str, float]:
    """Measure the minimum seconds of each; they take turns, so that a slow phase of the machine affects all of them."""
    least = dict.fromkeys(runs, float("inf"))
    for turn in range(ROUNDS + 1):
        for name in list(runs) if turn % 2 else reversed(list(runs)):
            start = clock()
            runs[name]()
            if turn:  # the first round warms up
                least[name] = min(least[name], clock() - start)
    return least
