"""Which candidate in which place: the least total error for every total cost, exactly (a knapsack by dynamic program).

Places are independent: each takes the original or one of its candidates, costs and errors add up. The states after some
places are the pairs (cost, error) that no other pair beats in both; costs are counted in 1/20000 of the original's,
rounded up, so that there are never more states than that and a choice never costs more than it says.
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
        places: the offers of each place; what saves nothing is not taken.

    Returns:
        From the original on, which is there even if something cheaper errs as little.

    Example:
        >>> [point.chosen for point in pareto([[Offer(0.2, 0.1), Offer(0.3, 0.4)], [Offer(0.2, 0.2)]])]
        [(-1, -1), (0, -1), (0, 0), (1, 0)]
    """
    saved, error = np.zeros(1, dtype=np.int64), np.zeros(1)
    back: list[tuple[np.ndarray, np.ndarray]] = []
    for offers in places:
        # Rounded down, by which the cost that remains is rounded up.
        options = [(-1, 0, 0.0)]
        options += [(i, math.floor(offer.saved * STEPS + 1e-9), offer.error) for i, offer in enumerate(offers)]
        options = [option for option in options if option[0] < 0 or option[1] > 0]
        many = len(saved)
        own = np.repeat([option[0] for option in options], many)
        before = np.tile(np.arange(many), len(options))
        saved = np.concatenate([saved + option[1] for option in options])
        error = np.concatenate([error + option[2] for option in options])
        order = np.lexsort((own, error, -saved))  # most saved first; among these the least error, the earlier offer
        least = np.minimum.accumulate(error[order])
        kept = order[np.concatenate(([True], least[1:] < least[:-1]))]
        saved, error = saved[kept], error[kept]
        back.append((own[kept], before[kept]))
    points = []
    for last in reversed(range(len(saved))):
        chosen, index = [], last
        for own, before in reversed(back):
            chosen.append(int(own[index]))
            index = before[index]
        points.append(Point(1 - int(saved[last]) / STEPS, float(error[last]), tuple(reversed(chosen))))
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
