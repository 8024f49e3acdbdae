"""The tensor x⊗x without its repetitions: all products x_i x_j, i <= j, those of different coordinates times √2.

Its inner product is that of the whole tensor, (x·y)², with d(d+1)/2 values instead of d². Shapes: (..., d) ->
(..., d(d+1)/2).
"""

from __future__ import annotations

import torch


def symmetric_square(x: torch.Tensor) -> torch.Tensor:
    """The distinct entries of x⊗x, in the order (1, 1), (1, 2), ..., (1, d), (2, 2), ..."""
    first, second = torch.triu_indices(x.shape[-1], x.shape[-1], device=x.device)
    weights = (1 + (first != second).to(x.dtype)).sqrt()
    return x[..., first] * x[..., second] * weights


def symmetric_square_size(dim: int) -> int:
    """Return d(d + 1)/2, the length of a symmetric square."""
    return dim * (dim + 1) // 2
