"""Which training examples are held back where no evaluation examples are given."""

from __future__ import annotations

import numpy as np


def held_back(groups: np.ndarray, share: float, seed: int) -> list[int]:
    """Places of the examples to hold back, sorted: of every group its share, at least one of two or more.

    Args:
        groups: (examples,) the class of each.
        share: part of every group, between 0 and 1.
        seed: decides which ones.
    """
    rng = np.random.default_rng(seed)
    held: list[int] = []
    for group in np.unique(groups):
        members = rng.permutation(np.flatnonzero(groups == group))
        size = min(max(1, round(share * len(members))), len(members) - 1)
        held += members[:size].tolist()
    return sorted(held)
