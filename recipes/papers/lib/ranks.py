"""Rank correlation with an interval: Spearman's, a mean over groups inside which things are comparable.

Each group is resampled on its own, as often as it has points, and the mean over groups taken again (the stratified
bootstrap, percentiles). Groups of fewer than three points, or where one side is constant, have no correlation.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from snnk_peft.tasks.metrics import spearmanr

Point = tuple[float, float]


class Correlation(NamedTuple):
    """Spearman's correlation.

    Attributes:
        value: the mean over groups.
        low: 2.5 percent of the resamples are below.
        high: 2.5 percent are above.
        points: in groups that count.
        groups: that count.
    """

    value: float
    low: float
    high: float
    points: int
    groups: int


def rank_correlation(groups: Sequence[Sequence[Point]], seed: int = 0, resamples: int = 2000) -> Correlation | None:
    """None where no group has a correlation.

    Args:
        groups: points (x, y) of each.
        seed: of the resamples.
        resamples: how many.
    """
    usable = [np.asarray(group, dtype=np.float64) for group in groups if len(group) >= 3]
    usable = [group for group in usable if (np.ptp(group, axis=0) > 0).all()]
    if not usable:
        return None
    value = float(np.mean([spearmanr(*group.T) for group in usable]))
    generator = np.random.default_rng(seed)
    drawn = [
        np.mean([spearmanr(*group[generator.integers(len(group), size=len(group))].T) for group in usable])
        for _ in range(resamples)
    ]
    low, high = np.percentile(drawn, [2.5, 97.5])
    return Correlation(value, float(low), float(high), sum(map(len, usable)), len(usable))
