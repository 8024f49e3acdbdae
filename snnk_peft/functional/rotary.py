"""Rotary positions (Su et al. 2021, RoFormer eq. 15) taken off queries and keys again.

A rotary position p turns the pair (x_i, x_{i+r/2}) of the first r numbers of a query or key by the angle p·θ_i, and
leaves the rest as it is. q·k then depends on the distance of the two alone, but a sum over keys of a feature of k holds
each key as it was turned. Here, keys are put to position 0, and queries to one distance from all of them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class Rotary:
    """Angles per position, and the distance from which far keys are seen.

    Args:
        frequencies: θ, r/2 numbers.
        distance: tokens between every query and every far key.
    """

    def __init__(self, frequencies: Sequence[float], distance: int):
        self.frequencies, self.distance = tuple(frequencies), distance

    def keys(self, k: Tensor, positions: Tensor) -> Tensor:
        """Keys (B, G, t, d) at positions (B or 1, t), as if at 0."""
        return self._turned(k, -positions)

    def queries(self, q: Tensor, positions: Tensor) -> Tensor:
        """Queries (B, H, L, d) at positions (B or 1, L), as if at `distance`."""
        return self._turned(q, self.distance - positions)

    def _turned(self, x: Tensor, by: Tensor) -> Tensor:
        """Angles in float64: at position 100,000 those in float32 are off by .01."""
        kept = 2 * len(self.frequencies)
        theta = torch.tensor(self.frequencies, dtype=torch.float64, device=x.device)
        angles = (by.unsqueeze(-1).double() * theta).unsqueeze(1)
        working = torch.promote_types(x.dtype, torch.float32)
        cos, sin = angles.cos().to(working), angles.sin().to(working)
        first, second, rest = x.to(working).split((kept // 2, kept // 2, x.shape[-1] - kept), -1)
        turned = torch.cat((first * cos - second * sin, second * cos + first * sin, rest), -1)
        return turned.to(x.dtype)
