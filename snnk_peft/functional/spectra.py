"""Shift-invariant kernels as scale mixtures of the Gaussian kernel: k(δ) = E_r[e^{−r²‖δ‖²/2}].

If ω ~ N(0, I) and r is independent of it, the rows r·ω have the spectral distribution of k. For the Matérn kernels of
smoothness ν, r² = 2ν/χ²_{2ν} (ω is then multivariate t); ν = ½ is the Laplace kernel e^{−‖δ‖}. For the Cauchy kernel
1/(1 + ‖δ‖²), r² is exponential with mean 2.

Shapes: x, y (..., d) broadcast; kernels (...), multipliers (m,).
"""

from __future__ import annotations

import torch
from torch import Tensor

from snnk_peft.functional.random_numbers import normal_numbers, uniform_numbers

_DEGREES = {"laplace": 1, "matern12": 1, "matern32": 3, "matern52": 5}
SHIFT_INVARIANT = ("gaussian", *_DEGREES, "cauchy")


def row_multipliers(kernel: str, num_features: int, generator: torch.Generator) -> Tensor | None:
    """r for every row, (num_features,), or None where all are 1."""
    if kernel == "cauchy":
        # −2 log U is exponential with mean 2.
        uniform = uniform_numbers(num_features, generator=generator)
        return (-2 * uniform.log()).sqrt().float()
    if kernel not in _DEGREES:
        return None
    degrees = _DEGREES[kernel]
    normal = normal_numbers(num_features, degrees, generator=generator)
    return (degrees / normal.square().sum(-1)).sqrt().float()


def shift_invariant_kernel(x: Tensor, y: Tensor, kernel: str) -> Tensor:
    """The exact kernel; differentiable, also at x = y."""
    square = (x - y).square().sum(-1)
    if kernel == "gaussian":
        return torch.exp(-square / 2)
    if kernel == "cauchy":
        return 1 / (1 + square)
    # The distance has no gradient at 0; there the gradient is taken as 0.
    distance = torch.where(square > 0, torch.where(square > 0, square, 1.0).sqrt(), 0.0)
    r = distance * _DEGREES[kernel] ** 0.5
    polynomial = {1: 1.0, 3: 1 + r, 5: 1 + r + r.square() / 3}[_DEGREES[kernel]]
    return polynomial * torch.exp(-r)
