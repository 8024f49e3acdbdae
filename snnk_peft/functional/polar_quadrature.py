"""E[f(ω·x) f(ω·y)] for ω ~ N(0, I) and any f that is smooth but for a kink or jump at 0, to about 1e-10.

In the plane of x and y, ω has polar coordinates (r, α), so with θ the angle between the two

    E = (1/2π) ∫dα ∫dr r e^{−r²/2} f(‖x‖ r cos α) f(‖y‖ r cos(α − θ)).

The kinks lie on the four rays α = ±π/2, θ ± π/2: Gauss-Legendre nodes between them never straddle one.

Shapes: x, y (..., d) broadcast; result (...). Cost: 4·24·96 evaluations of f per pair, so a test oracle, not a layer.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

_RADIUS, _RADIAL, _ANGULAR = 10.0, 96, 24


def _legendre(count: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Gauss-Legendre nodes and weights on [0, 1]."""
    nodes, weights = np.polynomial.legendre.leggauss(count)
    return torch.as_tensor((nodes + 1) / 2).to(like), torch.as_tensor(weights / 2).to(like)


def gaussian_product_mean(f: Callable[[Tensor], Tensor], x: Tensor, y: Tensor) -> Tensor:
    """E[f(ω·x) f(ω·y)].

    Args:
        f: elementwise function.
        x: (..., d).
        y: (..., d).
    """
    x_norm, y_norm = torch.linalg.vector_norm(x, dim=-1), torch.linalg.vector_norm(y, dim=-1)
    u = x / torch.where(x_norm > 0, x_norm, 1.0).unsqueeze(-1)
    v = y / torch.where(y_norm > 0, y_norm, 1.0).unsqueeze(-1)
    # Accurate for nearly parallel vectors, with finite gradients at x == y.
    apart, together = torch.linalg.vector_norm(u - v, dim=-1), torch.linalg.vector_norm(u + v, dim=-1)
    together = torch.where((apart > 0) | (together > 0), together, 1.0)
    theta = 2 * torch.atan2(apart, together)
    r, r_weight = _legendre(_RADIAL, theta)
    r, r_weight = _RADIUS * r, _RADIUS * r_weight * (_RADIUS * r) * torch.exp(-(_RADIUS * r).square() / 2)
    step, step_weight = _legendre(_ANGULAR, theta)
    total = torch.zeros_like(theta)
    for start, length in (
        (theta * 0 - math.pi / 2, theta),
        (theta - math.pi / 2, math.pi - theta),
        (theta * 0 + math.pi / 2, theta),
        (theta + math.pi / 2, math.pi - theta),
    ):
        alpha = (start.unsqueeze(-1) + length.unsqueeze(-1) * step)[..., None, :]
        radius = r[:, None]
        first = f(x_norm[..., None, None] * radius * torch.cos(alpha))
        second = f(y_norm[..., None, None] * radius * torch.cos(alpha - theta[..., None, None]))
        total = total + length * torch.einsum("...ra,r,a->...", first * second, r_weight, step_weight)
    return total / (2 * math.pi)
