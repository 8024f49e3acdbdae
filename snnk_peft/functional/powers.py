"""Powers of vectors x (..., d).

Integer powers Π_l x_l^{k_l}, the rows k of a projection (m, d), by one matrix product: log|x| times k, and the parity
of the signs. And the tensor x⊗x without its repetitions: all x_i x_j, i <= j, those of different coordinates times √2,
so that the inner product is (x·y)² with d(d+1)/2 values instead of d².
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from snnk_peft.functional.precision import wide


def log_abs(x: Tensor) -> Tensor:
    """Compute log|x|, with a finite number for zero (0 · log 0 = 0, as 0⁰ = 1) that still makes any power vanish."""
    tiny = torch.finfo(x.dtype).tiny
    return torch.where(x == 0, -1e4, x.abs().clamp_min(tiny).log())


def sign_of_powers(x: Tensor, projection: Callable[[Tensor], Tensor]) -> Tensor:
    """Return ±1, the sign of Π_l x_l^{k_l}, (..., m)."""
    negatives = projection((x < 0).to(wide(x).dtype)).detach()
    return 1 - 2 * torch.remainder(negatives.round(), 2)


def symmetric_square(x: torch.Tensor) -> torch.Tensor:
    """Return the distinct entries of x⊗x, in the order (1, 1), (1, 2), ..., (1, d), (2, 2), ..."""
    first, second = torch.triu_indices(x.shape[-1], x.shape[-1], device=x.device)
    weights = (1 + (first != second).to(x.dtype)).sqrt()
    return x[..., first] * x[..., second] * weights


def symmetric_square_size(dim: int) -> int:
    """Return d(d + 1)/2, the length of a symmetric square."""
    return dim * (dim + 1) // 2
