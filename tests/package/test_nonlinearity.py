"""Dual kernels of activations against brute-force integrals, samples and automatic differentiation."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import nn

from snnk_peft.errors import ConfigError
from snnk_peft.functional.nonlinearity import NONLINEARITIES, dual_moment, nonlinearity, relu_similarity

F64 = torch.float64
SMOOTH = sorted(name for name, f in NONLINEARITIES.items() if f.smooth)


def pairs(count: int, seed: int = 0) -> list[torch.Tensor]:
    """s₁, s₂, ρ, m₁, m₂."""
    g = torch.Generator().manual_seed(seed)
    spread = torch.rand(2, count, generator=g, dtype=F64) * 2 + 0.05
    rho = torch.rand(count, generator=g, dtype=F64) * 2 - 1
    means = torch.randn(2, count, generator=g, dtype=F64)
    return [*spread, rho, *means]


def brute_force(f, s1, s2, rho, m1, m2) -> torch.Tensor:
    """The double integral on Gauss-Hermite nodes, exact for smooth functions."""
    points, weights = np.polynomial.hermite_e.hermegauss(120)
    t, w = torch.tensor(points), torch.tensor(weights) / math.sqrt(2 * math.pi)
    first = f(m1 + s1 * t)[:, None]
    second = f(m2 + s2 * (rho * t[:, None] + (1 - rho**2).sqrt() * t))
    return w @ (first * second) @ w


@pytest.mark.parametrize("name", SMOOTH)
@pytest.mark.parametrize("means", [False, True])
def test_dual_moments_of_smooth_activations_are_the_double_integral(name, means):
    f = NONLINEARITIES[name]
    s1, s2, rho, m1, m2 = pairs(12)
    found = dual_moment(f, s1, s2, rho, *((m1, m2) if means else ()))
    if not means:
        m1 = m2 = torch.zeros_like(m1)
    expected = [brute_force(f.function, *column) for column in zip(s1, s2, rho, m1, m2, strict=True)]
    # Poles at distance π/2s from the real line are what limits the reference (tanh, sigmoid, silu, softplus).
    torch.testing.assert_close(found, torch.stack(expected), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("name", ["relu", "leaky_relu"])
@pytest.mark.parametrize("means", [False, True])
def test_dual_moments_of_kinked_activations_are_the_mean_over_samples(name, means):
    f = NONLINEARITIES[name]
    s1, s2, rho, m1, m2 = pairs(12)
    rho[:2] = torch.tensor([1.0, 0.9999])
    found = dual_moment(f, s1, s2, rho, *((m1, m2) if means else ()))
    g = torch.Generator().manual_seed(1)
    u, noise = torch.randn(2, 200_000, 1, generator=g, dtype=F64)
    v = rho * u + (1 - rho.square()).sqrt() * noise
    shift1, shift2 = (m1, m2) if means else (0, 0)
    samples = f.function(shift1 + s1 * u) * f.function(shift2 + s2 * v)
    assert ((samples.mean(0) - found).abs() <= 5 * samples.std(0) / math.sqrt(len(u)) + 1e-6).all()


def test_relu_with_means_is_exact_where_it_is_known():
    """Equal units: E[relu(m + su)²] in closed form; independent ones: the product of the means; m = 0: the kernel."""
    s, _, _, m, other = pairs(20)
    one, zero = torch.ones_like(s), torch.zeros_like(s)
    relu = NONLINEARITIES["relu"]
    z = m / s
    density = torch.exp(-z.square() / 2) / math.sqrt(2 * math.pi)
    square = (m.square() + s.square()) * torch.special.ndtr(z) + m * s * density
    torch.testing.assert_close(dual_moment(relu, s, s, one, m, m), square, rtol=1e-8, atol=1e-9)
    mean = m * torch.special.ndtr(z) + s * density
    second = other * torch.special.ndtr(other) + torch.exp(-other.square() / 2) / math.sqrt(2 * math.pi)
    torch.testing.assert_close(dual_moment(relu, s, one, zero, m, other), mean * second, rtol=1e-10, atol=1e-12)
    rho = torch.linspace(-0.99, 0.99, 20, dtype=F64)
    torch.testing.assert_close(dual_moment(relu, s, one, rho, zero, zero), dual_moment(relu, s, one, rho))


@pytest.mark.parametrize("name", sorted(NONLINEARITIES))
@pytest.mark.parametrize("means", [False, True])
def test_dual_moments_have_right_gradients(name, means):
    arguments = [column.requires_grad_() for column in pairs(3, seed=2)][: 5 if means else 3]
    assert torch.autograd.gradcheck(lambda *a: dual_moment(NONLINEARITIES[name], *a), arguments, atol=1e-5)


def test_the_relu_similarity_has_finite_gradients_at_its_ends():
    rho = torch.tensor([-1.0, 0.0, 1.0], dtype=F64, requires_grad=True)
    value = relu_similarity(rho)
    (slope,) = torch.autograd.grad(value.sum(), rho)
    torch.testing.assert_close(value.detach(), torch.tensor([0.0, 1 / math.pi, 1.0], dtype=F64))
    torch.testing.assert_close(slope, torch.tensor([0.0, 0.5, 1.0], dtype=F64))


def test_functions_of_the_user_are_recognised_or_integrated():
    assert nonlinearity(nn.ReLU()) is NONLINEARITIES["relu"]
    assert nonlinearity(nn.GELU()) is NONLINEARITIES["gelu"]
    s1, s2, rho, m1, m2 = pairs(6)
    cosine = dual_moment(nonlinearity(torch.cos), s1, s2, rho, m1, m2)
    spread, covariance = (s1.square() + s2.square()) / 2, s1 * s2 * rho
    sums, differences = torch.exp(-spread - covariance), torch.exp(-spread + covariance)
    expected = (torch.cos(m1 + m2) * sums + torch.cos(m1 - m2) * differences) / 2
    torch.testing.assert_close(cosine, expected, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize(
    ("given", "message"),
    [("rleu", "did you mean 'relu'"), (3, "expected one of"), (lambda z: z.sum(), "not finite and elementwise")],
)
def test_what_is_no_activation_is_refused(given, message):
    with pytest.raises(ConfigError, match=message):
        nonlinearity(given)


@pytest.mark.parametrize(("activation", "s", "most"), [("tanh", 1.0, 1e-9), ("tanh", 8.0, 2e-3), ("erf", 8.0, 3e-3)])
def test_steep_units_have_the_errors_that_the_docstring_says(activation, s, most):
    """Shares of the variance, against the trapezoidal rule in two dimensions; means keep the closed forms away."""
    f = NONLINEARITIES[activation]
    u = torch.linspace(-8.5, 8.5, 1001, dtype=torch.float64)
    weight = torch.exp(-u.square() / 2)
    weight = weight / weight.sum()
    rho, mean = 0.98, 1.0
    first, other = f.function(mean + s * u), f.function(mean + s * (rho * u[:, None] + (1 - rho**2) ** 0.5 * u))
    exact = (first * (other * weight).sum(1) * weight).sum()
    variance = (first.square() * weight).sum() - (first * weight).sum().square()
    found = dual_moment(f, *(torch.tensor(each, dtype=torch.float64) for each in (s, s, rho, mean, mean)))
    error = float((found - exact).abs() / variance)
    assert error < most
    if s > 2:
        assert error > most / 10  # it is as large as that
