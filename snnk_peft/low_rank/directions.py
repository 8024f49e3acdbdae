"""Rows and their directions, also where a row is zero."""

from __future__ import annotations

import torch
from torch import Tensor


def unit_scale(values: Tensor) -> Tensor:
    """The values as divisors: 1 where they are not above 0."""
    return torch.where(values > 0, values, 1.0)


def directions(coordinates: Tensor) -> Tensor:
    """Rows (out, r) brought to norm 1; a row of zeros, which has no direction, becomes the first unit vector."""
    norm = torch.linalg.vector_norm(coordinates, dim=1, keepdim=True)
    found = coordinates / unit_scale(norm)
    found[:, 0] += (norm == 0).squeeze(1)
    return found
