"""Readout solvers against scikit-learn, Monte Carlo and the layers they stand for."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from sklearn.linear_model import LinearRegression, Ridge
from torch import nn

from snnk_peft.errors import ConfigError
from snnk_peft.solvers.nystrom import nystrom_readout
from snnk_peft.solvers.reduce import ErrorMeter
from snnk_peft.solvers.ridge import GramAccumulator, fit_ridge, one_hot_targets

F64 = torch.float64


def tokens(n: int = 120, m: int = 10, out: int = 4, offset: float = 0.0) -> tuple[torch.Tensor, torch.Tensor]:
    features = torch.randn(n, m, dtype=F64) + offset
    return features, torch.tanh(features @ torch.randn(m, out, dtype=F64)) + 0.1 * torch.randn(n, out, dtype=F64) + 3


def accumulate(features: torch.Tensor, targets: torch.Tensor, parts: int = 3, **kwargs) -> GramAccumulator:
    gram = GramAccumulator(features.shape[1], targets.shape[1], **kwargs)
    for f, t in zip(features.chunk(parts), targets.chunk(parts)):
        gram.update(f, t)
    return gram


def linear(x: torch.Tensor, readout) -> torch.Tensor:
    return nn.functional.linear(x, readout.weight.to(x.dtype), None if readout.bias is None else readout.bias.to(x))


# ---------------------------------------------------------------- ridge


@pytest.mark.parametrize("intercept", [True, False])
@pytest.mark.parametrize("ridge", [1e-3, 2.0, 500.0])
def test_ridge_equals_scikit_learn(ridge, intercept):
    """The streamed normal equations and scikit-learn's Ridge are one solution."""
    features, targets = tokens()
    gram = accumulate(features, targets, intercept=intercept)
    expected = Ridge(alpha=ridge, fit_intercept=intercept).fit(features.numpy(), targets.numpy())
    for readout in (gram.solve(ridge), gram.solve_path([1.0, ridge])[1]):
        np.testing.assert_allclose(readout.weight, expected.coef_, rtol=1e-8, atol=1e-10)
        if intercept:
            np.testing.assert_allclose(readout.bias, expected.intercept_, rtol=1e-8, atol=1e-10)
        else:
            assert readout.bias is None
        residual = (linear(features, readout) - targets).square().sum() / (targets - targets.mean(0)).square().sum()
        assert readout.relative_error == pytest.approx(float(residual), rel=1e-9)


@pytest.mark.parametrize("intercept", [True, False])
def test_zero_ridge_is_least_squares_of_minimum_norm(intercept):
    for n, m in ((80, 10), (12, 30)):
        features, targets = tokens(n, m)
        readout = accumulate(features, targets, intercept=intercept).solve(0.0)
        expected = LinearRegression(fit_intercept=intercept).fit(features.numpy(), targets.numpy())
        np.testing.assert_allclose(readout.weight, expected.coef_, rtol=1e-8, atol=1e-10)
        if intercept:
            np.testing.assert_allclose(readout.bias, expected.intercept_, rtol=1e-8, atol=1e-10)
    features = torch.cat([features, features], dim=1)  # every column twice: singular for any n
    weight = accumulate(features, targets).solve(0.0).weight
    torch.testing.assert_close(weight[:, :30], weight[:, 30:])


def test_batching_merging_and_masks_do_not_matter():
    features, targets = tokens(60)
    whole = accumulate(features, targets, parts=1)
    first, second = accumulate(features[:17], targets[:17]), accumulate(features[17:], targets[17:])
    first.merge(second)
    padded = GramAccumulator(10, 4)
    garbage = torch.full((1, 60, 10), math.nan, dtype=F64)
    padded.update(
        torch.cat([features.unsqueeze(0), garbage]),
        torch.cat([targets.unsqueeze(0), garbage[..., :4]]),
        mask=torch.tensor([[1], [0]]).expand(2, 60),
    )
    padded.update(features[:3], targets[:3], mask=torch.zeros(3, dtype=torch.bool))
    for other in (accumulate(features, targets, parts=7), first, padded):
        assert other.count == 60
        torch.testing.assert_close(other.solve(0.1).weight, whole.solve(0.1).weight, rtol=1e-11, atol=1e-12)
        torch.testing.assert_close(other.solve(0.1).bias, whole.solve(0.1).bias, rtol=1e-11, atol=1e-12)


def test_large_means_do_not_cancel():
    features, targets = tokens(200, 6, offset=1e6)
    expected = Ridge(alpha=1.0).fit((features - 1e6).numpy(), targets.numpy())
    weight = accumulate(features, targets, parts=9).solve(1.0).weight
    np.testing.assert_allclose(weight, expected.coef_, rtol=1e-6)


@pytest.mark.parametrize("behind", [False, True])
def test_held_out_error_is_measured_behind_the_next_layer(behind):
    features, targets = tokens(400)
    W2 = torch.randn(3, 4, dtype=F64) if behind else None
    train = accumulate(features[:200], targets[:200])
    held_out = accumulate(features[200:], targets[200:], output_weight=W2)
    readout = train.solve(0.5)
    metric = torch.eye(4, dtype=F64) if W2 is None else W2
    truth, fit = targets[200:] @ metric.T, linear(features[200:], readout) @ metric.T
    expected = float((truth - fit).square().sum() / (truth - truth.mean(0)).square().sum())
    assert held_out.held_out_error(readout.weight, readout.bias) == pytest.approx(expected, rel=1e-10)
    without = float((readout.bias @ metric.T + truth - fit).square().sum() / (truth - truth.mean(0)).square().sum())
    assert held_out.held_out_error(readout.weight) == pytest.approx(without, rel=1e-10)
    other = accumulate(features[:9], targets[:9], output_weight=W2)
    other.merge(held_out)
    assert other.count == 209


def test_fit_ridge_picks_the_best_on_held_out_tokens():
    features, targets = tokens(90, 40)
    train, held_out = accumulate(features[:50], targets[:50]), accumulate(features[50:], targets[50:])
    ridges = (1e-8, 1e-4, 1e-2, 1.0, 1e2)
    fit = fit_ridge(train, held_out, ridges)
    scale = float(torch.trace((features[:50] - features[:50].mean(0)).T @ (features[:50] - features[:50].mean(0)))) / 40
    errors = {}
    for ridge in ridges:
        readout = train.solve(ridge * scale)
        errors[ridge] = held_out.held_out_error(readout.weight, readout.bias)
    assert fit.ridge == min(errors, key=errors.get)
    assert fit.ridge not in (1e-8, 1e2)  # 50 noisy tokens for 40 features need some, not everything
    assert fit.error == pytest.approx(errors[fit.ridge], rel=1e-6)
    torch.testing.assert_close(fit.weight, train.solve(fit.ridge * scale).weight)


def test_constant_targets():
    features, targets = torch.randn(20, 3, dtype=F64), torch.ones(20, 2, dtype=F64)
    gram = accumulate(features, targets)
    assert gram.solve(1e-3).relative_error == 0
    assert gram.held_out_error(torch.zeros(2, 3), torch.zeros(2)) == 1  # of their square: there is no variance


def test_ridge_faults():
    with pytest.raises(ConfigError, match="2 faults"):
        GramAccumulator(0, 4, output_weight=torch.zeros(2, 3))
    gram = GramAccumulator(3, 2)
    with pytest.raises(ValueError, match="no tokens"):
        gram.solve(1.0)
    gram.update(torch.randn(5, 3), torch.randn(5, 2))
    before = gram.solve(0.1).weight
    for name, features, targets in (
        ("features", torch.full((5, 3), math.inf), torch.zeros(5, 2)),
        ("targets", torch.zeros(5, 3), torch.full((5, 2), math.nan)),
    ):
        with pytest.raises(ValueError, match=f"^{name}: "):
            gram.update(features, targets)
    assert torch.equal(gram.solve(0.1).weight, before)
    for bad in (
        (torch.zeros(5, 4), torch.zeros(5, 2), None),
        (torch.zeros(5, 3), torch.zeros(4, 2), None),
        (torch.zeros(5, 3), torch.zeros(5, 2), torch.zeros(4, dtype=torch.bool)),
        (torch.zeros(5, 3), torch.zeros(5, 2), torch.ones(5)),
    ):
        with pytest.raises(ConfigError, match="do not fit"):
            gram.update(*bad)
    with pytest.raises(ConfigError, match="cannot merge"):
        gram.merge(GramAccumulator(3, 4))
    with pytest.raises(ConfigError, match="output weights"):
        gram.merge(GramAccumulator(3, 2, output_weight=torch.zeros(1, 2)))
    for ridges in ([], [-1.0], [math.nan]):
        with pytest.raises(ConfigError, match="ridges"):
            gram.solve_path(ridges)


def test_faults_of_labels():
    with pytest.raises(ConfigError, match="labels run from 0 to 3; expected 0 to 2"):
        one_hot_targets(torch.arange(4), 3)
    with pytest.raises(ConfigError, match="integer class indices"):
        one_hot_targets(torch.rand(4), 3)


# ---------------------------------------------------------------- Nyström


def risk(weight, bias, f, features: torch.Tensor, readout, x: torch.Tensor) -> torch.Tensor:
    """Squared error per sample, summed over outputs."""
    target = f(nn.functional.linear(x, weight, bias))
    return (target - linear(features, readout)).square().sum(-1)


@pytest.mark.parametrize("dtype", [torch.float32, F64])
def test_nystrom_recovers_a_relu_layer_from_its_own_rows(dtype):
    """G = W, m = l gives ReLU(Wx) exactly, without a bias term."""
    W = torch.randn(12, 16, dtype=dtype)
    readout = nystrom_readout(W, None, torch.relu, W, None, torch.relu, intercept=False, feature_scale=12**-0.5)
    assert readout.bias is None
    assert readout.weight.dtype == dtype
    x = torch.randn(50, 16, dtype=dtype)
    error = linear(torch.relu(x @ W.T) * 12**-0.5, readout) - torch.relu(x @ W.T)
    assert float(error.abs().max()) < (1e-6 if dtype == F64 else 1e-5)
    assert readout.relative_error < 1e-8


@pytest.mark.parametrize("f", [torch.relu, nn.GELU(), torch.tanh, nn.GELU(approximate="tanh")])
def test_nystrom_recovers_any_layer_from_its_own_rows_with_bias_and_shifted_inputs(f):
    W, b = torch.randn(6, 16, dtype=F64), torch.randn(6, dtype=F64)
    G, c = torch.cat([torch.randn(3, 16, dtype=F64), W]), torch.cat([torch.randn(3, dtype=F64), b])
    mean, std = torch.randn(16, dtype=F64), torch.rand(16, dtype=F64) + 0.2
    readout = nystrom_readout(W, b, f, G, c, f, input_mean=mean, input_std=-std)
    expected = torch.cat([torch.zeros(6, 3, dtype=F64), torch.eye(6, dtype=F64)], dim=1)
    torch.testing.assert_close(readout.weight, expected, rtol=0, atol=1e-6)
    torch.testing.assert_close(readout.bias, torch.zeros(6, dtype=F64), rtol=0, atol=1e-6)
    assert readout.relative_error < 1e-7


CASES = {
    "relu, zero mean, exact kernels": (torch.relu, torch.relu, False, False),
    "relu, with bias and means": (torch.relu, torch.relu, True, True),
    "gelu, zero mean, exact kernels": (nn.functional.gelu, nn.functional.gelu, False, True),
    "gelu layer, relu features": (nn.functional.gelu, torch.relu, True, True),
    "tanh layer, cosine features": (torch.tanh, torch.cos, True, True),
    "gelu layer, sine features": (nn.functional.gelu, torch.sin, True, False),
}


@pytest.mark.parametrize("case", CASES)
def test_nystrom_is_optimal_for_gaussian_inputs_and_predicts_its_risk(case):
    """G = W, m = l gives ReLU(Wx) exactly (Nyström on all landmarks)."""
    f, g, shifted, intercept = CASES[case]
    d, out, m = 6, 5, 12
    W, G = torch.randn(out, d, dtype=F64) / d**0.5, torch.randn(m, d, dtype=F64) / d**0.5
    b, c = (torch.randn(out, dtype=F64), torch.randn(m, dtype=F64)) if shifted else (None, None)
    mean = torch.randn(d, dtype=F64) if shifted else torch.zeros(d, dtype=F64)
    std = torch.rand(d, dtype=F64) + 0.5
    readout = nystrom_readout(W, b, f, G, c, g, input_mean=mean, input_std=std, intercept=intercept)

    x = mean + std * torch.randn(60_000, d, dtype=F64)
    features, targets = g(nn.functional.linear(x, G, c)), f(nn.functional.linear(x, W, b))
    ours = risk(W, b, f, features, readout, x)
    predicted = readout.relative_error * float(targets.var(0).sum())
    assert float(ours.mean()) == pytest.approx(predicted, rel=0.05, abs=2e-6)

    others = [accumulate(features[:3000], targets[:3000], intercept=intercept).solve(0.0)]  # fitted to real samples
    for _ in range(5):
        perturbed = readout.weight * (1 + 0.05 * torch.randn(out, m, dtype=F64))
        others.append(readout._replace(weight=perturbed))
    others.append(readout._replace(weight=g(nn.functional.linear(W, G, c))))  # the paper's A = Φ(W)
    for other in others:
        excess = risk(W, b, f, features, other, x)[3000:] - ours[3000:]
        assert excess.mean() > -3 * excess.std() / math.sqrt(len(excess))
    assert excess.mean() > 0.1 * targets.var(0).sum()  # the last one, Φ(W), is not an approximation at all


@pytest.mark.parametrize("ridge", [0.0, 1e-10])
def test_nystrom_survives_duplicate_opposite_and_zero_rows(ridge):
    W, G = torch.randn(4, 6, dtype=F64), torch.randn(5, 6, dtype=F64)
    plain = nystrom_readout(W, None, torch.tanh, G, None, torch.relu, ridge=ridge)
    doubled = nystrom_readout(W, None, torch.tanh, torch.cat([G, G, 0 * G[:1]]), None, torch.relu, ridge=ridge)
    assert torch.isfinite(doubled.weight).all()
    torch.testing.assert_close(doubled.weight[:, :5], plain.weight / 2, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(doubled.weight[:, 5:10], plain.weight / 2, rtol=1e-4, atol=1e-6)
    assert doubled.relative_error == pytest.approx(plain.relative_error, rel=1e-5)
    opposite = nystrom_readout(W, None, torch.tanh, torch.cat([G, -G]), None, torch.relu, ridge=ridge)
    assert opposite.relative_error < plain.relative_error


def test_nystrom_leaves_the_global_generator_alone_and_reports_faults():
    W, G = torch.randn(4, 6), torch.randn(5, 6)
    state = torch.get_rng_state()
    nystrom_readout(W, None, torch.relu, G, None, torch.relu)
    assert torch.equal(torch.get_rng_state(), state)
    with pytest.raises(ConfigError, match="4 faults") as error:
        nystrom_readout(
            W, torch.zeros(3), torch.relu, torch.zeros(5, 7), None, torch.relu, feature_scale=0.0, ridge=-1.0
        )
    for part in ("bias is (3,)", "projection is (5, 7)", "feature_scale is 0.0", "ridge is -1.0"):
        assert part in str(error.value)
    with pytest.raises(ValueError, match="projection holds NaN"):
        nystrom_readout(W, None, torch.relu, G * math.nan, None, torch.relu)


# ---------------------------------------------------------------- errors


@pytest.mark.parametrize("behind", [None, torch.randn(3, 4, dtype=F64)], ids=["", "output weight"])
def test_a_weight_counts_as_that_many_vectors(behind):
    """Whole weights against repeated rows, and those against the definition."""
    target, estimate = torch.randn(2, 30, 4, dtype=F64)
    target += 1
    weight = torch.randint(0, 4, (30,))
    meter, repeated = ErrorMeter(behind), ErrorMeter(behind)
    for part in range(0, 30, 10):
        meter.update(*(each[part : part + 10] for each in (target, estimate, weight)))
    target, estimate = (each.repeat_interleave(weight, 0) for each in (target, estimate))
    repeated.update(target, estimate)
    if behind is not None:
        target, estimate = target @ behind.T, estimate @ behind.T
    expected = (target - estimate).square().sum() / (target - target.mean(0)).square().sum()
    assert meter.value() == pytest.approx(float(expected), rel=1e-9)
    assert repeated.value() == pytest.approx(float(expected), rel=1e-9)
