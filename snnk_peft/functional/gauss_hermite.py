"""Expectations of products of activations under correlated Gaussians, for any activation, by Hermite series.

If z_a and z_b are Gaussian with correlation ρ, then for scalar functions f, g (Mehler's formula)

    E[f(z_a) g(z_b)] = Σ_k c_k(a) c_k(b) ρ^k,     c_k(a) = E[f(mean_a + std_a t) h_k(t)],   t ~ N(0, 1)

with h_k the probabilists' Hermite polynomials normalised to E[h_k²] = 1. Every unit may have its own mean and std, so
biases and shifted inputs cost nothing extra. Cost: n·nodes evaluations of f per set of n units, then degree products
of the size of the correlation matrix.

Quadrature. The c_k are integrals against a Gaussian, taken in fp64 with equally spaced nodes on [−12, 12]. For smooth f
this is as exact as Gauss-Hermite nodes (coefficients of the cosine: 1e-13 for every degree up to 100). For f with a
kink (ReLU) its error is O(spacing²), about 1e-6 at the default, where 200 Gauss-Hermite nodes leave about 1e-3; for f
with a jump O(spacing), unless the jump is at the mean (the even number of nodes is symmetric about it).

Truncation. Smooth activations have geometrically decaying c_k. At a kink c_k ~ k^(−5/4), so the part of E[f²] beyond
degree K decays as K^(−3/2): 2e-4 of the variance of ReLU at the default degree 64 (at a jump as K^(−1/2): 4e-2). That
part enters with a factor ρ^(K+1) or smaller, so only pairs with |ρ| near 1 see it.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from snnk_peft.errors import ConfigError

ScalarFunction = Callable[[Tensor], Tensor]

_HALF_WIDTH = 12.0  # the normal density there is 2e-32, so degree-64 integrands have died out
_CHUNK = 1 << 22  # values of f held at once


def gaussian_nodes(nodes: int = 2048, device: torch.device | str | None = None) -> tuple[Tensor, Tensor]:
    """Return points t and weights w, fp64 (nodes,), such that Σ_j w_j f(t_j) ≈ E[f(t)] for t ~ N(0, 1).

    At least 65 nodes. The error at a kink falls as 1/nodes²; smooth functions need no more than 129.
    """
    if nodes < 65:
        raise ConfigError(f"nodes is {nodes}; expected >= 65 (the default 2048 suits functions with kinks)")
    points = torch.linspace(-_HALF_WIDTH, _HALF_WIDTH, nodes, dtype=torch.float64, device=device)
    density = torch.exp(-points.square() / 2) / math.sqrt(2 * math.pi)
    return points, density * (2 * _HALF_WIDTH / (nodes - 1))


def hermite_polynomials(points: Tensor, degree: int) -> Tensor:
    """Evaluate the normalised probabilists' Hermite polynomials h_0..h_degree, (degree+1, *points.shape)."""
    values = [torch.ones_like(points), points]
    for k in range(1, degree):
        values.append((points * values[k] - math.sqrt(k) * values[k - 1]) / math.sqrt(k + 1))
    return torch.stack(values[: degree + 1])


def _evaluate(f: ScalarFunction, values: Tensor) -> Tensor:
    result = f(values)
    if result.shape != values.shape:
        raise ConfigError(
            f"the function maps {tuple(values.shape)} to {tuple(result.shape)}; expected an elementwise one"
        )
    if not torch.isfinite(result).all():
        raise ValueError(
            "the function is not finite on mean ± 12 std of its pre-activations "
            f"(arguments from {values.min():.3g} to {values.max():.3g}); reduce the input std or bound the function"
        )
    return result


def hermite_coefficients(f: ScalarFunction, mean: Tensor, std: Tensor, degree: int = 64, nodes: int = 2048) -> Tensor:
    """Compute Hermite coefficients (n, degree + 1), fp64, of f(z_i), z_i ~ N(mean_i, std_i²); column 0 is E[f(z_i)].

    Args:
        f: elementwise scalar function; it is evaluated in fp64.
        mean: (n,).
        std: (n,), >= 0; a unit with std 0 is the constant f(mean).
        degree: highest degree kept, 0 to 100. See the module text for what truncation costs.
        nodes: see `gaussian_nodes`.

    Raises:
        ConfigError: degree or nodes out of range, mean and std of different shapes, f not elementwise.
        ValueError: f overflows within 12 standard deviations.
    """
    faults = []
    if not 0 <= degree <= 100:
        faults.append(f"degree is {degree}; expected 0 to 100")
    if mean.ndim != 1 or mean.shape != std.shape:
        faults.append(f"mean is {tuple(mean.shape)} and std is {tuple(std.shape)}; expected the same (n,)")
    if faults:
        raise ConfigError(faults)
    points, weights = gaussian_nodes(nodes, mean.device)
    weighted = (hermite_polynomials(points, degree) * weights).T
    mean, std = mean.double().unsqueeze(1), std.double().unsqueeze(1)
    rows = max(1, _CHUNK // nodes)
    blocks = [
        _evaluate(f, block_mean + block_std * points) @ weighted
        for block_mean, block_std in zip(mean.split(rows), std.split(rows), strict=True)
    ]
    return torch.cat(blocks)


def gaussian_product(
    f: ScalarFunction,
    g: ScalarFunction,
    mean_f: Tensor,
    std_f: Tensor,
    mean_g: Tensor,
    std_g: Tensor,
    nodes: int = 2048,
) -> Tensor:
    """Compute E[f(mean_f + std_f t) g(mean_g + std_g t)], t ~ N(0, 1): case |ρ| = 1 (std_g < 0 for −1), untruncated.

    Means and standard deviations are (n,), one entry per pair of units; result (n,) in fp64.
    """
    points, weights = gaussian_nodes(nodes, mean_f.device)
    columns = torch.stack([mean_f, std_f, mean_g, std_g], dim=1).double()
    totals = []
    for block in columns.split(max(1, _CHUNK // nodes)):
        a, b, c, d = (column.unsqueeze(1) for column in block.unbind(1))
        totals.append((_evaluate(f, a + b * points) * _evaluate(g, c + d * points)) @ weights)
    return torch.cat(totals)


def dual_kernel(coeffs_a: Tensor, coeffs_b: Tensor, rho: Tensor) -> Tensor:
    """Compute E[f(z_a) g(z_b)] for every pair of units, Σ_k c_k(a) c_k(b) ρ_ab^k, (n_a, n_b).

    Args:
        coeffs_a: (n_a, degree+1) from `hermite_coefficients`.
        coeffs_b: (n_b, degree+1).
        rho: (n_a, n_b) correlations of the pre-activations, in [−1, 1].
    """
    if rho.shape != (len(coeffs_a), len(coeffs_b)) or coeffs_a.shape[1] != coeffs_b.shape[1]:
        raise ConfigError(
            f"coefficients {tuple(coeffs_a.shape)} and {tuple(coeffs_b.shape)} do not fit correlations "
            f"{tuple(rho.shape)}; expected (n_a, degree+1), (n_b, degree+1) and (n_a, n_b)"
        )
    total = torch.zeros_like(rho)
    for column_a, column_b in zip(coeffs_a.T.flip(0), coeffs_b.T.flip(0), strict=True):  # Horner, highest degree first
        total = torch.addr(total * rho, column_a, column_b)
    return total
