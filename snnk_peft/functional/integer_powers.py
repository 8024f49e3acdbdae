"""Products of integer powers Π_l x_l^{k_l} through one matrix product: log|x| times k, and the parity of the signs.

Shapes: x (..., d), the powers are the rows of a projection (m, d); results (..., m).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from snnk_peft.functional.precision import wide


def log_abs(x: Tensor) -> Tensor:
    """log|x|, with a number for zero that is finite (0 · log 0 = 0, as 0⁰ = 1) and yet makes any power vanish."""
    tiny = torch.finfo(x.dtype).tiny
    return torch.where(x == 0, -1e4, x.abs().clamp_min(tiny).log())


def sign_of_powers(x: Tensor, projection: Callable[[Tensor], Tensor]) -> Tensor:
    """±1: the sign of Π_l x_l^{k_l}, (..., m)."""
    negatives = projection((x < 0).to(wide(x).dtype)).detach()
    return 1 - 2 * torch.remainder(negatives.round(), 2)
