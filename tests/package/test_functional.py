"""Exact kernels against quadrature and symbolic algebra; folding against the unfolded network."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from torch import nn

from snnk_peft.errors import ConfigError
from snnk_peft.functional.activation_kernels import arccos_from_cosine, arccos_kernel, gelu_kernel
from snnk_peft.functional.gauss_hermite import (
    dual_kernel,
    gaussian_product,
    hermite_coefficients,
)
from snnk_peft.functional.nonlinearity import NONLINEARITIES, dual_moment, nonlinearity, relu_similarity
from snnk_peft.layers.snnk_linear import fold_linear
from tests.sampling import within_standard_errors

F64 = torch.float64
gelu = nn.functional.gelu


# ---------------------------------------------------------------- arc-cosine


def test_arccos_orders_match_the_corrected_operator_formula():
    """J_n = (−1)^n (sin θ)^{2n+1} ((1/sin θ) d/dθ)^n ((π−θ)/sin θ), symbolically."""
    sympy = pytest.importorskip("sympy")
    t = sympy.symbols("t")
    inner = (sympy.pi - t) / sympy.sin(t)
    cosines = torch.linspace(-0.95, 0.95, 9, dtype=F64)
    for order in (0, 1, 2):
        formula = sympy.lambdify(t, (-1) ** order * sympy.sin(t) ** (2 * order + 1) * inner)
        expected = formula(np.arccos(cosines.numpy())) / math.pi
        np.testing.assert_allclose(arccos_from_cosine(cosines, order).numpy(), expected, rtol=1e-11)
        inner = sympy.diff(inner, t) / sympy.sin(t)


@pytest.mark.parametrize("dtype", [torch.float32, F64])
@pytest.mark.parametrize("order", [0, 1, 2])
def test_arccos_special_angles_and_gradients(order, dtype):
    x = torch.randn(5, dtype=dtype)
    tolerance = {"rtol": 1e-5, "atol": 1e-6} if dtype == torch.float32 else {"rtol": 1e-12, "atol": 1e-12}
    norm = torch.linalg.vector_norm(x)
    same = {0: 1.0, 1: norm**2, 2: 3 * norm**4}[order]
    torch.testing.assert_close(arccos_kernel(x, x, order), torch.as_tensor(same, dtype=dtype), **tolerance)
    torch.testing.assert_close(arccos_kernel(x, -x, order), torch.zeros((), dtype=dtype), **tolerance)
    assert arccos_kernel(x, torch.zeros_like(x), order) == 0
    for y in (x, -x, 2 * x, torch.zeros_like(x)):
        a, b = x.clone().requires_grad_(), y.clone().requires_grad_()
        kernel = arccos_kernel(a, b, order)
        assert kernel.dtype == dtype
        kernel.backward()
        assert torch.isfinite(a.grad).all()
        assert torch.isfinite(b.grad).all()


def test_arccos_gradients_at_and_near_coincidence():
    x = torch.randn(4, dtype=F64)
    a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
    arccos_kernel(a, b, 1).backward()  # d/da at a = b of E[2 relu relu] is E[2·1[ω·x>0] ω (ω·x)] = x
    torch.testing.assert_close(a.grad, x)
    torch.testing.assert_close(b.grad, x)
    a, b = torch.randn(3, 4, dtype=F64, requires_grad=True), torch.randn(1, 4, dtype=F64, requires_grad=True)
    for order in (0, 1, 2):
        assert torch.autograd.gradcheck(lambda a, b, order=order: arccos_kernel(a, b, order), (a, b))


def test_arccos_small_angles_keep_precision_and_shapes_broadcast():
    x = torch.tensor([1.0, 0.0])
    angle = 1e-4  # acos of the fp32 cosine would be 0
    y = torch.tensor([math.cos(angle), math.sin(angle)])
    assert 1 - float(arccos_kernel(x, y, 0)) == pytest.approx(angle / math.pi, rel=1e-2)
    x, y = torch.randn(3, 1, 5), torch.randn(1, 4, 5)
    cosines = nn.functional.cosine_similarity(x, y, dim=-1)
    norms = x.norm(dim=-1) * y.norm(dim=-1)
    torch.testing.assert_close(arccos_kernel(x, y, 2), norms**2 * arccos_from_cosine(cosines, 2), rtol=1e-4, atol=1e-5)
    with pytest.raises(ConfigError, match="order is 3; expected one of 0, 1, 2"):
        arccos_kernel(x, y, 3)


# ---------------------------------------------------------------- GELU


def test_gelu_kernel_matches_two_dimensional_gauss_hermite():
    x, y = torch.randn(6, 5, dtype=F64) / 2, torch.randn(6, 5, dtype=F64) / 2
    x[0], y[1] = y[0], 0.0  # coincident, zero
    x[2] = -1.5 * y[2]
    nodes, weights = (torch.from_numpy(a) for a in np.polynomial.hermite_e.hermegauss(150))
    weights = weights / weights.sum()
    s11, s22, s12 = x.square().sum(1), y.square().sum(1), (x * y).sum(1)
    for i in range(len(x)):
        u = s11[i].sqrt() * nodes[:, None]
        slope, rest = s12[i] / s11[i], (s22[i] - s12[i] ** 2 / s11[i]).clamp_min(0).sqrt()
        v = slope * u + rest * nodes[None, :]
        expected = (weights[:, None] * weights[None, :] * gelu(u) * gelu(v)).sum()
        torch.testing.assert_close(gelu_kernel(x[i], y[i]), expected, rtol=1e-8, atol=1e-10)


def test_gelu_kernel_gradients():
    x, y = torch.randn(3, 4, dtype=F64, requires_grad=True), torch.randn(3, 4, dtype=F64, requires_grad=True)
    assert torch.autograd.gradcheck(gelu_kernel, (x, y))
    point = torch.randn(4, requires_grad=True)
    gelu_kernel(point, point).backward()
    assert torch.isfinite(point.grad).all()


# ---------------------------------------------------------------- Hermite


def test_hermite_coefficients_of_the_cosine_are_exact_up_to_the_highest_degree():
    """E[cos(μ + s t) h_k(t)] = s^k e^{−s²/2} cos(μ + kπ/2)/√k!."""
    mean, std = torch.randn(6, dtype=F64), 3 * torch.rand(6, dtype=F64)
    k = torch.arange(101, dtype=F64)
    size = torch.exp(k * std.log().unsqueeze(1) - std.square().unsqueeze(1) / 2 - torch.lgamma(k + 1) / 2)
    expected = size * torch.cos(mean.unsqueeze(1) + k * math.pi / 2)
    torch.testing.assert_close(hermite_coefficients(torch.cos, mean, std, 100), expected, rtol=0, atol=1e-13)


def correlated(n: int = 5, d: int = 4) -> tuple[torch.Tensor, ...]:
    """Weights of two sets of units, their norms and the correlations of their pre-activations."""
    W, V = torch.randn(n, d, dtype=F64), torch.randn(n + 1, d, dtype=F64)
    std_w, std_v = W.norm(dim=1), V.norm(dim=1)
    return W, V, std_w, std_v, (W @ V.T) / torch.outer(std_w, std_v)


def test_dual_kernel_of_relu_at_zero_mean_is_the_arccos_kernel():
    W, V, std_w, std_v, rho = correlated()
    a = hermite_coefficients(torch.relu, torch.zeros(len(W)), std_w)
    b = hermite_coefficients(torch.relu, torch.zeros(len(V)), std_v)
    exact = arccos_kernel(W.unsqueeze(1), V, 1) / 2
    torch.testing.assert_close(dual_kernel(a, b, rho), exact, rtol=1e-4, atol=1e-4)
    # Truncation at rho = 1: the missing part of E[f²] falls as degree^(−3/2).
    missing = [0.5 - float(hermite_coefficients(torch.relu, torch.zeros(1), torch.ones(1), k).square().sum())
               for k in (16, 64)]  # fmt: skip
    assert missing[0] / missing[1] == pytest.approx(4**1.5, rel=0.2)
    assert 0 < missing[1] < 1e-4


@pytest.mark.parametrize(("f", "g"), [(gelu, torch.cos), (torch.relu, torch.tanh), (torch.sin, torch.sin)])
def test_dual_kernel_with_nonzero_means_against_monte_carlo(f, g):
    W, V, std_w, std_v, rho = correlated()
    mean_w, mean_v = torch.randn(len(W), dtype=F64), torch.randn(len(V), dtype=F64)
    kernel = dual_kernel(hermite_coefficients(f, mean_w, std_w), hermite_coefficients(g, mean_v, std_v), rho)
    x = torch.randn(100_000, W.shape[1], dtype=F64)
    samples = f(x @ W.T + mean_w).unsqueeze(2) * g(x @ V.T + mean_v).unsqueeze(1)
    within_standard_errors(samples, kernel)


def test_dual_kernel_of_cosines_is_exact():
    """E[cos(u) cos(v)] has an elementary form for any means."""
    W, V, std_w, std_v, rho = correlated()
    mean_w, mean_v = torch.randn(len(W), dtype=F64), torch.randn(len(V), dtype=F64)
    a, b = hermite_coefficients(torch.cos, mean_w, std_w, 90), hermite_coefficients(torch.cos, mean_v, std_v, 90)
    minus, plus = (W.unsqueeze(1) - V).square().sum(-1), (W.unsqueeze(1) + V).square().sum(-1)
    exact = 0.5 * (
        torch.cos(mean_w.unsqueeze(1) - mean_v) * torch.exp(-minus / 2)
        + torch.cos(mean_w.unsqueeze(1) + mean_v) * torch.exp(-plus / 2)
    )
    torch.testing.assert_close(dual_kernel(a, b, rho), exact, rtol=0, atol=1e-11)


def test_constant_units_and_full_correlation():
    mean, std = torch.tensor([0.7, -0.2]), torch.tensor([0.0, 1.3])
    c = hermite_coefficients(gelu, mean, std, degree=5)
    torch.testing.assert_close(c[0], torch.cat([gelu(mean[:1].double()), torch.zeros(5, dtype=F64)]))
    one = torch.ones(1, dtype=F64)
    assert float(gaussian_product(torch.relu, torch.relu, 0 * one, one, 0 * one, one)) == pytest.approx(0.5, abs=1e-5)
    assert float(gaussian_product(torch.relu, torch.relu, 0 * one, one, 0 * one, -one)) == pytest.approx(0, abs=1e-12)


def test_hermite_errors_name_the_fault():
    with pytest.raises(ConfigError, match="2 faults") as error:
        hermite_coefficients(torch.relu, torch.zeros(3), torch.ones(2), degree=101)
    assert "(3,)" in str(error.value)
    assert "101" in str(error.value)
    with pytest.raises(ConfigError, match="nodes is 3"):
        hermite_coefficients(torch.relu, torch.zeros(2), torch.ones(2), nodes=3)
    with pytest.raises(ConfigError, match="elementwise"):
        hermite_coefficients(lambda z: z.sum(), torch.zeros(2), torch.ones(2))
    with pytest.raises(ValueError, match="not finite"):
        hermite_coefficients(torch.exp, torch.zeros(1), torch.full((1,), 100.0))
    with pytest.raises(ConfigError, match="do not fit"):
        dual_kernel(torch.zeros(2, 5), torch.zeros(3, 5), torch.zeros(2, 2))


# ---------------------------------------------------------------- folding


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).norm() / b.norm())


@pytest.mark.parametrize(("dtype", "tolerance"), [(F64, 1e-12), (torch.float32, 1e-5)])
def test_ffn_bundle(dtype, tolerance):
    """(Φ Aᵀ) W₂ᵀ + b₂ = Φ (W₂ A)ᵀ + b₂ (SNNK paper, Eq. 13)."""
    phi = torch.relu(torch.randn(7, 3, 16, dtype=dtype))
    A, a = torch.randn(64, 16, dtype=dtype), torch.randn(64, dtype=dtype)
    W2, b2 = torch.randn(24, 64, dtype=dtype), torch.randn(24, dtype=dtype)
    for bias_A, bias in ((a, b2), (None, b2), (a, None), (None, None)):
        weight, offset = fold_linear(A, bias_A, W2, bias)
        assert weight.shape == (24, 16)
        assert weight.dtype == dtype
        assert (offset is None) == (bias_A is None and bias is None)
        expected = nn.functional.linear(nn.functional.linear(phi, A, bias_A), W2, bias)
        assert relative(nn.functional.linear(phi, weight, offset), expected) < tolerance


def test_folding_rounds_once():
    """bf16 weights: the fold is as good as rounding the exact product."""
    A, W2 = torch.randn(512, 8).bfloat16(), torch.randn(16, 512).bfloat16()
    assert torch.equal(fold_linear(A, None, W2, None).weight, (W2.double() @ A.double()).bfloat16())
    assert fold_linear(A, None, W2.float(), None).weight.dtype == torch.float32


@pytest.mark.parametrize(("dtype", "tolerance"), [(F64, 1e-12), (torch.float32, 1e-5)])
def test_nested_readout_equals_the_network_when_features_are_exact(dtype, tolerance):
    """Eq. 14 for f(z) = z², whose features are explicit: (w·x + b)² = vec([x 1][x 1]ᵀ)·vec([w b][w b]ᵀ)."""

    def phi(x: torch.Tensor) -> torch.Tensor:
        x = torch.cat([x, torch.ones_like(x[..., :1])], dim=-1)
        return (x.unsqueeze(-1) * x.unsqueeze(-2)).flatten(-2)

    def psi(weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        joined = torch.cat([weight, bias.unsqueeze(1)], dim=1)
        return (joined.unsqueeze(-1) * joined.unsqueeze(-2)).flatten(-2)

    sizes = [2, 3, 4, 2]
    # Mostly positive entries: with random signs the eighth-degree polynomial itself cancels beyond fp32.
    weights = [torch.rand(o, i, dtype=dtype) - 0.2 for i, o in itertools.pairwise(sizes)]
    biases = [torch.rand(o, dtype=dtype) - 0.2 for o in sizes[1:]]
    x = torch.rand(6, 2, dtype=dtype) - 0.2
    features, expected = x, x
    for weight, bias in zip(weights, biases):
        features, expected = phi(features), (expected @ weight.T + bias) ** 2
    # W̄: Ā_1 = Ψ_1(W_0, b_0), Ā_{k+1} = Ψ_{k+1}(W_k Ā_k, b_k). (The paper prints b_L in the outermost place; by its
    # Eq. 12 it is b_{L−1}.)
    readout = psi(weights[0], biases[0])
    for weight, bias in zip(weights[1:], biases[1:]):
        readout = psi(fold_linear(readout, None, weight, None).weight, bias)
    assert relative(features @ readout.T, expected) < tolerance


def test_folding_faults():
    with pytest.raises(ConfigError, match=r"readout of shape \(4, 3\) into a weight of shape \(2, 5\)"):
        fold_linear(torch.zeros(4, 3), None, torch.zeros(2, 5), None)


# === dual kernels of activations ======================================================================================

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
