"""Details of maps, readouts and landmarks that a wrong sign, factor or order would change, against brute force."""

import math

import pytest
import torch

from snnk_peft import COMPONENTS, PROJECTIONS, build_feature_map
from snnk_peft.components.taylor import Taylor
from snnk_peft.errors import ConfigError
from snnk_peft.feature_map.describe import partners
from snnk_peft.layers.adapter import GatedReadout
from snnk_peft.layers.feature_stage import FeatureStage
from snnk_peft.solvers.landmarks import SecondMoments, choose_landmarks
from snnk_peft.solvers.nystrom import nystrom_readout

F64 = torch.float64
SIGNS = torch.tensor([1, -1, -1, 1, -1], dtype=F64)


def data(dim: int = 5) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries and keys with unequal coordinates and means that are not 0."""
    scale = torch.linspace(0.2, 1.2, dim, dtype=F64)
    generator = torch.Generator().manual_seed(3)
    x, y = (torch.randn(2, n, dim, generator=generator, dtype=F64) for n in (9, 12))
    return x * scale + 0.2, y * scale.flip(0) - 0.3 * scale


# --- exponential components with the statistics of real data ---------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "params"),
    [("saderf", {}), ("saderf", {"A": -0.1}), ("derf", {}), ("derf", {"mode": "asymmetric"}), ("oprf", {})],
)
def test_the_gaussian_kernel_with_real_statistics(name, params):
    """e^{−‖x−y‖²/2} = e^{x·y} e^{−‖x‖²/2 − ‖y‖²/2}, of the vectors as they came, for every draw."""
    x, y = data()
    estimates = {}
    for kernel in ("softmax", "gaussian"):
        fm = build_feature_map(name, "orf", 5, 12, component_params={**params, "kernel": kernel}).double()
        statistics = fm.component.statistics(x, y)
        estimates[kernel] = fm.phi(x, statistics).dense() @ fm.psi(y, statistics).dense().mT
    lengths = x.square().sum(-1)[..., :, None] + y.square().sum(-1)[..., None, :]
    torch.testing.assert_close(estimates["gaussian"], estimates["softmax"] * torch.exp(-lengths / 2))
    exact = fm.kernel(x[..., :, None, :], y[..., None, :, :])
    torch.testing.assert_close(exact, torch.exp(-torch.cdist(x, y).square() / 2))


def test_sderf_is_at_its_optimum():
    """Each a_l has the least second moment for the eigenvalue λ_l of the mean of (x + y)(x + y)ᵀ over all pairs."""
    x, y = (v[0] for v in data())
    statistics = COMPONENTS["derf"]().statistics(x, y)
    sums = (x[:, None] + y).flatten(0, 1)
    moment = statistics["x_map"].T @ (sums.T @ sums / len(sums)) @ statistics["x_map"]
    eigenvalues = moment.diagonal()
    torch.testing.assert_close(moment, torch.diag(eigenvalues))
    torch.testing.assert_close(statistics["y_map"], statistics["x_map"])
    torch.testing.assert_close(statistics["x_map"].T @ statistics["x_map"], torch.eye(5, dtype=F64))

    def log_moment(a):
        return (1 - 4 * a).log() - (1 - 8 * a).log() / 2 + 2 * (1 - 4 * a) / (1 - 8 * a) * eigenvalues

    a = statistics["a"][0]
    assert (a < -1e-3).all()
    for step in (-1e-3, 1e-3):
        assert (log_moment(a + step) > log_moment(a)).all()


def test_a_draw_of_derf_is_the_same_on_every_machine(monkeypatch):
    """Which sign an eigenvector has is left open: that of a CPU, of a GPU or of a rounding must not change features."""
    x, y = data()
    fm = build_feature_map("derf", "orf", 5, 12).double()
    expected = fm.phi(x, fm.component.statistics(x, y)).dense()
    eigh = torch.linalg.eigh
    monkeypatch.setattr(torch.linalg, "eigh", lambda matrix: (eigh(matrix)[0], eigh(matrix)[1] * SIGNS))
    torch.testing.assert_close(fm.phi(x, fm.component.statistics(x, y)).dense(), expected)


@pytest.mark.parametrize(("projection", "rows"), [("sgq", 11), ("ssr", 25)])
def test_hyprf_over_weighted_rows(projection, rows):
    fm = build_feature_map("hyprf", projection, 5, rows).double()
    x, y = (v[0, :4] for v in data())
    z = (x + y) @ fm.projection.materialize().T
    common = torch.exp(-(x.square() + y.square()).sum(-1) / 2)
    expected = common * (torch.cosh(z) @ fm.projection.feature_weights)
    assert projection != "sgq" or fm.projection.feature_weights.min() < 0
    torch.testing.assert_close((fm.phi(x).dense() * fm.psi(y).dense()).sum(-1), expected)


def test_positive_means_positive():
    """Every component's features are negative somewhere exactly if it does not say that they are positive."""
    torch.manual_seed(0)
    x = torch.randn(40, 4)
    for name in COMPONENTS:
        component = COMPONENTS[name]()
        samples = ("gaussian", "poisson", "geometric", "rademacher", "identity", "gmm")
        projection = next(p for p in samples if p in partners(name))
        rows = PROJECTIONS[projection].nearest_size(4, max(40, component.fewest_rows()))
        fm = build_feature_map(name, projection, 4, rows)
        if name == "urf":
            x = x / 8  # where its variance is bearable
        assert bool((fm(x) < 0).any()) != fm.component.positive, name


def test_hrf_is_exact_for_equal_lengths_only():
    fm = build_feature_map("hrf", "gaussian", 5, 8, component_params={"mode": "learned"}).double()
    x = data()[0][0]
    with torch.no_grad():
        for logit, other in ((-50.0, 1.0), (50.0, -1.0)):  # the trigonometric half at θ = 0, the positive one at π
            fm.component.logit.fill_(logit)
            for factor in (1.0, 2.0):
                y = x * other * factor
                error = ((fm.phi(x).dense() * fm.psi(y).dense()).sum(-1) / fm.kernel(x, y) - 1).abs().max()
                assert (error < 1e-9) == (factor == 1.0)


def test_taylor_shares_rows_out_once(monkeypatch):
    calls = []
    share_out = Taylor._share_out
    monkeypatch.setattr(Taylor, "_share_out", lambda self, rows: calls.append(rows) or share_out(self, rows))
    fm = build_feature_map("taylor", "rademacher", 5, 300)
    for _ in range(3):
        assert fm(torch.randn(2, 5) / 4).shape == (2, fm.feature_dim)
    assert calls == [300]


def test_what_messages_advise_works():
    with pytest.raises(ConfigError, match=r"\{'phases': False\}, .* such as 'orf' or 'qmc'") as refused:
        build_feature_map("cos", "sgq", 5, 11)
    assert "trigrf" not in str(refused.value)  # no closed form: refused by init='nystrom', the pooler's default
    assert COMPONENTS["cos"].elementwise()
    build_feature_map("cos", "sgq", 5, 11, component_params={"phases": False})
    for name in ("orf", "qmc"):
        build_feature_map("cos", name, 5, 11)


# --- readouts -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("projection", [("orf", 12), ("sgq", 11)])
@pytest.mark.parametrize("component", ["relu", "elu"])
def test_centred_features_have_mean_zero(component, projection):
    """Over standard normal inputs, each feature with the amplitude of its row."""
    fm = build_feature_map(component, projection[0], 5, projection[1])
    stage = FeatureStage(fm, normalize=True, scale=0.7, center=True)
    nodes = torch.linspace(-9, 9, 4001, dtype=F64)
    density = torch.exp(-nodes.square() / 2) * (18 / 4000) / (2 * math.pi) ** 0.5
    std = 0.7 * fm.projection.materialize().double().norm(dim=1)
    means = density @ fm.component.function(nodes[:, None] * std)
    amplitudes = fm.projection.feature_weights.double().abs().sqrt()
    torch.testing.assert_close(stage.means.double(), means * amplitudes, rtol=1e-4, atol=1e-6)


ACTIVATIONS = {"gelu": torch.nn.functional.gelu, "tanh": torch.tanh, "relu": torch.relu}


@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("feature", ["elu", "gelu", "cos"])
def test_nystrom_with_equal_and_opposite_rows(activation, feature, sign):
    """One unit and one feature on the same line, z and ±z: the exact covariance, by one dense integral."""
    f, g = ACTIVATIONS[activation], COMPONENTS[feature]().function
    weight, row = torch.tensor([[0.6, -0.9]]), torch.tensor([[0.4, -0.6]]) * sign
    bias, offset, mean, std = torch.tensor([0.3]), torch.tensor([-0.5]), torch.tensor([0.2, 0.5]), torch.ones(2)
    readout = nystrom_readout(weight, bias, f, row, offset, g, input_mean=mean, input_std=std)
    t = torch.linspace(-10, 10, 20001, dtype=F64)  # z = w·mean + b + ‖w‖ t
    density = torch.exp(-t.square() / 2)
    density = density / density.sum()
    first = f((weight.double() @ mean.double() + bias) + weight.double().norm() * t)
    second = g((row.double() @ mean.double() + offset) + sign * row.double().norm() * t)
    centred = second - density @ second
    expected = (density * first * centred).sum() / (density * centred.square()).sum()
    assert readout.weight.item() == pytest.approx(expected.item(), rel=1e-4)
    assert readout.bias.item() == pytest.approx((density @ first - expected * (density @ second)).item(), abs=1e-4)


@pytest.mark.parametrize("dim", [16, 64])
def test_the_papers_start_has_the_papers_spread(dim):
    """A = Φ(W₀) with N(0, 1/dim) entries in W₀: over W = I, relu features show them as they are."""
    stage = FeatureStage(build_feature_map("relu", "identity", dim, dim))
    generator = torch.Generator().manual_seed(0)
    readout = GatedReadout(stage, init="paper", gate=True, out_dim=100_000 // dim, generator=generator)
    drawn = readout.A.detach().double() * dim**0.5  # max(W₀, 0)
    count = drawn.numel()
    # E relu(w)² = 1/(2 dim), Var relu(w)² = (3/2 − 1/4)/dim²
    assert abs(drawn.square().mean() - 0.5 / dim) < 5 * (1.25 / count) ** 0.5 / dim


# --- landmarks ------------------------------------------------------------------------------------------------------


def moments_of(vectors: torch.Tensor) -> SecondMoments:
    moments = SecondMoments(vectors.shape[1])
    moments.update(vectors)
    return moments


def error_behind(covariance, weight, features):
    """tr W₂ (C − C_S C_SS⁻¹ C_Sᵀ) W₂ᵀ over the units that W₂ reads."""
    units = weight.shape[1]
    inner = covariance[features][:, features]
    cross = covariance[:units, features]
    left = covariance[:units, :units] - cross @ torch.linalg.pinv(inner, hermitian=True) @ cross.T
    return float(torch.einsum("ol,lk,ok->", weight, left, weight))


@pytest.mark.parametrize("given", [0, 3])
def test_greedy_landmarks_against_brute_force(given):
    """Every step takes the unit that leaves the least error behind W₂, beside what is given."""
    generator = torch.Generator().manual_seed(5)
    units, outputs = 8, 4
    inputs = torch.randn(400, 3, generator=generator, dtype=F64)
    mixing = torch.randn(3, units, generator=generator, dtype=F64) * torch.linspace(2, 0, units)
    noise = torch.randn(400, units, generator=generator, dtype=F64) * torch.linspace(0.3, 1, units)
    vectors = torch.cat((inputs @ mixing + noise, inputs[:, :given]), 1)
    importance = torch.linspace(0.2, 2, units)[torch.randperm(units, generator=generator)]
    weight = torch.randn(outputs, units, generator=generator, dtype=F64) * importance
    moments = moments_of(vectors)
    covariance, kept = moments.covariance(), []
    for count in range(1, 5):
        free = [unit for unit in range(units) if unit not in kept]
        always = list(range(units, units + given))
        kept.append(min(free, key=lambda unit: error_behind(covariance, weight, [*kept, unit, *always])))
        assert choose_landmarks(moments, weight, count, given=given).tolist() == kept
    if given:
        without = choose_landmarks(moments_of(vectors[:, :units]), weight, 4)
        assert sorted(without.tolist()) != sorted(kept)  # what is given matters here


def test_important_landmarks_weigh_spread_by_the_contraction():
    generator = torch.Generator().manual_seed(6)
    spread = torch.tensor([4.0, 3.0, 2.0, 1.0], dtype=F64)
    vectors = torch.randn(2000, 4, generator=generator, dtype=F64) * spread
    weight = torch.diag(torch.tensor([0.1, 1.0, 0.1, 5.0], dtype=F64))  # products 0.4, 3, 0.2, 5
    extra = torch.cat((vectors, 100 * torch.randn(2000, 2, generator=generator, dtype=F64)), 1)
    for moments, given in ((moments_of(vectors), 0), (moments_of(extra), 2)):
        for count, expected in ((1, [3]), (2, [3, 1]), (3, [3, 1, 0])):
            found = choose_landmarks(moments, weight, count, rule="importance", given=given)
            assert found.tolist() == expected
