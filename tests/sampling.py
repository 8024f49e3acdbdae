"""Random vectors, and means of samples compared with what they estimate."""

from __future__ import annotations

import torch
from torch import Tensor


def vectors(*shape: int, length: float) -> Tensor:
    """Of this length, in random directions."""
    v = torch.randn(*shape, dtype=torch.float64)
    return v / v.norm(dim=-1, keepdim=True) * length


def within_standard_errors(samples: Tensor, exact: Tensor, bound: float = 5.0) -> None:
    """Fail where the mean over the first axis is further from the exact value than so many standard errors."""
    limit = bound * samples.std(0) / len(samples) ** 0.5 + 1e-12
    off = samples.mean(0) - exact
    assert (off.abs() <= limit).all(), (off / limit).tolist()
