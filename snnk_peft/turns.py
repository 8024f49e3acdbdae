"""Timing of several runs that take turns, so that a slow phase of the machine affects all of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any


def taking_turns(
    runs: Mapping[str, Callable[[], Any]], turns: Iterable[int], clock: Callable[[], float] = time.perf_counter
) -> dict[str, list[float]]:
    """Return the seconds of each run in each turn from 0 on; negative turns warm up. Every other one is reversed."""
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for turn in turns:
        for name in list(runs) if turn % 2 else reversed(list(runs)):
            start = clock()
            runs[name]()
            if turn >= 0:
                seconds[name].append(clock() - start)
    return seconds
