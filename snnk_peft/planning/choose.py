"""Choice of candidates: the least total error for every total cost, exactly (a knapsack by dynamic programming).

Places are independent: each takes the original or one of its candidates; costs and errors add up. The program keeps the
least error for every total saving over the places so far; savings are in units of 1/20000 of the original's cost,
rounded down, so that a choice never costs more than stated.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

STEPS = 20_000


class Offer(NamedTuple):
    """A candidate for a place.

    Attributes:
        saved: share of the original's cost that it saves.
        error: its error in the model's output.
    """

    saved: float
    error: float


class Point(NamedTuple):
    """A Pareto-optimal choice.

    Attributes:
        cost: share of the original's cost that remains.
        error: sum over the places.
        chosen: for each place the index of the offer, -1 for the original.
    """

    cost: float
    error: float
    chosen: tuple[int, ...]


def pareto(places: Sequence[Sequence[Offer]]) -> list[Point]:
    """Return all Pareto-optimal choices in cost and error; ties go to the earlier offer.

    Args:
        places: the offers for each place; those that save nothing, or whose error is not finite, are ignored.

    Returns:
        The choices, starting with the original, which is included even if a cheaper choice has no larger error.

    Example:
        >>> [point.chosen for point in pareto([[Offer(0.2, 0.1), Offer(0.3, 0.4)], [Offer(0.2, 0.2)]])]
        [(-1, -1), (0, -1), (0, 0), (1, 0)]
    """
    least = np.zeros(1)  # least error, by saving
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
    # From the largest saving on, keep every choice with a smaller error than all that save more.
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
    """Thin out the points of `pareto`: keep the cheapest of those whose savings fall into the same stride.

    Args:
        points: starting with the original, which is kept, as is the last.
        stride: share of the original's cost; 0 keeps all.
    """
    if stride <= 0:
        return list(points)
    kept = {math.floor((1 - point.cost) / stride + 1e-9): point for point in points[1:]}
    return [points[0], *kept.values()]
