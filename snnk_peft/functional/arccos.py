"""Arc-cosine kernels, which random features of the form 1[ω·x > 0](ω·x)^n estimate.

    K_n(x, y) = 2 E[1[ω·x>0] (ω·x)^n 1[ω·y>0] (ω·y)^n] = (1/π) ‖x‖^n ‖y‖^n J_n(θ),   ω ~ N(0, I)

with θ the angle between x and y, and

    J_0 = π − θ        J_1 = sin θ + (π−θ) cos θ        J_2 = 3 sin θ cos θ + (π−θ)(1 + 2 cos² θ)

Source: Theorem 3.2 of "Scalable Neural Network Kernels" (after Cho & Saul, 2009). The theorem's general formula holds
for n <= 1 only. The form valid for every n, used here, is

    J_n(θ) = (−1)^n (sin θ)^{2n+1} ((1/sin θ) d/dθ)^n ((π−θ)/sin θ),

and the feature is the n-th power of the positive part, with order 0 the step 1[ω·x > 0].
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from snnk_peft.errors import ConfigError

ORDERS = (0, 1, 2)


def _angular(theta: Tensor, complement: Tensor, order: int) -> Tensor:
    """J_n(θ)/π. `complement` is π − θ, passed separately because the subtraction loses it near θ = π."""
    if order not in ORDERS:
        raise ConfigError(f"order is {order!r}; expected one of {', '.join(map(str, ORDERS))}")
    if order == 0:
        return complement / math.pi
    # The smaller of the two angles carries full relative precision, so sines are taken from it.
    sine = torch.sin(torch.minimum(theta, complement))
    cosine = torch.cos(theta)
    if order == 1:
        return (sine + complement * cosine) / math.pi
    return (3 * sine * cosine + complement * (1 + 2 * cosine.square())) / math.pi


def arccos_from_cosine(cosine: Tensor, order: int) -> Tensor:
    """J_n(θ)/π as a function of cos θ: the arc-cosine kernel of unit vectors.

    For whole Gram matrices, where only the matrix of cosines is affordable. Values are exact to rounding for orders 1
    and 2 (to its square root for order 0 near cos θ = 1); gradients are infinite at |cos θ| = 1, so differentiate
    `arccos_kernel` instead.

    Args:
        cosine: (...), clamped to [−1, 1].
        order: 0, 1 or 2.

    Returns:
        (...), in [0, 1] for orders 0 and 1 and in [0, 3] for order 2.
    """
    cosine = cosine.clamp(-1, 1)
    return _angular(torch.acos(cosine), torch.acos(-cosine), order)


def arccos_kernel(x: Tensor, y: Tensor, order: int = 1) -> Tensor:
    """Compute the exact arc-cosine kernel K_n(x, y); for order 1, half of it is E[relu(ω·x) relu(ω·y)].

    The angle is 2 atan2(‖u−v‖, ‖u+v‖) of the unit vectors u, v: accurate for nearly parallel and nearly opposite
    vectors, with finite gradients at x == y.

    Args:
        x: (..., d), fp32 or fp64.
        y: (..., d); leading dimensions broadcast against those of x.
        order: 0 (step features), 1 (ReLU features) or 2 (squared ReLU features).

    Returns:
        (...). Zero where x or y is the zero vector, since its features are all zero.

    Raises:
        ConfigError: the order is not 0, 1 or 2.

    Example:
        >>> x = torch.tensor([3.0, 4.0])
        >>> arccos_kernel(x, x, order=1)   # 2 E[relu(ω·x)²] = ‖x‖²
        tensor(25.)
    """
    x_norm = torch.linalg.vector_norm(x, dim=-1)
    y_norm = torch.linalg.vector_norm(y, dim=-1)
    u = x / torch.where(x_norm > 0, x_norm, 1.0).unsqueeze(-1)
    v = y / torch.where(y_norm > 0, y_norm, 1.0).unsqueeze(-1)
    apart = torch.linalg.vector_norm(u - v, dim=-1)
    together = torch.linalg.vector_norm(u + v, dim=-1)
    nonzero = (x_norm > 0) & (y_norm > 0)
    # atan2 has no gradient at (0, 0), which only a pair of zero vectors reaches; those are masked out below.
    together = torch.where(nonzero, together, 1.0)
    theta = 2 * torch.atan2(apart, together)
    complement = 2 * torch.atan2(together, apart)
    kernel = (x_norm * y_norm) ** order * _angular(theta, complement, order)
    return torch.where(nonzero, kernel, 0.0)
