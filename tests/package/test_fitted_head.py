"""Closed-form heads: scores, leave-one-out, variances, temperatures, against dense formulas."""

from __future__ import annotations

import math

import pytest
import torch
from sklearn.linear_model import Ridge
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from snnk_peft.errors import ConfigError
from snnk_peft.heads.fitted import FittedHead, expected_calibration_error
from snnk_peft.heads.statistics import HeadStatistics
from snnk_peft.solvers.ridge import GramAccumulator, fit_ridge
from snnk_peft.solvers.ridge_posterior import RidgePosterior, cross_validated
from tests.package.test_head_statistics import examples

F64 = torch.float64


def fitted(kind: str, share: slice = slice(None)) -> tuple[FittedHead, torch.Tensor, torch.Tensor]:
    vectors, targets = examples(kind)
    vectors = vectors * torch.logspace(-3, 3, 7, dtype=F64)  # columns of very different size
    statistics = HeadStatistics(7, 3, kind)
    statistics.add(vectors[share], targets[share])
    return FittedHead(statistics), vectors, targets


@pytest.mark.parametrize("kind", ["classes", "labels", "numbers"])
def test_scores_are_those_of_standardised_ridge_regression(kind: str) -> None:
    head, vectors, targets = fitted(kind)
    wanted = torch.eye(3, dtype=F64)[targets] if kind == "classes" else targets.double()
    peer = make_pipeline(StandardScaler(), Ridge(alpha=head.ridge * 300)).fit(vectors.numpy(), wanted.numpy())
    expected = torch.from_numpy(peer.predict(vectors.numpy()))
    torch.testing.assert_close(head.scores(vectors), expected, rtol=1e-8, atol=1e-8)
    assert head.report.to_dict()["examples"] == 300
    assert str(head.report).startswith("300 examples, ")


def test_a_column_that_never_changes_is_no_harm() -> None:
    head, vectors, targets = fitted("numbers")
    statistics = HeadStatistics(8, 3, "numbers")
    statistics.add(torch.cat((vectors, torch.full((300, 1), 0.1, dtype=F64)), 1), targets)
    other = FittedHead(statistics)
    assert other.weight.isfinite().all()
    assert torch.equal(other.weight[:, 7], torch.zeros(3, dtype=F64))
    scores = other.scores(torch.cat((vectors, torch.full((300, 1), 0.1, dtype=F64)), 1))
    assert (scores - head.scores(vectors)).abs().max() < 1e-2 * head.scores(vectors).std()


@pytest.mark.parametrize("kind", ["classes", "numbers"])
def test_leave_one_out_scores(kind: str) -> None:
    """Of the same ridge and scales, which one example hardly changes: a refit without the example, by scikit-learn."""
    head, vectors, targets = fitted(kind)
    wanted = torch.eye(3, dtype=F64)[targets] if kind == "classes" else targets
    scaled = vectors / vectors.std(0, correction=0)
    found = head.leave_one_out(vectors, targets)
    for index in (0, 17, 299):
        rest = [i for i in range(300) if i != index]
        peer = Ridge(alpha=head.ridge * 300).fit(scaled[rest].numpy(), wanted[rest].numpy())
        expected = torch.from_numpy(peer.predict(scaled[index : index + 1].numpy()))[0]
        torch.testing.assert_close(found[index], expected, rtol=1e-7, atol=1e-8)


def test_probabilities_are_calibrated() -> None:
    """On examples that were not fitted, better than those of the sharpest and of the flattest temperature."""
    generator = torch.Generator().manual_seed(0)
    vectors = torch.randn(4000, 12, dtype=F64, generator=generator)
    logits = 2 * vectors @ torch.randn(12, 3, dtype=F64, generator=generator) / 12**0.5
    labels = torch.multinomial(logits.softmax(-1), 1, generator=generator).squeeze(1)
    statistics = HeadStatistics(12, 3, "classes")
    statistics.add(vectors[:400], labels[:400])
    head = FittedHead(statistics)
    head.temper([(vectors[:200], labels[:200]), (vectors[200:400], labels[200:400])])

    def error(temperature: float) -> float:
        head.temperature = temperature
        found = head.probabilities(vectors[400:])
        torch.testing.assert_close(found.sum(-1), torch.ones(3600, dtype=F64))
        return expected_calibration_error(found, labels[400:])

    chosen = head.temperature
    assert chosen is not None
    assert error(chosen) < 0.05
    assert error(chosen) < 0.3 * min(error(chosen / 4), error(chosen * 4))


def test_labels_have_probabilities_of_their_own() -> None:
    head, vectors, targets = fitted("labels", slice(0, 200))
    head.temper([(vectors[:200], targets[:200])])
    found = head.probabilities(vectors[200:])
    assert ((found > 0) & (found < 1)).all()
    assert ((found > 0.5) == targets[200:].bool()).double().mean() > 0.8


def test_variances_grow_away_from_the_examples() -> None:
    head, vectors, targets = fitted("numbers", slice(0, 200))
    errors = (targets[200:] - head.scores(vectors[200:])) / head.variance(vectors[200:]).sqrt()
    assert errors.square().mean() == pytest.approx(1.0, abs=0.25)
    centre = vectors[:200].mean(0, keepdim=True)
    assert (head.variance(centre + 20 * (vectors[:1] - centre)) > 2 * head.variance(centre)).all()


def test_calibration_error_by_hand() -> None:
    probabilities = torch.tensor([[0.9, 0.1], [0.9, 0.1], [0.4, 0.6], [1.0, 0.0]])
    labels = torch.tensor([0, 1, 1, 0])
    # Bins of .1: two of .9 with one right, one of .6 right, one of 1.0 right.
    assert expected_calibration_error(probabilities, labels, bins=10) == pytest.approx((0.8 + 0.4 + 0.0) / 4, abs=1e-6)


def test_faults() -> None:
    head, vectors, targets = fitted("numbers")
    with pytest.raises(ConfigError, match="has no probabilities"):
        head.temper([(vectors, targets)])
    head, vectors, targets = fitted("classes")
    with pytest.raises(ConfigError, match="call temper"):
        head.probabilities(vectors)
    with pytest.raises(ConfigError, match="no examples were given"):
        head.temper([])
    with pytest.raises(ConfigError, match="no examples were counted"):
        FittedHead(HeadStatistics(3, 2, "classes"))


def test_repeated_examples_are_no_harm() -> None:
    """With as many columns as examples cross-validation would take interpolation for perfect: nothing is left over."""
    generator = torch.Generator().manual_seed(0)
    vectors = torch.randn(2160, 200, generator=generator)
    numbers = vectors[:, :4].sum(1, keepdim=True) + 2 * torch.randn(2160, 1, generator=generator)
    statistics = HeadStatistics(200, 1, "numbers")
    statistics.add(torch.cat((vectors[:160], vectors[:8])), torch.cat((numbers[:160], numbers[:8])))
    error = (FittedHead(statistics).scores(vectors[160:]) - numbers[160:]).square().mean() / numbers[160:].var()
    assert error < 1


def test_as_many_examples_as_columns_are_no_harm() -> None:
    """The best ridge is then larger than the mean variance sum of a column; a head held to less predicts nothing."""
    generator = torch.Generator().manual_seed(0)
    vectors = torch.randn(2210, 200, generator=generator)
    numbers = vectors[:, :4].sum(1, keepdim=True) + 2 * torch.randn(2210, 1, generator=generator)  # half of it is noise
    statistics = HeadStatistics(200, 1, "numbers")
    statistics.add(vectors[:210], numbers[:210])

    def error(head: FittedHead) -> float:
        return float((head.scores(vectors[210:]) - numbers[210:]).square().mean() / numbers[210:].var())

    best = min(error(FittedHead(statistics, [10 ** (exponent / 4)])) for exponent in range(-8, 12))
    assert best < 0.9
    assert error(FittedHead(statistics)) < best + 0.1
    assert error(FittedHead(statistics, [0.1, 0.01])) > best + 0.15  # the check tells a short list from a good one


def test_scores_that_separate_all_examples_ask_for_no_infinite_temperature() -> None:
    """A large ridge leaves them scores that hardly differ, but in the right sense: the sharper the likelier, without an
    end. Here it ends at e⁷."""
    vectors = torch.cat((torch.full((20, 1), -1.0), torch.full((20, 1), 1.0))).double()
    vectors = vectors + 1e-3 * torch.randn(40, 1, generator=torch.Generator().manual_seed(0), dtype=F64)
    labels = (vectors[:, 0] > 0).long()
    statistics = HeadStatistics(1, 2, "classes")
    statistics.add(vectors, labels)
    head = FittedHead(statistics, [30.0])
    head.temper([(vectors, labels)])
    assert head.temperature == pytest.approx(math.exp(7), rel=1e-9)
    assert head.probabilities(vectors).isfinite().all()


def test_confidences_on_the_edge_of_a_bin_belong_to_the_lower_one() -> None:
    """((m − 1)/M, m/M] is bin m of Naeini et al. Here .5 (wrong) is in the first of two, .75 (right) in the second."""
    probabilities, labels = torch.tensor([[0.5, 0.25, 0.25], [0.75, 0.25, 0.0]]), torch.tensor([1, 0])
    assert expected_calibration_error(probabilities, labels, bins=2) == (0.5 + 0.25) / 2


# === the posterior of ridge regression ================================================================================


def correlated(n: int = 60, m: int = 12, out: int = 3, noise: float = 0.5) -> tuple[torch.Tensor, torch.Tensor]:
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
    features, targets = correlated()
    posterior = RidgePosterior(moments_of(features, targets, intercept), ridge)
    matrix = hat(features, ridge, intercept)
    torch.testing.assert_close(posterior.leverage(features), matrix.diagonal(), rtol=1e-10, atol=1e-12)
    assert posterior.degrees == pytest.approx(float(matrix.trace()), rel=1e-10)
    residual = (targets - matrix @ targets).square().sum(0) / (len(features) - matrix.trace())
    torch.testing.assert_close(posterior.noise, residual, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("intercept", [True, False])
def test_cross_validation_by_the_dense_formula(intercept: bool) -> None:
    features, targets = correlated(n=30, m=20, noise=4.0)
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


@pytest.mark.parametrize("intercept", [True, False])
@pytest.mark.parametrize(
    "matrix", [torch.randn(5, 12, dtype=F64), torch.rand(12, dtype=F64) + 0.5], ids=["M", "diagonal"]
)
def test_moments_of_mapped_features(matrix: torch.Tensor, intercept: bool) -> None:
    features, targets = correlated()
    mapped = features * matrix if matrix.ndim == 1 else features @ matrix.T
    one, other = moments_of(features, targets, intercept).mapped(matrix), moments_of(mapped, targets, intercept)
    for name, tensor in one.tensors().items():
        torch.testing.assert_close(tensor, other.tensors()[name], rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(one.solve(0.3).weight, other.solve(0.3).weight, rtol=1e-9, atol=1e-9)


def test_faults_of_moments() -> None:
    features, targets = correlated()
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
    features, _ = correlated()
    moments = moments_of(features, torch.ones(len(features), 2, dtype=F64))
    for ridges in ((1e-3, 1.0, 1e-1), (1.0, 1e-1, 1e-3)):
        assert cross_validated(moments, ridges).ridge == 1.0
        assert fit_ridge(moments, moments, ridges).ridge == 1.0
