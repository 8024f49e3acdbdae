"""The best norm and mean of a single output, given its highest possible correlation with the original output.

With t = ‖w‖, bias b and correlation ρ, the best f(m + s u) for f(b + t v) is a least-squares fit in one dimension:

    E[(f(m + su) − f(b + tv))²] = E[(f(m + su) − T(u))²] + E[f(b + tv)²] − E[T(u)²]
    T(u) = E[f(b + tv) | u] = Σ_k c_k ρ^k h_k(u)

Gauss-Newton steps on quadrature nodes fit s and m of many outputs at once. This leaves the minimum risk of an output as
a function of ρ alone (`risk_profiles`), so a subspace can be searched without evaluating f again.

For positively homogeneous f without biases s = t k(ρ)/k(1), for ReLU t κ(ρ). For other activations by name, without
biases, s/t is interpolated in a table of (t, ρ) that is built once per process, at a small fraction of an SVD's cost.
"""

from __future__ import annotations

import functools
import math

import numpy as np
import torch
from torch import Tensor

from snnk_peft.functional.gauss_hermite import gaussian_nodes, hermite_polynomials
from snnk_peft.functional.nonlinearity import (
    DEGREE,
    NONLINEARITIES,
    Nonlinearity,
    quadrature_nodes,
    relu_similarity,
    unit_coefficients,
)
from snnk_peft.low_rank.problem import unit_scale

_CHUNK = 1 << 17  # values of f held at once: they should stay in the cache
_STEPS = 30
_PROFILE = 13
_TABLE = 33  # log t in [log _SMALLEST, log _LARGEST] and θ = arccos ρ in [0, π/2], so many of each
_SMALLEST, _LARGEST = 0.05, 20.0


@functools.lru_cache
def _gauss_hermite() -> tuple[list[float], list[float]]:
    points, weights = np.polynomial.hermite_e.hermegauss(24)
    return points.tolist(), (weights / weights.sum()).tolist()


class _Units:
    """Outputs f(b + t v) with norms t (n,) and biases b (n,), to be fitted by f(m + s u)."""

    def __init__(self, f: Nonlinearity, target: Tensor, bias: Tensor, fit_mean: bool, nodes: int):
        self.f, self.target, self.bias, self.fit_mean = f, target, bias, fit_mean
        self.points, self.weights = gaussian_nodes(nodes, target.device)
        self.polynomials = hermite_polynomials(self.points, DEGREE)
        self.coefficients, self.energy = unit_coefficients(f, target, bias, nodes)

    def _wanted(self, rho: Tensor) -> Tensor:
        """Compute T on the nodes, (n, nodes), by the truncated series, or by smoothing for steep units near ρ = 1."""
        powers = rho.unsqueeze(1) ** torch.arange(DEGREE + 1, device=rho.device)
        wanted = (self.coefficients * powers) @ self.polynomials
        near = rho > 0.9
        if near.any():
            target, bias, close = (column[near].unsqueeze(1) for column in (self.target, self.bias, rho))
            centre, spread = bias + target * close * self.points, target * (1 - close.square()).clamp_min(0).sqrt()
            points, weights = _gauss_hermite()
            smoothed = torch.zeros_like(centre)
            for point, weight in zip(points, weights, strict=True):
                smoothed += weight * self.f.function(centre + spread * point)
            wanted[near] = smoothed
        return wanted

    def _evaluate(self, wanted: Tensor, scale: Tensor, mean: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        with torch.enable_grad():
            z = (mean.unsqueeze(1) + scale.unsqueeze(1) * self.points).requires_grad_()
            values = self.f.function(z)
            (slope,) = torch.autograd.grad(values.sum(), z)
        residual = wanted - values.detach()
        return residual, slope, residual.square() @ self.weights

    def fit(self, rho: Tensor, scale: Tensor, mean: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Take damped Gauss-Newton steps that never increase the risk; return s, m and risk, each (n,)."""
        wanted = self._wanted(rho)
        residual, slope, error = self._evaluate(wanted, scale, mean)
        damping, stalled = torch.full_like(scale, 1e-3), torch.zeros_like(scale)
        for _ in range(_STEPS):
            along = slope * self.points
            a = (along.square() @ self.weights) * (1 + damping)
            d = (slope.square() @ self.weights) * (1 + damping)
            b = (along * slope) @ self.weights
            p, q = (residual * along) @ self.weights, (residual * slope) @ self.weights
            if self.fit_mean:
                determinant = unit_scale(a * d - b.square())
                step, shift = (d * p - b * q) / determinant, (a * q - b * p) / determinant
            else:
                step, shift = p / unit_scale(a), torch.zeros_like(q)
            trial_residual, trial_slope, trial_error = self._evaluate(wanted, scale + step, mean + shift)
            better = trial_error < error
            # Rounding errors are about 1e-16 of the energy; a gain of 1e-10 of it is worth another step.
            stalled = torch.where(error - trial_error > 1e-10 * self.energy, 0, stalled + 1)
            scale, mean = torch.where(better, scale + step, scale), torch.where(better, mean + shift, mean)
            residual = torch.where(better.unsqueeze(1), trial_residual, residual)
            slope = torch.where(better.unsqueeze(1), trial_slope, slope)
            error = torch.where(better, trial_error, error)
            damping = torch.where(better, damping / 10, damping * 10)
            if stalled.min() >= 2:
                break
        return scale, mean, (self.energy - wanted.square() @ self.weights + error).clamp_min(0)


def _blocks(f: Nonlinearity, target: Tensor, bias: Tensor | None) -> list[tuple[slice, _Units]]:
    """Split the outputs into blocks of rows that fit into the cache."""
    nodes = quadrature_nodes(f, target, kinked=512)
    rows = max(1, _CHUNK // nodes)
    slices = [slice(at, at + rows) for at in range(0, len(target), rows)]
    centre = torch.zeros_like(target) if bias is None else bias
    return [(rows, _Units(f, target[rows], centre[rows], bias is not None, nodes)) for rows in slices]


def fit_units(f: Nonlinearity, target: Tensor, rho: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Compute `best_rows` by Gauss-Newton steps from m = b and ReLU's norm, since even functions are stuck at s = 0."""
    norms = target * relu_similarity(rho)
    means = torch.zeros_like(target) if bias is None else bias.clone()
    for rows, units in _blocks(f, target, bias):
        norms[rows], means[rows], _ = units.fit(rho[rows], norms[rows], means[rows])
    return norms, None if bias is None else means


def risk_profiles(f: Nonlinearity, target: Tensor, bias: Tensor | None) -> Tensor:
    """Fit polynomials to the minimum risk of each output over ρ in [0, 1]: coefficients (n, k) for `profile_risks`."""
    x = -torch.cos(torch.arange(_PROFILE, dtype=torch.float64) * (math.pi / (_PROFILE - 1))).to(target.device)
    risks = target.new_empty(len(target), _PROFILE)
    for rows, units in _blocks(f, target, bias):
        norms = target[rows]
        means = torch.zeros_like(norms) if bias is None else bias[rows]
        for place, rho in enumerate(torch.cos((x + 1) * (math.pi / 4)).tolist()):  # from ρ = 1, where s = t, m = b
            norms, means, risks[rows, place] = units.fit(torch.full_like(norms, rho), norms, means)
    return torch.linalg.solve(torch.linalg.vander(x), risks.T).T


def profile_risks(profiles: Tensor, rho: Tensor) -> Tensor:
    """Evaluate the profiles of `risk_profiles`, polynomials in arccos ρ, at ρ (n,)."""
    x = torch.acos(rho.clamp(0, 1 - 1e-12)) * (4 / math.pi) - 1
    return (profiles * x.unsqueeze(1) ** torch.arange(_PROFILE, device=rho.device)).sum(1)


def best_rows(f: Nonlinearity, target: Tensor, rho: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Return the best s (n,) and m (n,) for outputs of norm t (n,), fp64, ρ (n,) in [0, 1] and bias b (n,).

    Without biases m is 0, and None is returned.
    """
    if f is NONLINEARITIES["identity"]:
        return target * rho, bias
    if bias is None and f.homogeneous and f.kernel is not None:
        one = torch.ones_like(rho)
        return target * f.kernel(one, one, rho) / _energy(f), None
    if bias is None and f.known:
        return _from_table(f, target, rho), None
    return fit_units(f, target, rho, bias)


@functools.lru_cache(maxsize=32)
def _energy(f: Nonlinearity) -> float:
    assert f.kernel is not None
    one = torch.ones((), dtype=torch.float64)
    return float(f.kernel(one, one, one))


@functools.lru_cache(maxsize=32)
@torch.inference_mode(False)
def _table(f: Nonlinearity) -> Tensor:
    """Tabulate (s/t − cos θ)/sin²θ over (log t, θ), which is smooth and makes interpolation exact at ρ = 1."""
    t = torch.logspace(math.log10(_SMALLEST), math.log10(_LARGEST), _TABLE, dtype=torch.float64)
    # Slightly off 0, where the quotient is a limit.
    theta = torch.linspace(0, math.pi / 2, _TABLE, dtype=torch.float64).clamp_min(0.02)
    rows = [
        fit_units(f, some.repeat_interleave(_TABLE), torch.cos(theta).repeat(len(some)), None)[0].reshape(-1, _TABLE)
        for some in t.split(_TABLE // 3)  # steep ones need more nodes
    ]
    return (torch.cat(rows) / t.unsqueeze(1) - torch.cos(theta)) / torch.sin(theta).square()


def _from_table(f: Nonlinearity, target: Tensor, rho: Tensor) -> Tensor:
    table = _table(f).to(target.device)
    across = torch.acos(rho) * (4 / math.pi) - 1
    down = target.clamp(_SMALLEST, _LARGEST).log() - math.log(_SMALLEST)
    place = torch.stack((across, down * (2 / math.log(_LARGEST / _SMALLEST)) - 1), -1)
    read = torch.nn.functional.grid_sample(
        table[None, None], place[None, None], padding_mode="border", align_corners=True
    )
    return target * (rho + (1 - rho.square()) * read[0, 0, 0])
