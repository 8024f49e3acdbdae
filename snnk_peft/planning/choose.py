"""Which candidate in which place: the least total error for every total cost, exactly (a knapsack by dynamic program).

Places are independent: each takes the original or one of its candidates, costs and errors add up. After some places the
least error of every total saving is known; savings are counted in 1/20000 of the original's cost, rounded down, so that
a choice never costs more than it says.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

STEPS = 20_000


class Offer(NamedTuple):
    """A candidate in a place.

    Attributes:
        saved: share of the original's cost that it saves.
        error: what it does to the model's output.
    """

    saved: float
    error: float


class Point(NamedTuple):
    """A choice that no other beats in both.

    Attributes:
        cost: share of the original's cost that remains.
        error: sum over the places.
        chosen: per place the index of the offer, -1 for the original.
    """

    cost: float
    error: float
    chosen: tuple[int, ...]


def pareto(places: Sequence[Sequence[Offer]]) -> list[Point]:
    """All choices that no other beats in both cost and error; equal ones by the earlier offer.

    Args:
        places: the offers of each place; what saves nothing, or errs by no finite number, is not taken.

    Returns:
        From the original on, which is there even if something cheaper errs as little.

    Example:
        >>> [point.chosen for point in pareto([[Offer(0.2, 0.1), Offer(0.3, 0.4)], [Offer(0.2, 0.2)]])]
        [(-1, -1), (0, -1), (0, 0), (1, 0)]
    """
    least = np.zeros(1)  # error, by what is saved
    taken: list[tuple[np.ndarray, list[tuple[int, int]]]] = []
    for offers in places:
        options = [(-1, 0, 0.0)]
        options += [
            (number, steps, offer.error)
            for number, offer in enumerate(offers)
            if (steps := math.floor(offer.saved * STEPS + 1e-9)) > 0 and math.isfinite(offer.error)
        ]
        most = max(steps for _, steps, _ in options)
        errors = np.full((len(options), len(least) + most), np.inf)
        for row, (_, steps, error) in zip(errors, options, strict=True):
            row[steps : steps + len(least)] = least + error
        best = errors.argmin(0)
        least = errors[best, np.arange(len(best))]
        taken.append((best, [(number, steps) for number, steps, _ in options]))
    # From the most saved on, whatever errs less than all that saves more.
    before = np.minimum.accumulate(np.append(least, np.inf)[::-1])[-2::-1]
    points = []
    for saved in np.flatnonzero(least < before):
        chosen, left = [], int(saved)
        for best, numbers in reversed(taken):
            number, steps = numbers[best[left]]
            chosen.append(number)
            left -= steps
        points.append(Point(1 - int(saved) / STEPS, float(least[saved]), tuple(reversed(chosen))))
    original = Point(1.0, 0.0, (-1,) * len(places))
    return points if points[0] == original else [original, *points]


def apart(points: Sequence[Point], stride: float) -> list[Point]:
    """Thin out the points of `pareto`: of those whose savings fall into the same stride, keep the cheapest.

    Args:
        points: from the original on, which stays, as does the last.
        stride: share of the original's cost; 0 keeps all.
    """
    if stride <= 0:
        return list(points)
    kept = {math.floor((1 - point.cost) / stride + 1e-9): point for point in points[1:]}
    return [points[0], *kept.values()]
