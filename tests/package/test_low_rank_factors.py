"""Low-rank factors and layers: exact risks, best factors, convolutions and Linears."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from snnk_peft import LOW_RANK_INITS, InputMoments, factorize, factorize_many
from snnk_peft.errors import ConfigError, NumericalError
from snnk_peft.functional.nonlinearity import NONLINEARITIES, nonlinearity, relu_similarity
from snnk_peft.layers.low_rank import LowRankLinear
from snnk_peft.layers.low_rank_conv import SPLITS, LowRankConv1d, LowRankConv2d, low_rank_class
from snnk_peft.low_rank import kernel_projection, risk
from snnk_peft.low_rank.inits.function import search
from snnk_peft.low_rank.kernel_projection import nonlinearity_kernel
from snnk_peft.low_rank.problem import Problem
from snnk_peft.low_rank.rearranged import rearranged_factors
from snnk_peft.low_rank.risk import gaussian_risk
from snnk_peft.low_rank.unit_fit import best_rows, fit_units
from snnk_peft.solvers.narrow import principal_factors

F64 = torch.float64
# The paper's W = [[1, −1, 0], [0, 0, 1]] has one column per output; torch's has one row.
HAND = torch.tensor([[1.0, 0.0], [-1.0, 0.0], [0.0, 1.0]], dtype=F64)


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


def he_normal(out: int, width: int, seed: int = 0) -> torch.Tensor:
    return normal(out, width, seed=seed) * math.sqrt(2 / width)


# ---------------------------------------------------------------- the risk


@pytest.mark.parametrize("activation", sorted(NONLINEARITIES))
@pytest.mark.parametrize("biased", [False, True])
def test_the_exact_risk_is_the_mean_over_samples(activation, biased):
    weight, U, V = he_normal(12, 8), normal(12, 3, seed=1), normal(8, 3, seed=2) / 2
    bias, new_bias = (normal(12, seed=3), normal(12, seed=4)) if biased else (None, None)
    exact = risk(weight, U, V, activation, bias=bias, new_bias=new_bias)
    f, x = NONLINEARITIES[activation].function, normal(100_000, 8, seed=5)
    outputs = [nn.functional.linear(x, matrix, shift) for matrix, shift in ((weight, bias), (U @ V.T, new_bias))]
    samples = (f(outputs[0]) - f(outputs[1])).square().sum(1)
    assert abs(samples.mean() - exact) <= 5 * samples.std() / math.sqrt(len(x))
    relative = risk(weight, U, V, activation, bias=bias, new_bias=new_bias, relative=True)
    assert relative == pytest.approx(exact / float(f(outputs[0]).square().sum(1).mean()), rel=0.05)


def test_the_risk_of_inputs_with_moments_is_that_of_samples_with_them():
    weight, bias = he_normal(10, 6), normal(10, seed=1)
    root, mean = normal(6, 6, seed=2), normal(6, seed=3)
    factors = factorize(weight, 2, "spectral", bias=bias)
    x = mean + normal(200_000, 6, seed=4) @ root.T
    for activation in ("relu", "gelu"):
        exact = risk(weight, factors.U, factors.V, activation, bias=bias, inputs=InputMoments(mean, root @ root.T))
        sampled = risk(weight, factors.U, factors.V, activation, bias=bias, inputs=x)
        assert exact == pytest.approx(sampled, rel=0.02)


@pytest.mark.parametrize("init", ["spectral", "spectral_gnorm", "function"])
@pytest.mark.parametrize("activation", sorted(NONLINEARITIES))
def test_full_rank_has_no_risk(init, activation):
    weight, bias = he_normal(9, 6), normal(9, seed=1)
    for shift in (None, bias):
        factors = factorize(weight, 6, init, activation=activation, bias=shift)
        assert factors.relative_risk < 1e-9
        # Where a bias keeps a ReLU shut, its row hardly matters.
        tolerance = 1e-6 if shift is None else 5e-3
        torch.testing.assert_close(factors.weight(), weight, atol=tolerance, rtol=tolerance)


# ---------------------------------------------------------------- the order of the inits


@pytest.mark.parametrize("activation", sorted(NONLINEARITIES))
@pytest.mark.parametrize("biased", [False, True])
def test_function_is_best_and_gnorm_never_worse_than_the_svd(activation, biased):
    weight = he_normal(40, 16)
    bias = normal(40, seed=1) / 2 if biased else None
    for rank in (1, 4, 12):
        found = {
            init: factorize(weight, rank, init, activation=activation, bias=bias)
            for init in ("baseline", "spectral", "spectral_gnorm", "function", "kernel_projection")
        }
        risks = {init: factors.relative_risk for init, factors in found.items()}
        assert risks["spectral_gnorm"] <= risks["spectral"] + 1e-12
        assert risks["function"] <= min(risks.values()) + 1e-9
        assert risks["spectral"] < risks["baseline"]
        for factors in found.values():  # what the factors say of themselves is true
            measured = risk(weight, factors.U, factors.V, activation, bias=bias, new_bias=factors.bias, relative=True)
            assert measured == pytest.approx(factors.relative_risk, abs=1e-10)
            assert (factors.bias is None) == (bias is None)


@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_function_is_as_good_as_random_restarts(activation):
    weight = he_normal(48, 16)
    best = factorize(weight, 2, activation=activation).relative_risk
    problem = Problem(weight, 2, nonlinearity(activation))
    for seed in range(10):
        again = search(problem, normal(16, 2, seed=seed))
        assert best <= float(again.risk / again.energy) + 1e-3


@pytest.mark.parametrize("init", ["nkp", "ws_nkp"])
def test_adam_on_samples_ends_near_the_optimum_but_not_below(init):
    weight = he_normal(48, 16)
    best, sampled = (factorize(weight, 2, name, activation="relu").relative_risk for name in ("function", init))
    assert best <= sampled <= 1.05 * best


# ---------------------------------------------------------------- the paper's theorems


def least_on_a_line(weight: torch.Tensor) -> float:
    """The least ReLU risk at rank 1 of rows in the plane, by brute force: every angle, each row at its best norm."""
    angle = torch.linspace(0, math.pi, 20_001, dtype=F64)
    squares = weight.square().sum(1, keepdim=True)
    rho = (weight @ torch.stack((angle.cos(), angle.sin()))).abs() / squares.sqrt()
    kappa = ((1 - rho.square()).clamp_min(0).sqrt() + (math.pi - rho.clamp(max=1).acos()) * rho) / math.pi
    return float((squares * (1 - kappa.square()) / 2).sum(0).min())


def test_the_hand_example_against_theorem_2_10():
    """Kernel projection is not optimal for ReLU: 1.0249, where the SVD has .5 and the optimum .4414."""
    U, V = kernel_projection(HAND, 1, "relu")
    assert risk(HAND, U, V, "relu") == pytest.approx(1.0249, abs=1e-4)
    found = {
        init: factorize(HAND, 1, init, activation="relu").relative_risk * 1.5
        for init in LOW_RANK_INITS
        if init in ("spectral", "spectral_gnorm", "function", "kernel_projection")
    }
    assert found["kernel_projection"] == pytest.approx(1.0249, abs=1e-4)
    assert found["spectral"] == pytest.approx(0.5, abs=1e-12)
    assert found["function"] == pytest.approx(0.4414, abs=1e-4)
    assert found["function"] == pytest.approx(least_on_a_line(HAND), abs=1e-7)


def test_kernel_projection_loses_to_the_svd_on_random_layers():
    for seed in range(3):
        weight = he_normal(64, 24, seed=seed)
        projected, svd = (factorize(weight, 3, init, activation="relu") for init in ("kernel_projection", "spectral"))
        assert projected.relative_risk > svd.relative_risk


def test_the_best_subspace_need_not_be_singular_vectors():
    """Theorem 4.2 for W = diag(1.01, 1), rank 1: both of its candidates, with the best norms, lose to another line."""
    weight = torch.diag(torch.tensor([1.01, 1.0], dtype=F64))
    candidates = []
    for axis in (0, 1):
        V = torch.eye(2, dtype=F64)[:, axis : axis + 1]
        U = torch.full((2, 1), 1 / math.pi, dtype=F64) * weight.diagonal()[:, None]
        U[axis] = weight[axis, axis]
        candidates.append(risk(weight, U, V, "relu"))
    factors = factorize(weight, 1, activation="relu")
    found = risk(weight, factors.U, factors.V, "relu")
    gnorm = factorize(weight, 1, "spectral_gnorm", activation="relu")
    assert risk(weight, gnorm.U, gnorm.V, "relu") == pytest.approx(min(candidates), abs=1e-9)
    assert found < min(candidates) - 0.01
    assert found == pytest.approx(least_on_a_line(weight), abs=1e-7)
    direction = factors.V[:, 0] / factors.V.norm()
    assert direction.abs().max() < 0.95  # nearly 20 degrees from the nearer singular vector


def test_definition_4_1_is_twice_definition_2_5():
    weight = he_normal(5, 4)
    norms = weight.norm(dim=1)
    sizes = torch.outer(norms, norms)
    arccosine = sizes * relu_similarity((weight @ weight.T / sizes).clamp(-1, 1))
    activations = torch.relu(normal(200_000, 4, seed=1) @ weight.T)
    kernel = nonlinearity_kernel(NONLINEARITIES["relu"], weight)
    torch.testing.assert_close(activations.T @ activations / len(activations), kernel, rtol=0.02, atol=0.01)
    torch.testing.assert_close(2 * kernel, arccosine)


# ---------------------------------------------------------------- real inputs


def correlated(n: int, width: int) -> torch.Tensor:
    scale = torch.logspace(0.3, -1.5, width, dtype=F64)
    return normal(n, width, seed=7).exp() * scale @ normal(width, width, seed=8) / 2 + normal(width, seed=9)


@pytest.mark.parametrize("biased", [False, True])
def test_data_for_a_linear_layer_is_the_best_there_is(biased):
    """Reduced-rank regression by another way: rank-r SVD of the outputs (centred, with a bias)."""
    weight, x = he_normal(20, 12), correlated(500, 12)
    bias = normal(20, seed=1) if biased else None
    found = factorize(weight, 3, "data", bias=bias, inputs=x)
    outputs = nn.functional.linear(x, weight, bias)
    centred = outputs - outputs.mean(0) if biased else outputs
    values = torch.linalg.svdvals(centred)
    assert found.relative_risk == pytest.approx(float(values[3:].square().sum() / outputs.square().sum()), rel=1e-8)
    moments = factorize(weight, 3, "data", bias=bias, inputs=InputMoments.of(x))
    torch.testing.assert_close(moments.weight(), found.weight())
    assert moments.relative_risk == pytest.approx(found.relative_risk, rel=1e-8)


@pytest.mark.parametrize("activation", ["relu", "gelu"])
@pytest.mark.parametrize("biased", [False, True])
def test_data_is_best_over_its_inputs(activation, biased):
    weight, x = he_normal(20, 12), correlated(300, 12)
    bias = normal(20, seed=1) if biased else None
    risks = {
        init: factorize(weight, 3, init, activation=activation, bias=bias, inputs=x).relative_risk
        for init in ("spectral", "spectral_gnorm", "function", "data")
    }
    moments = factorize(weight, 3, "data", activation=activation, bias=bias, inputs=InputMoments.of(x))
    over_x = risk(weight, moments.U, moments.V, activation, bias=bias, new_bias=moments.bias, inputs=x, relative=True)
    assert risks["data"] < over_x < min(risks["spectral"], risks["function"])


def test_inputs_in_fewer_directions_than_the_rank_are_met_exactly():
    weight, x = he_normal(10, 8), normal(50, 2) @ normal(2, 8, seed=1)
    factors = factorize(weight, 4, "data", inputs=x)
    assert factors.U.shape == (10, 4)
    assert factors.V.shape == (8, 4)
    torch.testing.assert_close(x @ factors.weight().T, x @ weight.T)


# ---------------------------------------------------------------- the rest


@pytest.mark.parametrize(
    "init", ["baseline", "spectral", "spectral_gnorm", "function", "kernel_projection", "nkp", "ws_nkp"]
)
def test_inits_are_deterministic_and_keep_dtype(init, monkeypatch):
    monkeypatch.setattr("snnk_peft.low_rank.inits.references.STEPS", 20)
    weight = he_normal(10, 6).to(torch.bfloat16)
    state = torch.random.get_rng_state()
    first, second = (factorize(weight, 2, init, activation="relu", seed=3) for _ in range(2))
    assert torch.equal(torch.random.get_rng_state(), state)
    assert torch.equal(first.U, second.U)
    assert torch.equal(first.V, second.V)
    assert first.U.dtype == first.V.dtype == torch.bfloat16
    assert (first.U.shape, first.V.shape) == ((10, 2), (6, 2))
    assert first.seconds > 0
    if init in ("baseline", "nkp"):
        assert not torch.equal(first.U, factorize(weight, 2, init, activation="relu", seed=4).U)


def test_degenerate_layers():
    weight = he_normal(8, 5)
    weight[3] = 0
    for activation in ("relu", "gelu"):
        for bias in (None, normal(8, seed=1)):
            for init in ("spectral", "spectral_gnorm", "function", "kernel_projection"):
                factors = factorize(weight, 2, init, activation=activation, bias=bias)
                assert factors.U.isfinite().all()
                assert factors.V.isfinite().all()
                assert 0 <= factors.relative_risk < 1
    low = he_normal(8, 2) @ he_normal(2, 5)
    for init in ("spectral", "spectral_gnorm", "function"):  # singular values of 0
        factors = factorize(low, 4, init, activation="relu")
        torch.testing.assert_close(factors.weight(), low, atol=1e-6, rtol=1e-6)
    assert factorize(torch.zeros(4, 3), 2, activation="relu").relative_risk == 0


def test_every_fault_is_told_at_once():
    with pytest.raises(ConfigError) as caught:
        factorize(he_normal(6, 4), 5, "functoin", activation="rleu", bias=torch.zeros(4), inputs=torch.zeros(3, 6))
    text = str(caught.value)
    assert len(caught.value.faults) == 5
    for part in (
        "rank is 5; expected 1 to 4",
        "did you mean 'function'",
        "did you mean 'relu'",
        "bias is (4,)",
        "(n, 4)",
    ):
        assert part in text
    with pytest.raises(ConfigError, match="'data' needs inputs"):
        factorize(he_normal(6, 4), 2, "data")
    with pytest.raises(ConfigError, match=r"expected a matrix \(out, in\)"):
        factorize(torch.zeros(3, 3, 3), 1)
    with pytest.raises(ConfigError, match="meta device"):
        factorize(torch.zeros(3, 3, device="meta"), 1)
    with pytest.raises(NumericalError, match=r"weight holds NaN or infinite entries, the first at \[1, 2\]"):
        factorize(torch.eye(3).index_put((torch.tensor(1), torch.tensor(2)), torch.tensor(math.nan)), 1)
    with pytest.raises(ConfigError, match=r"U is \(6, 2\); expected \(5, 2\)"):
        risk(torch.zeros(5, 4), torch.zeros(6, 2), torch.zeros(4, 2))
    with pytest.raises(ConfigError, match="kernel is"):
        kernel_projection(HAND, 1, kernel=torch.eye(2))


# ---------------------------------------------------------------- many layers


def layers() -> dict[str, dict[str, object]]:
    inputs = correlated(60, 16).float()
    return {
        "relu": {"weight": he_normal(24, 16).float(), "rank": 3, "activation": "relu"},
        "gelu": {
            "weight": he_normal(32, 16).to(torch.bfloat16),
            "rank": 2,
            "activation": "gelu",
            "bias": torch.ones(32),
        },
        "data": {"weight": he_normal(12, 16), "rank": 2, "init": "data", "inputs": InputMoments.of(inputs)},
        "nkp": {"weight": he_normal(12, 16), "rank": 2, "init": "baseline", "seed": 5},
    }


def test_many_layers_are_the_same_from_any_number_of_processes(capsys):
    here = factorize_many(layers(), processes=1)
    there = factorize_many(layers(), processes=2, progress=True)
    assert list(here) == list(there) == list(layers())
    assert "4/4" in capsys.readouterr().out
    for name, found in here.items():
        other, alone = there[name], factorize(**layers()[name])
        assert found.U.dtype == layers()[name]["weight"].dtype
        for factors in (other, alone):
            assert torch.equal(found.U, factors.U)
            assert torch.equal(found.V, factors.V)
            assert found.relative_risk == factors.relative_risk
            assert (found.bias is None) == (factors.bias is None)
        if found.bias is not None:
            assert torch.equal(found.bias, other.bias)


def test_many_layers_tell_all_their_faults_before_anything_is_computed():
    wrong = layers()
    wrong["relu"]["rank"] = 99
    wrong["gelu"]["weigth"] = wrong["gelu"].pop("weight")
    with pytest.raises(ConfigError) as caught:
        factorize_many(wrong)
    assert len(caught.value.faults) == 2
    assert "layer 'relu': rank is 99" in caught.value.faults[0]
    assert "layer 'gelu' has activation, bias, rank, weigth" in caught.value.faults[1]
    with pytest.raises(ConfigError, match="cannot be sent to another process"):
        factorize_many({n: {**layers()["relu"], "activation": lambda z: z**3} for n in "ab"}, processes=2)
    with pytest.raises(ConfigError, match="processes is 0"):
        factorize_many(layers(), processes=0)


@pytest.mark.parametrize("activation", sorted(NONLINEARITIES))
@pytest.mark.parametrize("biased", [False, True])
def test_rows_in_the_subspace_and_rows_of_zeros_are_met_exactly(activation, biased):
    """Of the first ρ = ‖Pw‖/‖w‖ is 1, and by rounding more; of the others it may be any quotient of rounding."""
    low = he_normal(40, 3) @ he_normal(3, 12, seed=1)
    low[3] = 0
    bias = normal(40, seed=2) if biased else None
    for weight in (low, torch.zeros(40, 12, dtype=F64)):
        factors = factorize(weight, 3, "spectral_gnorm", activation=activation, bias=bias)
        torch.testing.assert_close(factors.weight(), weight, atol=1e-6, rtol=1e-6)
        assert 0 <= factors.relative_risk < 1e-6


def brute_norm(function, t: float, rho: float) -> float:
    """The s that minimises E (f(su) − f(tv))² on a fine grid, the mean over v given u by the trapezoidal rule."""
    u = torch.linspace(-8, 8, 801, dtype=F64)
    weight = torch.exp(-u.square() / 2)
    weight = weight / weight.sum()
    told = (function(t * (rho * u[:, None] + math.sqrt(1 - rho * rho) * u)) * weight).sum(1)
    s = torch.linspace(0, 1.2 * t, 6001, dtype=F64)
    return float(s[((function(s[:, None] * u) - told).square() * weight).sum(1).argmin()])


@pytest.mark.parametrize(("activation", "t"), [("gelu", 0.7), ("tanh", 1.3), ("gelu", 4.0), ("silu", 3.0)])
@pytest.mark.parametrize("rho", [0.35, 0.93, 0.985])
def test_norms_of_rows_are_the_best_by_brute_force(activation, t, rho):
    """From the table, and by steps where the conditional mean is a series (below .9) and an integral (above)."""
    f = NONLINEARITIES[activation]
    target, cosine = torch.tensor([t], dtype=F64), torch.tensor([rho], dtype=F64)
    wanted = brute_norm(f.function, t, rho)
    assert float(fit_units(f, target, cosine, None)[0]) == pytest.approx(wanted, rel=2e-3)
    assert float(best_rows(f, target, cosine, None)[0]) == pytest.approx(wanted, rel=5e-3)


# === layers ===========================================================================================================


# Kernel, stride, padding, dilation, padding mode; for sequences the first of each pair.
SETTINGS = [
    ((3, 5), (2, 1), (1, 2), (1, 2), "zeros"),
    ((3, 4), 1, "same", (1, 2), "zeros"),
    ((3, 4), 1, "same", (2, 1), "reflect"),
    ((2, 3), (1, 2), "valid", 1, "zeros"),
    ((3, 2), (1, 2), (1, 2), 1, "circular"),
    ((1, 1), 1, 0, 1, "zeros"),
]


def convolution(dimensions: int, setting: tuple, **options) -> nn.Module:
    torch.manual_seed(0)
    cut = [value[:dimensions] if isinstance(value, tuple) else value for value in setting[:4]]
    return (nn.Conv1d, nn.Conv2d)[dimensions - 1](4, 7, *cut, padding_mode=setting[4], **options).double()


def inputs(dimensions: int) -> torch.Tensor:
    return torch.randn(2, 4, *(13, 11)[:dimensions], generator=torch.Generator().manual_seed(1)).double()


def full_rank(layer) -> int:
    return min(len(layer.U), len(layer.V))


@pytest.mark.parametrize(("dimensions", "split", "setting"), [*itertools.product((1, 2), SPLITS, SETTINGS)])
def test_full_rank_is_the_dense_convolution(dimensions, split, setting):
    conv, x = convolution(dimensions, setting), inputs(dimensions)
    cls = low_rank_class(conv)
    thin = cls.from_dense(conv, full_rank(cls.like(conv, 1, split=split)), split=split)
    expected = conv(x)
    torch.testing.assert_close(thin.kernel(), conv.weight.data, rtol=0, atol=1e-12)
    for form in (thin, thin.factored(), thin.dense()):
        torch.testing.assert_close(form(x), expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(thin(x[0]), expected[0], rtol=0, atol=1e-12)
    patches = thin.patches(x) @ conv.weight.flatten(1).T + conv.bias
    torch.testing.assert_close(patches.reshape(2, -1, 7).transpose(1, 2), expected.flatten(2), rtol=0, atol=1e-12)


@pytest.mark.parametrize(("dimensions", "split"), [*itertools.product((1, 2), SPLITS)])
def test_lower_rank_is_the_nearest_kernel(dimensions, split):
    """Against the singular values of a matrix whose entries are put in place one by one."""
    conv = convolution(dimensions, SETTINGS[0])
    kernel = conv.weight.detach().reshape(7, 4, *((1,) if dimensions == 1 else ()), *conv.kernel_size)
    height, width = kernel.shape[2:]
    apart = split == "spatial"
    matrix = torch.zeros(7 * (width if apart else 1), 4 * height * (1 if apart else width)).double()
    for o, i, a, b in itertools.product(range(7), range(4), range(height), range(width)):
        row, column = (o * width + b, i * height + a) if apart else (o, (i * height + a) * width + b)
        matrix[row, column] = kernel[o, i, a, b]
    values = torch.linalg.svdvals(matrix)
    for rank in (1, 3):
        thin = low_rank_class(conv).from_dense(conv, rank, split=split)
        torch.testing.assert_close(thin.weight_matrix(), thin.matrix_of(thin.kernel()))
        lost = (thin.kernel() - conv.weight).square().sum()
        torch.testing.assert_close(lost, values[rank:].square().sum())
        x = inputs(dimensions)
        torch.testing.assert_close(thin(x), thin.dense()(x))
        torch.testing.assert_close(thin(x), thin.factored()(x))


def test_linear():
    torch.manual_seed(0)
    dense, x = nn.Linear(6, 9).double(), torch.randn(2, 5, 6).double()
    values = torch.linalg.svdvals(dense.weight)
    for rank in (2, 6):
        thin = LowRankLinear.from_dense(dense, rank)
        torch.testing.assert_close((thin.weight_matrix() - dense.weight).square().sum(), values[rank:].square().sum())
        for form in (thin.factored(), thin.dense()):
            torch.testing.assert_close(form(x), thin(x))
    torch.testing.assert_close(thin(x), dense(x))
    assert LowRankLinear.from_dense(nn.Linear(6, 9, bias=False), 2).bias is None


def test_the_start_from_scratch_keeps_the_variance():
    thin = LowRankLinear(400, 300, rank=200)
    again, other = LowRankLinear(400, 300, rank=200), LowRankLinear(400, 300, rank=200, seed=1)
    assert torch.equal(thin.U, again.U)
    assert not torch.equal(thin.U, other.U)
    # 120 000 products of 200 terms; the variance of the mean square is dominated by that of the factors.
    assert float(thin.weight_matrix().detach().var()) == pytest.approx(1 / 400, rel=0.05)
    before = torch.get_rng_state()
    LowRankConv2d(3, 5, 3, 2)
    assert torch.equal(torch.get_rng_state(), before)


def test_the_output_has_the_type_of_the_input():
    for layer, x in ((LowRankLinear(4, 5, 2), torch.ones(3, 4)), (LowRankConv1d(4, 5, 3, 2), torch.ones(3, 4, 9))):
        expected = layer(x)
        for dtype in (torch.float16, torch.bfloat16):
            assert layer(x.to(dtype)).dtype == dtype
            assert layer.to(dtype)(x.to(dtype)).dtype == dtype
            torch.testing.assert_close(layer(x.to(dtype)).float(), expected, rtol=0.05, atol=0.05)
            layer.float()


@pytest.mark.parametrize(("split", "stride"), [*itertools.product(SPLITS, (1, 2, (1, 2), (2, 1)))])
def test_the_cheaper_form_is_kept(split, stride):
    """Counted multiply-adds decide, not numbers of parameters: a stride may come after the first of the two."""
    steps = (stride, stride) if isinstance(stride, int) else stride
    conv, x = nn.Conv2d(16, 16, 3, padding=1, stride=stride), torch.zeros(1, 16, 12, 12)
    pixels = 144 // (steps[0] * steps[1])
    seen = set()
    for rank in range(1, full_rank(LowRankConv2d.like(conv, 1, split=split)) + 1):
        thin = LowRankConv2d.like(conv, rank, split=split)
        counts = []
        for form in (thin.factored(), conv):
            with FlopCounterMode(display=False) as counter:
                form(x)
            counts.append(counter.get_total_flops() // 2)
        assert counts == [count * pixels for count in thin.macs()]
        assert isinstance(thin.fold(), nn.Sequential) == (counts[0] < counts[1])
        seen.add(counts[0] < counts[1])
    assert seen == {True, False}
    assert isinstance(LowRankLinear(8, 8, 3).fold(), nn.Sequential)
    assert isinstance(LowRankLinear(8, 8, 4).fold(), nn.Linear)


def test_what_cannot_be_is_refused():
    with pytest.raises(ConfigError, match="rank is 5; expected an integer from 1 to 4, the full rank of a 9 × 4"):
        LowRankLinear(4, 9, 5)
    with pytest.raises(ConfigError, match="rank is 0"):
        LowRankConv2d(4, 9, 3, 0)
    with pytest.raises(ConfigError, match="split is 'rows'; expected one of 'spatial', 'channel'"):
        LowRankConv2d(4, 9, 3, 2, split="rows")
    with pytest.raises(ConfigError, match="has 2 groups of 2 channels; expected one group"):
        LowRankConv2d.from_dense(nn.Conv2d(4, 8, 3, groups=2), 2)
    with pytest.raises(
        ConfigError, match=r"init is 'spectral_gnorm' for the activation 'relu'.*expected split='channel'"
    ):
        LowRankConv2d.from_dense(nn.Conv2d(4, 8, 3), 2, "spectral_gnorm", activation="relu")
    assert LowRankConv2d.from_dense(nn.Conv2d(4, 8, 3), 2, "spectral_gnorm").rank == 2  # no activation: nothing to ask


# --- the best factors for a second moment -----------------------------------------------------------------------------


def moments(dim: int) -> torch.Tensor:
    """Of inputs whose directions differ by orders of magnitude; the last one never occurs."""
    generator = torch.Generator().manual_seed(3)
    mixing = torch.randn(dim, dim, generator=generator).double() * torch.logspace(0, -3, dim).double()
    mixing[:, -1] = 0
    return mixing @ mixing.T


def lost(difference: torch.Tensor, moment: torch.Tensor) -> float:
    return float(((difference @ moment) * difference).sum())


@pytest.mark.parametrize("shape", [(5, 9), (9, 5), (6, 6)])
def test_no_factors_are_better_for_the_inputs(shape):
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(4)).double()
    moment = moments(shape[1])
    values, vectors = torch.linalg.eigh(moment)
    root = vectors * values.clamp_min(0).sqrt()
    for rank in (1, 3, 5):
        U, V = principal_factors(weight, moment, rank)
        tail = float(torch.linalg.svdvals(weight @ root)[rank:].square().sum())  # Eckart-Young behind S^½
        total = lost(weight, moment)
        assert lost(U @ V.T - weight, moment) == pytest.approx(tail, abs=1e-10 * total)
        torch.testing.assert_close(U.T @ U, V.T @ V)


def test_a_kernel_of_two_factors_is_found_again():
    """The start is spoilt; where the kernel is a product, L-BFGS comes back; else it improves on the weights' best."""
    conv = convolution(2, ((3, 3), 1, 1, 1, "zeros"))
    thin = LowRankConv2d.from_dense(conv, 3)
    U, V = thin.U.data, thin.V.data
    weight, inputs = thin.product(U, V), InputMoments(torch.arange(36.0).double() / 36, moments(36))
    generator = torch.Generator().manual_seed(5)
    start = tuple(f + 0.1 * torch.randn(f.shape, generator=generator).double() for f in (U, V))
    *found, _ = rearranged_factors(weight, start, thin.product, bias=conv.bias, inputs=inputs)
    assert lost(thin.product(*found) - weight, moments(36)) < 1e-4 * lost(thin.product(*start) - weight, moments(36))
    dense = conv.weight.detach().flatten(1)
    *best, bias = rearranged_factors(dense, (U, V), thin.product, bias=conv.bias, inputs=inputs)
    assert lost(thin.product(*best) - dense, moments(36)) < 0.9 * lost(weight - dense, moments(36))
    torch.testing.assert_close(bias + thin.product(*best) @ inputs.mean, conv.bias + dense @ inputs.mean)


@pytest.mark.parametrize("bias", [True, False])
def test_a_split_kernel_starts_from_the_function_of_whole_outputs(bias):
    """Real Gaussian images through ReLU, where rows of the split matrix are parts of outputs."""
    conv = convolution(2, ((3, 3), 1, 0, 1, "zeros"), bias=bias)
    x = torch.randn(64, 4, 12, 12, generator=torch.Generator().manual_seed(7)).double()
    error = {}
    for init in ("spectral", "function"):
        thin = LowRankConv2d.from_dense(conv, 2, init, activation="relu")
        with torch.no_grad():
            error[init] = float((thin(x).relu() - conv(x).relu()).square().sum() / conv(x).relu().square().sum())
    assert error["function"] < 0.985 * error["spectral"]
    found, energy = gaussian_risk(
        nonlinearity("relu"), conv.weight.flatten(1), thin.product(thin.U, thin.V), conv.bias, thin.bias
    )
    assert error["function"] == pytest.approx(float((found / energy).detach()), rel=0.02)  # 6400 · 7 outputs, dependent


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("kernel", [1, 3])
def test_kernels_lie_in_memory_as_dense_ones(kernel, split):
    """Views that pass for channels last crash oneDNN's backward pass on some processors; strides are what decides."""
    layer = LowRankConv2d(3, 12, kernel, 2, stride=2, padding=kernel // 2, split=split)
    for found in layer._kernels():
        assert found.stride() == torch.empty(found.shape).stride()
    pictures = torch.randn(2, 3, 8, 8, requires_grad=True)
    out = layer(pictures)
    assert out.stride() == torch.empty(out.shape).stride()
    out.square().sum().backward()
    assert pictures.grad.isfinite().all()
