"""E[relu(m₁ + s₁u) relu(m₂ + s₂v)] for normal u, v with correlation ρ, exactly: the ReLU kernel with biases.

With h = m₁/s₁, k = m₂/s₂, q = √(1−ρ²), n and Φ the normal density and distribution, and Φ₂ that of the pair,

    (ρs₁s₂ + m₁m₂) Φ₂(h, k; ρ) + m₂s₁ n(h) Φ((k−ρh)/q) + m₁s₂ n(k) Φ((h−ρk)/q) + s₁s₂ q e^{−(h² + k² − 2ρhk)/2q²}/2π

(moments of a truncated pair, by Stein's lemma), and by Plackett's identity, with Gauss-Legendre nodes for the integral,

    Φ₂(h, k; ρ) = Φ(h)Φ(k) + (1/2π) ∫₀^{arcsin ρ} exp(−(h² + k² − 2hk sin θ)/(2cos²θ)) dθ.
"""

from __future__ import annotations

import functools
import math

import numpy as np
import torch
from torch import Tensor

_NODES = 48
_LARGEST = 1 - 1e-14  # of |ρ|: derivatives of single terms are infinite at 1, that of their sum is not


@functools.lru_cache
def _legendre() -> tuple[list[float], list[float]]:
    points, weights = np.polynomial.legendre.leggauss(_NODES)
    return ((points + 1) / 2).tolist(), (weights / 2).tolist()


def _density(z: Tensor) -> Tensor:
    return torch.exp(-z.square() / 2) / math.sqrt(2 * math.pi)


def _orthant(h: Tensor, k: Tensor, rho: Tensor) -> Tensor:
    """P(u > −h, v > −k)."""
    points, weights = (torch.tensor(values, dtype=rho.dtype, device=rho.device) for values in _legendre())
    limit = torch.asin(rho)
    angle = limit.unsqueeze(-1) * points
    h_, k_ = h.unsqueeze(-1), k.unsqueeze(-1)
    exponent = (h_.square() + k_.square() - 2 * h_ * k_ * torch.sin(angle)) / (2 * torch.cos(angle).square())
    integral = limit * (torch.exp(-exponent) @ weights)
    return torch.special.ndtr(h) * torch.special.ndtr(k) + integral / (2 * math.pi)


def relu_mean(std: Tensor, mean: Tensor) -> Tensor:
    """E[relu(mean + std·u)], broadcast."""
    z = mean / std.clamp_min(1e-150)
    return mean * torch.special.ndtr(z) + std * _density(z)


def shifted_relu_moment(s1: Tensor, s2: Tensor, rho: Tensor, m1: Tensor, m2: Tensor) -> Tensor:
    """E[relu(m₁ + s₁u) relu(m₂ + s₂v)]; right to about 1e-8 of s₁s₂, gradients included.

    Args:
        s1: standard deviation, >= 0; the five broadcast.
        s2: standard deviation, >= 0.
        rho: correlation, in [−1, 1].
        m1: mean.
        m2: mean.
    """
    s1, s2, rho, m1, m2 = torch.broadcast_tensors(s1, s2, rho, m1, m2)
    rho = rho.clamp(-_LARGEST, _LARGEST)
    # Beyond 30 standard deviations a unit is a constant or linear; the bound keeps squares finite.
    h = (m1 / s1.clamp_min(1e-150)).clamp(-30, 30)
    k = (m2 / s2.clamp_min(1e-150)).clamp(-30, 30)
    q = torch.sqrt((1 - rho) * (1 + rho))
    both = (rho * s1 * s2 + m1 * m2) * _orthant(h, k, rho)
    edges = m2 * s1 * _density(h) * torch.special.ndtr((k - rho * h) / q)
    edges = edges + m1 * s2 * _density(k) * torch.special.ndtr((h - rho * k) / q)
    corner = s1 * s2 * q * torch.exp(-(((h - rho * k) / q).square() + k.square()) / 2) / (2 * math.pi)
    return both + edges + corner
