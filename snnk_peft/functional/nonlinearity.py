"""Activations under Gaussian inputs: the dual kernel E[f(m₁ + s₁u) f(m₂ + s₂v)] for normal u, v with correlation ρ.

Closed forms, with c = ρs₁s₂:

    identity      c + m₁m₂
    relu          s₁s₂ κ(ρ)/2,  κ(ρ) = (√(1−ρ²) + (π − arccos ρ)ρ)/π;  with means `shifted_relu_moment`
    leaky_relu    those two, mixed: f(z) = a z + (1−a) relu(z)
    gelu          as in `activation_kernels.py`, without means
    erf           (2/π) arcsin(2c/√((1 + 2s₁²)(1 + 2s₂²))), without means

All others, and gelu and erf with means, by their Hermite series: see `dual_moment`.

Source: Definition 2.5 of "Algorithms for Efficiently Learning Low-Rank Neural Networks"; the kernel of its Definition
4.1 is twice that. Everything broadcasts, is differentiable in all arguments, and expects fp64.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from snnk_peft.errors import ConfigError
from snnk_peft.functional.activation_kernels import arccos_from_cosine, gelu_kernel_from_moments
from snnk_peft.functional.gauss_hermite import gaussian_nodes, hermite_polynomials
from snnk_peft.registry import did_you_mean

Function = Callable[[Tensor], Tensor]
LEAKY_SLOPE = 0.01
DEGREE = 64


class _Arccosine(torch.autograd.Function):
    """Compute κ(ρ), whose derivative (π − arccos ρ)/π is finite where those of its terms are not."""

    @staticmethod
    def forward(ctx: Any, rho: Tensor) -> Tensor:
        ctx.save_for_backward(rho)
        return arccos_from_cosine(rho, 1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (rho,) = ctx.saved_tensors
        return grads[0] * torch.acos(-rho.clamp(-1, 1)) / math.pi


def relu_similarity(rho: Tensor) -> Tensor:
    """Compute κ(ρ) = (√(1−ρ²) + (π − arccos ρ)ρ)/π of correlations in [−1, 1]: 2 E[relu(u) relu(v)]."""
    return _Arccosine.apply(rho)


_NODES = 48
_LARGEST = 1 - 1e-14  # of |ρ|: derivatives of single terms are infinite at 1, that of their sum is not


@functools.lru_cache
def _legendre() -> tuple[list[float], list[float]]:
    points, weights = np.polynomial.legendre.leggauss(_NODES)
    return ((points + 1) / 2).tolist(), (weights / 2).tolist()


def _density(z: Tensor) -> Tensor:
    return torch.exp(-z.square() / 2) / math.sqrt(2 * math.pi)


def _orthant(h: Tensor, k: Tensor, rho: Tensor) -> Tensor:
    """Compute Φ₂(h, k; ρ) = P(u > −h, v > −k), by Plackett's identity with Gauss-Legendre nodes for the integral:

    Φ(h)Φ(k) + (1/2π) ∫₀^{arcsin ρ} exp(−(h² + k² − 2hk sin θ)/(2cos²θ)) dθ.
    """
    points, weights = (torch.tensor(values, dtype=rho.dtype, device=rho.device) for values in _legendre())
    limit = torch.asin(rho)
    angle = limit.unsqueeze(-1) * points
    h_, k_ = h.unsqueeze(-1), k.unsqueeze(-1)
    exponent = (h_.square() + k_.square() - 2 * h_ * k_ * torch.sin(angle)) / (2 * torch.cos(angle).square())
    integral = limit * (torch.exp(-exponent) @ weights)
    return torch.special.ndtr(h) * torch.special.ndtr(k) + integral / (2 * math.pi)


def relu_mean(std: Tensor, mean: Tensor) -> Tensor:
    """Compute E[relu(mean + std·u)], broadcast."""
    z = mean / std.clamp_min(1e-150)
    return mean * torch.special.ndtr(z) + std * _density(z)


def shifted_relu_moment(s1: Tensor, s2: Tensor, rho: Tensor, m1: Tensor, m2: Tensor) -> Tensor:
    """Compute E[relu(m₁ + s₁u) relu(m₂ + s₂v)], s >= 0, broadcast; exact to about 1e-8 of s₁s₂, also gradients.

    With h = m₁/s₁, k = m₂/s₂, q = √(1−ρ²), n and Φ the normal density and distribution, and Φ₂ that of the pair,

        (ρs₁s₂ + m₁m₂) Φ₂(h, k; ρ) + m₂s₁ n(h) Φ((k−ρh)/q) + m₁s₂ n(k) Φ((h−ρk)/q) + s₁s₂ q e^{−(h² + k² − 2ρhk)/2q²}/2π

    by Stein's lemma.
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


def _identity(s1: Tensor, s2: Tensor, rho: Tensor) -> Tensor:
    return s1 * s2 * rho


def _relu(s1: Tensor, s2: Tensor, rho: Tensor) -> Tensor:
    return s1 * s2 * relu_similarity(rho) / 2


def _leaky(s1: Tensor, s2: Tensor, rho: Tensor) -> Tensor:
    return s1 * s2 * (LEAKY_SLOPE * rho + (1 - LEAKY_SLOPE) ** 2 * relu_similarity(rho) / 2)


def _gelu(s1: Tensor, s2: Tensor, rho: Tensor) -> Tensor:
    return gelu_kernel_from_moments(s1.square(), s2.square(), s1 * s2 * rho)


def _erf(s1: Tensor, s2: Tensor, rho: Tensor) -> Tensor:
    spread = (1 + 2 * s1.square()) * (1 + 2 * s2.square())
    return 2 / math.pi * torch.asin(2 * s1 * s2 * rho / spread.sqrt())


def _shifted_identity(s1: Tensor, s2: Tensor, rho: Tensor, m1: Tensor, m2: Tensor) -> Tensor:
    return s1 * s2 * rho + m1 * m2


def _shifted_leaky(s1: Tensor, s2: Tensor, rho: Tensor, m1: Tensor, m2: Tensor) -> Tensor:
    a, c = LEAKY_SLOPE, s1 * s2 * rho
    # E[u relu(v)] = E[u] E[relu(v)] + Cov(u, v) P(v > 0)
    mixed = m1 * relu_mean(s2, m2) + c * torch.special.ndtr(m2 / s2.clamp_min(1e-150))
    mixed = mixed + m2 * relu_mean(s1, m1) + c * torch.special.ndtr(m1 / s1.clamp_min(1e-150))
    return a**2 * (c + m1 * m2) + a * (1 - a) * mixed + (1 - a) ** 2 * shifted_relu_moment(s1, s2, rho, m1, m2)


class Nonlinearity(NamedTuple):
    """An elementwise function with its known properties.

    Attributes:
        function: tensor -> tensor of the same shape.
        kernel: closed form (s₁, s₂, ρ) -> E[f(s₁u) f(s₂v)], or None.
        shifted_kernel: closed form (s₁, s₂, ρ, m₁, m₂) -> E[f(m₁ + s₁u) f(m₂ + s₂v)], or None.
        homogeneous: f(cz) = c f(z) for c > 0.
        smooth: analytic near the real line, so that few quadrature nodes are exact.
        known: part of this package, so that derived values may be cached.
    """

    function: Function
    kernel: Callable[[Tensor, Tensor, Tensor], Tensor] | None = None
    shifted_kernel: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor] | None = None
    homogeneous: bool = False
    smooth: bool = False
    known: bool = False


def _identity_function(z: Tensor) -> Tensor:
    return z


def _leaky_function(z: Tensor) -> Tensor:
    return torch.nn.functional.leaky_relu(z, LEAKY_SLOPE)


NONLINEARITIES: dict[str, Nonlinearity] = {
    "identity": Nonlinearity(_identity_function, _identity, _shifted_identity, True, True, True),
    "relu": Nonlinearity(torch.relu, _relu, shifted_relu_moment, True, False, True),
    "leaky_relu": Nonlinearity(_leaky_function, _leaky, _shifted_leaky, True, False, True),
    "erf": Nonlinearity(torch.erf, _erf, None, False, True, True),
    "gelu": Nonlinearity(torch.nn.functional.gelu, _gelu, None, False, True, True),
    "silu": Nonlinearity(torch.nn.functional.silu, smooth=True, known=True),
    "tanh": Nonlinearity(torch.tanh, smooth=True, known=True),
    "sigmoid": Nonlinearity(torch.sigmoid, smooth=True, known=True),
    "softplus": Nonlinearity(torch.nn.functional.softplus, smooth=True, known=True),
}


def nonlinearity(activation: str | Function) -> Nonlinearity:
    """Look up an activation by its name, or identify an elementwise function by its values.

    Args:
        activation: a key of NONLINEARITIES, or any elementwise function (nn.GELU(), torch.tanh, your own).

    Raises:
        ConfigError: an unknown name, or a function that is not elementwise.
    """
    if isinstance(activation, str):
        if activation not in NONLINEARITIES:
            unknown = did_you_mean("activation", activation, list(NONLINEARITIES))
            raise ConfigError(f"{unknown}, or any elementwise function")
        return NONLINEARITIES[activation]
    if not callable(activation):
        names = ", ".join(NONLINEARITIES)
        raise ConfigError(f"activation is {activation!r}; expected one of {names}, or an elementwise function")
    grid = torch.linspace(-30, 30, 601, dtype=torch.float64)
    with torch.no_grad():
        values = activation(grid)
        if not isinstance(values, Tensor) or values.shape != grid.shape or not values.isfinite().all():
            raise ConfigError(
                f"activation {activation!r} is not finite and elementwise on 601 numbers in [-30, 30]; expected a "
                "function that maps every tensor to one of its shape"
            )
        for known in NONLINEARITIES.values():
            if torch.allclose(values.double(), known.function(grid), rtol=1e-13, atol=1e-13):
                return known
    return Nonlinearity(activation)


def quadrature_nodes(f: Nonlinearity, std: Tensor, kinked: int = 2048) -> int:
    """Return the number of equally spaced nodes that units f(m + std·u) need; `kinked` for non-smooth f."""
    steepest = float(std.detach().max())
    # A steep unit has its poles close to the real line.
    return 128 if f.smooth and steepest <= 2 else 256 if f.smooth and steepest <= 4 else kinked


def unit_coefficients(f: Nonlinearity, std: Tensor, mean: Tensor, nodes: int) -> tuple[Tensor, Tensor]:
    """Compute c_k (n, DEGREE + 1) and E[f²] (n,) of units f(mean_i + std_i u), differentiable; `nodes` as in
    `gaussian_nodes`."""
    points, weights = gaussian_nodes(nodes, std.device)
    polynomials = (hermite_polynomials(points, DEGREE) * weights).T
    values = f.function(mean.unsqueeze(1) + std.unsqueeze(1) * points)
    return values @ polynomials, values.square() @ weights


def dual_moment(
    f: Nonlinearity, s1: Tensor, s2: Tensor, rho: Tensor, m1: Tensor | None = None, m2: Tensor | None = None
) -> Tensor:
    """Compute E[f(m₁ + s₁u) f(m₂ + s₂v)], elementwise; all arguments broadcast, means of None are 0.

    Without a closed form it is Σ_k c_k(m₁, s₁) c_k(m₂, s₂) ρ^k (Mehler's formula) up to degree 64, plus √(e₁e₂) ρ^65
    with e the energy E[f²] beyond that degree: exact at ρ = 1 for equal units, and elsewhere wrong by less than √(e₁e₂)
    |ρ|^65. For smooth f e is 0 to rounding for s <= 1 and grows as units become steep: at ρ = .98 the error is 1e-4 of
    the variance for tanh and erf of s = 4, 1e-3 and 2e-3 of s = 8, 6e-3 and 7e-3 of s = 20 (gelu and silu: below 1e-4).
    For f with a kink e is some 1e-4 of the variance at any s.
    """
    if m1 is None or m2 is None:
        if f.kernel is not None:
            return f.kernel(s1, s2, rho)
        m1 = m2 = torch.zeros_like(rho)
    if f.shifted_kernel is not None:
        return f.shifted_kernel(s1, s2, rho, m1, m2)
    s1, s2, rho, m1, m2 = torch.broadcast_tensors(s1, s2, rho, m1, m2)
    flat = [tensor.reshape(-1) for tensor in (s1, s2, rho, m1, m2)]
    nodes = max(quadrature_nodes(f, s1), quadrature_nodes(f, s2))
    first, energy_first = unit_coefficients(f, flat[0], flat[3], nodes)
    second, energy_second = unit_coefficients(f, flat[1], flat[4], nodes)
    powers = flat[2].unsqueeze(1) ** torch.arange(DEGREE + 2, device=rho.device)
    rest = _beyond(first, energy_first) * _beyond(second, energy_second)
    return ((first * second * powers[:, :-1]).sum(1) + rest * powers[:, -1]).reshape(rho.shape)


def _beyond(coefficients: Tensor, energy: Tensor) -> Tensor:
    """Compute the root of the energy beyond the last degree; the square root has no gradient at 0."""
    rest = energy - coefficients.square().sum(1)
    present = rest > 1e-13 * energy
    return torch.where(present, torch.where(present, rest, 1.0).sqrt(), 0.0)
