"""Exponential features of the softmax and Gaussian kernels, and the parameter that minimises their variance.

For ω ~ N(0, I) in d dimensions, a < 1/8 and B = √(1−4a) (Spectraformer's GERF with s = 1; "Chefs' Random Tables"):

    f(x) = (1−4a)^{d/4} exp(a‖ω‖² + B ω·x − ‖x‖²/2),      E[f(x) f(y)] = e^{x·y}
    E[f(x)² f(y)²] = (1−4a)^d (1−8a)^{−d/2} exp(2 (1−4a) S/(1−8a) − ‖x‖² − ‖y‖²),      S = ‖x + y‖²

a = 0 is FAVOR+. With s = −1, B is imaginary and f is e^{iBω·x}: cosines and sines times exp(a‖ω‖² + ‖x‖²/2). Each
coordinate may have an `a` of its own, and x, y may be replaced by Tx, T⁻ᵀy, which have the same inner product. The
Gaussian kernel e^{−‖x−y‖²/2} is the softmax kernel times e^{−‖x‖²/2 − ‖y‖²/2}.

Shapes: z = (...) ω·x per row (..., m); results (..., m).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from snnk_peft.functional.precision import wide

KERNELS = ("softmax", "gaussian")


def exact_kernel(x: Tensor, y: Tensor, kernel: str) -> Tensor:
    """Compute e^{x·y} or e^{−‖x−y‖²/2} for x, y (..., d); result (...)."""
    return torch.exp((x * y).sum(-1) if kernel == "softmax" else -(x - y).square().sum(-1) / 2)


def half_square(x: Tensor) -> Tensor:
    """Compute ‖x‖²/2, (..., 1), through the norm, which needs no temporary of the size of x."""
    return torch.linalg.vector_norm(wide(x), dim=-1, keepdim=True).square() / 2


def log_factor(x: Tensor, kernel: str, a: Tensor | float = 0.0, sign: int = 1) -> Tensor:
    """Return the log of (1−4a)^{d/4} e^{−s‖x‖²/2} of x (..., d): (..., 1); "gaussian" adds e^{−‖x‖²/2}.

    The parameter a is a number, (..., 1), or one per coordinate (..., d).
    """
    d = x.shape[-1]
    square = half_square(x)
    common = square * (-sign - (1 if kernel == "gaussian" else 0))
    if isinstance(a, float) and a == 0:
        return common
    factor = 1 - 4 * torch.as_tensor(a, dtype=square.dtype, device=x.device)
    if factor.dim() > 0 and factor.shape[-1] == d and d > 1:
        return common + factor.log().sum(-1, keepdim=True) / 4
    return common + factor.log() * (d / 4)


def stabilised(
    exponents: Tensor, factor: Tensor | float, amplitudes: Tensor | float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Compute features amplitudes · exp(exponents + factor), split so that nothing overflows.

    Args:
        exponents: the terms that differ between the features of a vector, e.g. ω·x, (..., m); overwritten.
        factor: from `log_factor`, (..., 1).
        amplitudes: one number, or one per feature (m,).
        dtype: dtype of the values.

    Returns:
        values (..., m) in [−1, 1] and the logarithm of their common factor per vector (..., 1) in at least fp32.
    """
    top = exponents.detach().amax(-1, keepdim=True)
    # An infinite maximum (overflowing input) must be returned as it is, not as NaN.
    top = torch.where(top.isfinite(), top, 0.0)
    # In place: fresh memory of this size costs as much as the exponential.
    values, scale = exponents.sub_(top).exp_(), top + factor
    if isinstance(amplitudes, Tensor):
        values = values * amplitudes if values.requires_grad else values.mul_(amplitudes)
    else:
        scale = scale + math.log(amplitudes)
    return values.to(dtype), scale


def optimal_a(mean_square: Tensor, dim: int) -> Tensor:
    """Return the a <= 0 with the least second moment for a mean S >= 0 of ‖x + y‖² over `dim` coordinates.

    (OPRF; Spectraformer, Eq. 35.) With ρ = 1/(1−8a): the derivative of the logarithm of the second moment is zero at ρ
    = (√((2S+d)² + 8dS) − 2S − d) / 4S. Written without the cancellation that this has for small S; a -> 0 there.
    """
    total = 2 * mean_square + dim
    rho = 2 * dim / (torch.sqrt(total.square() + 8 * dim * mean_square) + total)
    return (1 - 1 / rho) / 8


def masked_mean(x: Tensor, mask: Tensor | None) -> Tensor:
    """Compute the mean of x (..., n, k) over n where mask (..., n) is True: (..., 1, k); 0 if it never is."""
    if mask is None:
        return x.mean(-2, keepdim=True)
    weight = mask.to(x.dtype).unsqueeze(-1)
    return (x * weight).sum(-2, keepdim=True) / weight.sum(-2, keepdim=True).clamp_min(1)


def mean_square_of_sums(x: Tensor, y: Tensor, x_mask: Tensor | None, y_mask: Tensor | None) -> Tensor:
    """Compute the mean over all pairs of (x_l + y_l)², per coordinate: x (..., n, d), y (..., k, d) -> (..., 1, d)."""
    x, y = wide(x), wide(y)
    cross = masked_mean(x, x_mask) * masked_mean(y, y_mask)
    return masked_mean(x.square(), x_mask) + masked_mean(y.square(), y_mask) + 2 * cross
