"""Kernels E[f(ω·x) f(ω·y)], ω ~ N(0, I), of features that are powers of ReLU, and of GELU.

**Arc-cosine kernels** (Theorem 3.2 of "Scalable Neural Network Kernels", after Cho & Saul, 2009), θ the angle of x and
y:

    K_n(x, y) = 2 E[1[ω·x>0] (ω·x)^n 1[ω·y>0] (ω·y)^n] = (1/π) ‖x‖^n ‖y‖^n J_n(θ)
    J_0 = π − θ        J_1 = sin θ + (π−θ) cos θ        J_2 = 3 sin θ cos θ + (π−θ)(1 + 2 cos² θ)

The theorem's general formula holds for n <= 1 only. The form valid for every n, used here, is

    J_n(θ) = (−1)^n (sin θ)^{2n+1} ((1/sin θ) d/dθ)^n ((π−θ)/sin θ),

and the feature is the n-th power of the positive part, with order 0 the step 1[ω·x > 0].

**GELU**, with s11 = ‖x‖², s22 = ‖y‖², s12 = x·y, p = 1 + s11, q = 1 + s22, Δ = p q − s12²:

    K = s12 (1/4 + asin(s12/√(pq)) / 2π)  +  (s11 s22 − s12² + s12²/p + s12²/q) / (2π √Δ)

(u, v) = (ω·x, ω·y) is a centred Gaussian pair with covariances s_ij; F is the normal Cdf, n its density,
N = E[n(u) n(v)] = 1/(2π √Δ), and E[F(u) F(v)] = 1/4 + asin(s12/√(pq))/2π is an orthant probability. Stein's lemma,
E[u h(u, v)] = s11 E[∂_u h] + s12 E[∂_v h], with n'(z) = −z n(z), gives

    E[u v F(u) F(v)] = s12 E[F(u) F(v)] + s11 E[v n(u) F(v)] + s12 E[v F(u) n(v)]
    E[u n(u) F(v)]   = −s11 E[u n(u) F(v)] + s12 N            so it is s12 N / p; likewise E[v F(u) n(v)] = s12 N / q
    E[v n(u) F(v)]   = −s12 E[u n(u) F(v)] + s22 N            = (s22 − s12²/p) N

and s11/p = 1 − 1/p collects them into K. Δ >= 1 + s11 + s22 > 0: nothing is singular, also at x == y and at zero.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from snnk_peft.errors import ConfigError

ORDERS = (0, 1, 2)


def _angular(theta: Tensor, complement: Tensor, order: int) -> Tensor:
    """Compute J_n(θ)/π; `complement` is π − θ, passed separately because subtracting loses it near θ = π."""
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
    """Compute J_n(θ)/π from cos θ (clamped to [−1, 1]): the arc-cosine kernel of unit vectors.

    For whole Gram matrices, where only the matrix of cosines is affordable. Exact to rounding for orders 1 and 2 (to
    its square root for order 0 near cos θ = 1); gradients are infinite at |cos θ| = 1: differentiate `arccos_kernel`.
    """
    cosine = cosine.clamp(-1, 1)
    return _angular(torch.acos(cosine), torch.acos(-cosine), order)


def arccos_kernel(x: Tensor, y: Tensor, order: int = 1) -> Tensor:
    """Compute the exact arc-cosine kernel K_n(x, y) of vectors (..., d), which broadcast.

    For order 1 it is 2 E[relu(ω·x) relu(ω·y)].
    The angle is 2 atan2(‖u−v‖, ‖u+v‖) of the unit vectors u, v: accurate for nearly parallel and nearly opposite
    vectors, with finite gradients at x == y. Zero where x or y is the zero vector, whose features are all zero.

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
    # atan2 has no gradient at (0, 0), reached only by a pair of zero vectors; those are masked out below.
    together = torch.where(nonzero, together, 1.0)
    theta = 2 * torch.atan2(apart, together)
    complement = 2 * torch.atan2(together, apart)
    kernel = (x_norm * y_norm) ** order * _angular(theta, complement, order)
    return torch.where(nonzero, kernel, 0.0)


def gelu_kernel_from_moments(s11: Tensor, s22: Tensor, s12: Tensor) -> Tensor:
    """Compute E[gelu(u) gelu(v)] for centred Gaussians with variances s11, s22 and covariance s12, which broadcast."""
    determinant = (s11 * s22 - s12.square()).clamp_min(0)
    p, q = 1 + s11, 1 + s22
    root = torch.sqrt(1 + s11 + s22 + determinant)
    # asin(s12/√(pq)) in a form without cancellation near ±π/2.
    angle = torch.atan2(s12, root)
    return s12 * (0.25 + angle / (2 * math.pi)) + (determinant + s12.square() * (1 / p + 1 / q)) / (2 * math.pi * root)


def gelu_kernel(x: Tensor, y: Tensor) -> Tensor:
    """Compute E[gelu(ω·x) gelu(ω·y)] with ω ~ N(0, I), of vectors (..., d), which broadcast.

    Example:
        >>> zero = torch.zeros(3)
        >>> gelu_kernel(zero, torch.ones(3))
        tensor(0.)
    """
    return gelu_kernel_from_moments(x.square().sum(-1), y.square().sum(-1), (x * y).sum(-1))
