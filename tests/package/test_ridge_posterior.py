"""What a ridge regression says of its own errors, against dense matrices, refits and simulated data."""

from __future__ import annotations

import pytest
import torch
from sklearn.linear_model import Ridge

from snnk_peft.errors import ConfigError
from snnk_peft.solvers.ridge import GramAccumulator, fit_ridge
from snnk_peft.solvers.ridge_posterior import RidgePosterior, cross_validated

F64 = torch.float64


def examples(n: int = 60, m: int = 12, out: int = 3, noise: float = 0.5) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(n, m, dtype=F64, generator=generator) + 2
    weights = torch.randn(m, out, dtype=F64, generator=generator)
    return features, features @ weights + 1 + noise * torch.randn(n, out, dtype=F64, generator=generator)


def moments_of(features: torch.Tensor, targets: torch.Tensor, intercept: bool = True) -> GramAccumulator:
    found = GramAccumulator(features.shape[1], targets.shape[1], intercept=intercept)
    for part in zip(features.split(17), targets.split(17), strict=True):
        found.update(*part)
    return found


def hat(features: torch.Tensor, ridge: float, intercept: bool) -> torch.Tensor:
    """H, by its definition."""
    n, m = features.shape
    centred = features - features.mean(0) if intercept else features
    inner = centred @ torch.linalg.inv(centred.T @ centred + ridge * torch.eye(m, dtype=F64)) @ centred.T
    return inner + (torch.ones(n, n, dtype=F64) / n if intercept else 0)


@pytest.mark.parametrize("intercept", [True, False])
@pytest.mark.parametrize("ridge", [1e-3, 5.0])
def test_leverages_and_degrees_are_those_of_the_hat_matrix(ridge: float, intercept: bool) -> None:
    features, targets = examples()
    posterior = RidgePosterior(moments_of(features, targets, intercept), ridge)
    matrix = hat(features, ridge, intercept)
    torch.testing.assert_close(posterior.leverage(features), matrix.diagonal(), rtol=1e-10, atol=1e-12)
    assert posterior.degrees == pytest.approx(float(matrix.trace()), rel=1e-10)
    residual = (targets - matrix @ targets).square().sum(0) / (len(features) - matrix.trace())
    torch.testing.assert_close(posterior.noise, residual, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("intercept", [True, False])
def test_leave_one_out_is_a_fit_without_the_example(intercept: bool) -> None:
    features, targets = examples(n=25)
    found = RidgePosterior(moments_of(features, targets, intercept), 3.0).leave_one_out(features, targets)
    for i in range(len(features)):
        rest = [j for j in range(len(features)) if j != i]
        fit = Ridge(alpha=3.0, fit_intercept=intercept).fit(features[rest].numpy(), targets[rest].numpy())
        expected = targets[i] - torch.from_numpy(fit.predict(features[i : i + 1].numpy()))[0]
        torch.testing.assert_close(found[i], expected, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("intercept", [True, False])
def test_cross_validation_by_the_dense_formula(intercept: bool) -> None:
    features, targets = examples(n=30, m=20, noise=4.0)
    moments = moments_of(features, targets, intercept)
    ridges = (1e-4, 1e-2, 0.3, 3.0, 1e2)
    errors = {}
    for ridge in ridges:
        matrix = hat(features, ridge * moments.ridge_scale, intercept)
        left = (targets - matrix @ targets).square().sum() * len(features) / (len(features) - matrix.trace()) ** 2
        errors[ridge] = float(left / ((targets - targets.mean(0)).square().sum() / len(features)))
    fit = cross_validated(moments, ridges)
    assert fit.ridge == min(errors, key=errors.__getitem__)
    assert fit.ridge not in (1e-4, 1e2)  # twenty features for thirty noisy examples need some, not everything
    assert fit.error == pytest.approx(errors[fit.ridge], rel=1e-9)
    alone = moments.solve(fit.ridge * moments.ridge_scale)
    torch.testing.assert_close(fit.weight, alone.weight, rtol=1e-9, atol=1e-12)


def test_variances_hold_what_they_promise() -> None:
    """Weights from the prior: as many new targets lie within a standard deviation as of a normal variable."""
    generator = torch.Generator().manual_seed(1)
    inside, total, sigma, n, m = 0, 0, 0.7, 40, 15
    for _ in range(200):
        weights = torch.randn(m, 1, dtype=F64, generator=generator)
        features = torch.randn(n + 50, m, dtype=F64, generator=generator)
        targets = features @ weights + sigma * torch.randn(n + 50, 1, dtype=F64, generator=generator)
        posterior = RidgePosterior(moments_of(features[:n], targets[:n]), sigma**2)
        predicted = features[n:] @ posterior.readout.weight.T + posterior.readout.bias
        inside += int(((targets[n:] - predicted).abs() < posterior.variance(features[n:]).sqrt()).sum())
        total += 50
    assert inside / total == pytest.approx(0.683, abs=0.02)


def test_what_is_removed_was_never_there() -> None:
    features, targets = examples(n=200)
    features = features + 100  # far from zero, where sums of squares would cancel
    everything, without = moments_of(features, targets), moments_of(features[:120], targets[:120])
    everything.remove(moments_of(features[120:], targets[120:]))
    assert everything.count == 120
    for ridge in (0.1, 10.0):
        one, other = everything.solve(ridge), without.solve(ridge)
        torch.testing.assert_close(one.weight, other.weight, rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(one.bias, other.bias, rtol=1e-10, atol=1e-8)
        assert one.relative_error == pytest.approx(other.relative_error, rel=1e-8)
    with pytest.raises(ConfigError, match="200 tokens are to be removed of 120"):
        everything.remove(moments_of(features, targets))
    with pytest.raises(ConfigError, match="cannot merge moments"):
        everything.remove(GramAccumulator(3, 2))
    everything.remove(moments_of(features[:120], targets[:120]))
    assert everything.count == 0
    with pytest.raises(ValueError, match="no tokens"):
        everything.solve(1.0)
    everything.merge(without)
    torch.testing.assert_close(everything.solve(1.0).weight, without.solve(1.0).weight, rtol=0, atol=0)


@pytest.mark.parametrize("intercept", [True, False])
@pytest.mark.parametrize(
    "matrix", [torch.randn(5, 12, dtype=F64), torch.rand(12, dtype=F64) + 0.5], ids=["M", "diagonal"]
)
def test_moments_of_mapped_features(matrix: torch.Tensor, intercept: bool) -> None:
    features, targets = examples()
    mapped = features * matrix if matrix.ndim == 1 else features @ matrix.T
    one, other = moments_of(features, targets, intercept).mapped(matrix), moments_of(mapped, targets, intercept)
    for name, tensor in one.tensors().items():
        torch.testing.assert_close(tensor, other.tensors()[name], rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(one.solve(0.3).weight, other.solve(0.3).weight, rtol=1e-9, atol=1e-9)


def test_faults() -> None:
    features, targets = examples()
    moments = moments_of(features, targets)
    with pytest.raises(ConfigError, match="above 0"):
        RidgePosterior(moments, 0.0)
    for ridges in ((), (0.0, 1.0), (-1.0,)):
        with pytest.raises(ConfigError, match="ridges are"):
            cross_validated(moments, ridges)
    with pytest.raises(ValueError, match="no tokens"):
        RidgePosterior(GramAccumulator(3, 2), 1.0)


def test_of_ridges_that_are_equally_good_the_largest_is_taken() -> None:
    """Targets that are all equal are met by every ridge."""
    features, _ = examples()
    moments = moments_of(features, torch.ones(len(features), 2, dtype=F64))
    for ridges in ((1e-3, 1.0, 1e-1), (1.0, 1e-1, 1e-3)):
        assert cross_validated(moments, ridges).ridge == 1.0
        assert fit_ridge(moments, moments, ridges).ridge == 1.0
