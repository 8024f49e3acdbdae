"""Rotary positions (Su et al. 2021, RoFormer eq. 15) removed from queries and keys again.

A rotary position p rotates the pair (x_i, x_{i+r/2}) of the first r numbers of a query or key by the angle p·θ_i, and
leaves the rest unchanged. q·k then depends only on the distance of the two, but a sum of features over keys contains
each key as rotated. Here, keys are moved to position 0, and queries to one distance from all of them.
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
        self._theta = torch.tensor(self.frequencies, dtype=torch.float64, device="cpu")

    def keys(self, k: Tensor, positions: Tensor) -> Tensor:
        """Move keys (B, G, t, d) at positions (B or 1, t) to position 0."""
        return self._turned(k, -positions)

    def queries(self, q: Tensor, positions: Tensor) -> Tensor:
        """Move queries (B, H, L, d) at positions (B or 1, L) to `distance`."""
        return self._turned(q, self.distance - positions)

    def both(self, q: Tensor, at: Tensor, k: Tensor, key_positions: Tensor) -> tuple[Tensor, Tensor]:
        """Apply `queries` and `keys` to one token each, computing their angles together."""
        cos, sin = self._angles(torch.cat((self.distance - at, -key_positions), 1), q)
        return turned(q, cos[:, :, :1], sin[:, :, :1]), turned(k, cos[:, :, 1:], sin[:, :, 1:])

    def _turned(self, x: Tensor, by: Tensor) -> Tensor:
        return turned(x, *self._angles(by, x))

    def _angles(self, by: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
        """Compute cosines and sines (B, 1, t, r/2) of angles in float64: at position 100,000 float32 is off by
        .01."""
        angles = (by.unsqueeze(-1).double() * self._theta.to(like.device)).unsqueeze(1)
        working = torch.promote_types(like.dtype, torch.float32)
        return angles.cos().to(working), angles.sin().to(working)


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate pairs of the first numbers of x (..., d) by cosines and sines (..., r/2)."""
    half = cos.shape[-1]
    first, second, rest = x.to(cos.dtype).split((half, half, x.shape[-1] - 2 * half), -1)
    parts = (first * cos - second * sin, second * cos + first * sin)
    return torch.cat((*parts, rest) if rest.shape[-1] else parts, -1).to(x.dtype)
