"""The exact kernel of GELU features: E[gelu(ω·x) gelu(ω·y)] for ω ~ N(0, I), with gelu(z) = z·Cdf(z).

With s11 = ‖x‖², s22 = ‖y‖², s12 = x·y, p = 1 + s11, q = 1 + s22, Δ = p q − s12²:

    K = s12 (1/4 + asin(s12/√(pq)) / 2π)  +  (s11 s22 − s12² + s12²/p + s12²/q) / (2π √Δ)

Derivation. (u, v) = (ω·x, ω·y) is a centred Gaussian pair with covariances s_ij; F is the normal Cdf, n its density,
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


def gelu_kernel_from_moments(s11: Tensor, s22: Tensor, s12: Tensor) -> Tensor:
    """E[gelu(u) gelu(v)] for centred Gaussians with variances s11, s22 and covariance s12.

    Args:
        s11: variance of u; broadcasts with the others.
        s22: variance of v.
        s12: covariance, |s12| <= √(s11 s22).

    Returns:
        The broadcast shape.
    """
    determinant = (s11 * s22 - s12.square()).clamp_min(0)
    p, q = 1 + s11, 1 + s22
    root = torch.sqrt(1 + s11 + s22 + determinant)
    # asin(s12/√(pq)) in a form without cancellation near ±π/2.
    angle = torch.atan2(s12, root)
    return s12 * (0.25 + angle / (2 * math.pi)) + (determinant + s12.square() * (1 / p + 1 / q)) / (2 * math.pi * root)


def gelu_kernel(x: Tensor, y: Tensor) -> Tensor:
    """The exact kernel that GELU features estimate, E[gelu(ω·x) gelu(ω·y)] with ω ~ N(0, I).

    Args:
        x: (..., d).
        y: (..., d); leading dimensions broadcast against those of x.

    Returns:
        (...).

    Example:
        >>> zero = torch.zeros(3)
        >>> gelu_kernel(zero, torch.ones(3))
        tensor(0.)
    """
    return gelu_kernel_from_moments(x.square().sum(-1), y.square().sum(-1), (x * y).sum(-1))
