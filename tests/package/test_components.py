"""Component functions against the formulas of their papers: variances, data-dependent parameters, fits and series.

Unbiasedness, gradients and the like are in test_conformance.py, for all members.
"""

from __future__ import annotations

import math
import warnings

import pytest
import torch

from snnk_peft import COMPONENTS, build_feature_map
from snnk_peft.components.derf import balancing_maps, second_moment
from snnk_peft.components.elu import gaussian_product_mean
from snnk_peft.components.taylor import series_coefficients
from snnk_peft.errors import ConfigError, NumericalError, NumericalWarning
from snnk_peft.feature_map.describe import component_table, describe, main, projection_table
from snnk_peft.functional.activation_kernels import arccos_kernel, gelu_kernel
from snnk_peft.functional.exponential import optimal_a
from snnk_peft.functional.trigonometric_fit import ACTIVATIONS, fit_trigonometric
from snnk_peft.layers.feature_stage import FeatureStage
from snnk_peft.projections import base as package
from tests.sampling import vectors
from tests.trigonometric_atom import atom_phi, atom_psi

F64 = torch.float64


def products(name: str, x: torch.Tensor, y: torch.Tensor, m: int, projection: str = "gaussian", stats=None, **params):
    """The m terms of phi(x)·psi(y), each times m: (pairs, m)."""
    fm = build_feature_map(name, projection, x.shape[-1], m, component_params=params).double()
    terms = fm.phi(x, stats).dense() * fm.psi(y, stats).dense() * m
    return terms.unflatten(-1, (-1, m)).sum(-2) if terms.shape[-1] > m else terms


def log_second_moment(a: torch.Tensor | float, square: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """log E[f(x)² f(y)²] for scalar a, softmax kernel; `square` is ‖x + y‖² (...)."""
    a, d = torch.as_tensor(a, dtype=square.dtype), x.shape[-1]
    exponent = 2 * (1 - 4 * a) * square / (1 - 8 * a) - x.square().sum(-1) - y.square().sum(-1)
    return d * (1 - 4 * a).log() - d / 2 * (1 - 8 * a).log() + exponent


# --- variances ------------------------------------------------------------------------------------------------------


def test_posrf_variance():
    """Var of one row is e^{2‖x+y‖² − ‖x‖² − ‖y‖²} − e^{2x·y}."""
    x, y = vectors(6, 4, length=0.5), vectors(6, 4, length=0.4)
    terms = products("posrf", x, y, 400_000)
    expected = (2 * (x + y).square().sum(-1) - x.square().sum(-1) - y.square().sum(-1)).exp()
    expected = expected - (2 * (x * y).sum(-1)).exp()
    torch.testing.assert_close(terms.var(-1), expected, rtol=0.05, atol=0)


@pytest.mark.parametrize("a", [-0.3, -0.1, -0.03])
def test_gerf_second_moment(a):
    """E f² for any A < 1/8."""
    x, y = vectors(5, 4, length=0.6), vectors(5, 4, length=0.6)
    terms = products("gerf", x, y, 400_000, A=a)
    expected = log_second_moment(a, (x + y).square().sum(-1), x, y).exp()
    torch.testing.assert_close(terms.square().mean(-1), expected, rtol=0.06, atol=0)


def test_oprf_has_the_best_parameter():
    """A <= 0, A -> 0 as S -> 0, a minimum of the second moment, and less variance than posrf."""
    square = torch.tensor([0.0, 1e-8, 0.1, 1.0, 8.0, 200.0], dtype=F64)
    a = optimal_a(square, 8)
    assert (a <= 0).all()
    assert a[0] == 0
    assert abs(a[1]) < 1e-8
    assert (a.diff() < 0).all()
    zero = torch.zeros(8, dtype=F64)
    for s, best in zip(square[2:], a[2:], strict=True):
        moments = [log_second_moment(float(best + shift), s, zero, zero) for shift in (-1e-3, 0.0, 1e-3)]
        assert moments[1] < min(moments[0], moments[2])
    x, y = vectors(1, 200, 8, length=1.2), vectors(1, 200, 8, length=1.2)
    component = COMPONENTS["oprf"]()
    statistics = component.statistics(x, y)
    expected = (x.unsqueeze(2) + y.unsqueeze(1)).square().sum(-1).mean()
    torch.testing.assert_close(statistics["mean_square"], expected.reshape(1, 1, 1))
    better = products("oprf", x[0], y[0], 20_000, stats={k: v[0] for k, v in statistics.items()}).var(-1).mean()
    assert better < 0.8 * products("posrf", x[0], y[0], 20_000).var(-1).mean()


def test_hyprf_beats_posrf_with_twice_the_rows():
    x, y = vectors(6, 6, length=1.0), vectors(6, 6, length=1.0)
    assert products("hyprf", x, y, 200_000).var(-1).sum() < products("posrf", x, y, 200_000).var(-1).sum() / 2


# --- parameters from the data ---------------------------------------------------------------------------------------


def data(batch: int = 3, dim: int = 6) -> tuple[torch.Tensor, torch.Tensor]:
    scale = torch.linspace(0.2, 2.0, dim, dtype=F64)
    x = torch.randn(batch, 12, dim, dtype=F64) * scale * 0.4
    return x, torch.randn(batch, 15, dim, dtype=F64) * scale.flip(0) * 0.4 + 0.2


ADAPTING = [("oprf", {}), ("saderf", {}), ("derf", {}), ("derf", {"mode": "asymmetric"})]
adapting = pytest.mark.parametrize(("name", "params"), ADAPTING, ids=lambda v: v if isinstance(v, str) else str(v))


def test_every_adapting_component_is_here():
    assert {name for name, _ in ADAPTING} == {n for n in COMPONENTS if COMPONENTS[n].adapts}


@adapting
def test_adapting_components_are_unbiased_and_better(name, params):
    x, y = data(1)
    fm = build_feature_map(name, "gaussian", 6, 100_000, component_params=params).double()
    statistics = fm.component.statistics(x, y)
    estimate = fm.phi(x, statistics).dense() @ fm.psi(y, statistics).dense().mT
    exact = fm.kernel(x.unsqueeze(2), y.unsqueeze(1))
    plain = build_feature_map("posrf", "gaussian", 6, 100_000).double()
    error = (estimate - exact).square().mean().sqrt()
    other = (plain.phi(x).dense() @ plain.psi(y).dense().mT - exact).square().mean().sqrt()
    assert error < 0.02 * exact.square().mean().sqrt()
    assert error < other


@adapting
def test_statistics_belong_to_one_example(name, params):
    """An example's features do not depend on its batch-mates, nor on masked tokens."""
    x, y = data()
    fm = build_feature_map(name, "orf", 6, 16, component_params=params).double()
    statistics = fm.component.statistics(x, y)
    alone = fm.component.statistics(x[:1], y[:1])
    for tower, v in ((fm.phi, x), (fm.psi, y)):
        torch.testing.assert_close(tower(v, statistics).dense()[:1], tower(v[:1], alone).dense(), rtol=1e-9, atol=1e-12)
    x_mask, y_mask = torch.ones(3, 12, dtype=torch.bool), torch.ones(3, 15, dtype=torch.bool)
    x_mask[:, 9:], y_mask[:, 7:] = False, False
    masked, cut = fm.component.statistics(x, y, x_mask, y_mask), fm.component.statistics(x[:, :9], y[:, :7])
    for key, value in masked.items():
        torch.testing.assert_close(value, cut[key], rtol=1e-9, atol=1e-12)


@adapting
def test_buffers_stand_for_statistics_that_are_not_given(name, params):
    """What a file of 0.1.0 holds there: `posrf`, or what somebody stored."""
    x, y = data(1)
    fm = build_feature_map(name, "orf", 6, 16, component_params=params).double()
    statistics = {key: value[0] for key, value in fm.component.statistics(x, y).items()}
    before = fm.phi(x[0]).dense()
    posrf = build_feature_map("posrf", "orf", 6, 16).double()
    torch.testing.assert_close(before, posrf.phi(x[0]).dense())
    for key, value in statistics.items():
        buffer = getattr(fm.component, key)
        buffer.copy_(value.reshape(buffer.shape))
    torch.testing.assert_close(fm.phi(x[0]).dense(), fm.phi(x[0], statistics).dense(), rtol=1e-5, atol=1e-7)
    assert not torch.allclose(fm.phi(x[0]).dense(), before)
    other = build_feature_map(name, "orf", 6, 16, component_params=params).double()
    other.load_state_dict(fm.state_dict())
    torch.testing.assert_close(other.psi(y[0]).dense(), fm.psi(y[0]).dense(), rtol=1e-13, atol=1e-13)


def test_saderf_with_identity_balance_is_gerf():
    """Any Ψ > 0 leaves the mean of gerf, Ψ = I gerf itself; and the guard for coordinates that are zero throughout."""
    x, y = data(1)
    saderf = build_feature_map("saderf", "orf", 6, 32, component_params={"A": -0.05}).double()
    gerf = build_feature_map("gerf", "orf", 6, 32, component_params={"A": -0.05}).double()
    torch.testing.assert_close(saderf.phi(x).dense(), gerf.phi(x).dense())
    torch.testing.assert_close(saderf.psi(y).dense(), gerf.psi(y).dense())
    balanced = saderf.component.statistics(x, y)["balance"]
    expected = (y.square().mean(1) / x.square().mean(1)).pow(0.25)
    torch.testing.assert_close(balanced[:, 0], expected)
    x[..., 2] = 0
    assert saderf.component.statistics(x, y)["balance"][0, 0, 2] == 1


def test_balancing_minimises_the_lengths():
    x, y = data(1)
    T, inverse = balancing_maps(second_moment(x), second_moment(y))
    torch.testing.assert_close(T @ inverse, torch.eye(6, dtype=F64).expand_as(T), rtol=0, atol=1e-9)

    def lengths(t: torch.Tensor) -> torch.Tensor:
        return (x @ t).square().sum(-1).mean() + (y @ torch.linalg.inv(t).mT).square().sum(-1).mean()

    best = lengths(T)
    assert best < lengths(torch.eye(6, dtype=F64))
    for _ in range(20):
        step = torch.eye(6, dtype=F64) + 0.02 * torch.randn(6, 6, dtype=F64)
        assert lengths(T @ step) > best - 2e-3 * best  # the floor on empty directions costs a little


# --- numerics -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["posrf", "hyprf", "gerf", "oprf", "saderf", "derf", "hrf", "trigrf"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_long_vectors_overflow_nothing(name, dtype):
    """Values stay finite where e^{‖x‖²/2} would not, also under autocast."""
    fm = build_feature_map(name, "orf", 64, 64)
    x = (vectors(8, 64, length=30.0)).to(dtype)
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.float32):
        features = fm.phi(x)
    assert features.values.dtype == dtype
    assert features.values.isfinite().all()
    assert features.log_scale.isfinite().all()
    assert features.log_scale.dtype == torch.float32


def test_autocast_does_not_lower_exponents():
    fm = build_feature_map("posrf", "orf", 32, 64)
    x = vectors(8, 32, length=4.0).float()
    exact = fm.phi(x).dense()
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(fm.phi(x).dense(), exact)


def test_polar_quadrature_knows_the_closed_forms():
    x, y = torch.randn(6, 5, dtype=F64), torch.randn(6, 5, dtype=F64)
    y[1], y[2] = x[1], -x[2]
    torch.testing.assert_close(gaussian_product_mean(torch.relu, x, y), arccos_kernel(x, y) / 2, rtol=1e-9, atol=1e-9)
    gelu = gaussian_product_mean(torch.nn.functional.gelu, x, y)
    torch.testing.assert_close(gelu, gelu_kernel(x, y), rtol=1e-7, atol=1e-8)


# --- universal random features --------------------------------------------------------------------------------------

URF_ERRORS = {"silu": 2e-4, "gelu": 8e-4, "tanh": 8e-3, "relu": 0.13}


@pytest.mark.parametrize(("name", "bound"), URF_ERRORS.items())
def test_fit_reaches_the_stated_error(name, bound):
    fit = fit_trigonometric(ACTIVATIONS[name], 6.0, 8, reach=1.0)
    assert fit.sup_error < bound
    z = torch.linspace(-6, 6, 501, dtype=F64)
    assert (fit(z) - ACTIVATIONS[name](z)).abs().max() <= fit.sup_error + 1e-9
    # more atoms, less error; and the coefficients do not cancel each other
    assert fit_trigonometric(ACTIVATIONS[name], 6.0, 16).sup_error < fit.sup_error
    assert fit.amplitudes().max() < 3


def softsign(z: torch.Tensor) -> torch.Tensor:
    return z / (1 + z.abs())


@pytest.mark.parametrize("activation", ["gelu", "tanh", "silu", softsign], ids=["gelu", "tanh", "silu", "callable"])
@pytest.mark.parametrize("sampling", ["stratified", "iid", "block"])
def test_urf_reproduces_the_activation(activation, sampling):
    """At small norms: within five predicted standard errors of f(w·x + b), which bound the measured spread."""
    x, w, b = vectors(12, 10, length=0.8), vectors(12, 10, length=0.9), 0.3 * torch.randn(12, dtype=F64)
    params = {"activation": activation, "radius": 4.0, "atoms": 6, "sampling": sampling}
    estimates = []
    for seed in range(60):
        fm = build_feature_map("urf", "gaussian", 10, 2000, seed=seed, component_params=params).double()
        estimates.append((fm.phi(x).dense() * fm.psi(w, {"bias": b}).dense()).sum(-1))
    function = fm.component.activation
    exact = function((x * w).sum(-1) + b)
    predicted = math.exp(fm.component.predicted_log_variance(0.8, 0.9) / 2)
    stacked = torch.stack(estimates)
    assert (stacked.std(0) < 1.3 * predicted).all()
    error = (stacked.mean(0) - exact).abs()
    assert (error < 5 * predicted / 60**0.5 + fm.component.fit.sup_error).all()
    assert predicted < 0.5


def test_urf_atom_second_moment():
    """A single cosine with A = 0, against its formula (SNNK paper, section 3.1)."""
    fm = build_feature_map(
        "urf", "gaussian", 4, 200_000, component_params={"activation": "cos", "radius": 2.0, "atoms": 1}
    ).double()
    tau = float(fm.component.fit.frequencies[0])
    x, w = vectors(4, length=0.3), vectors(4, length=0.3)
    phi, psi = fm.phi(x).dense()[5:], fm.psi(w).dense()[5:]
    per_row = (phi * psi).unflatten(0, (2, -1)).sum(0) * 200_000
    s = float(fm.component.scale[0])
    a, c = float(fm.component.cosines[0]), float(fm.component.sines[0])
    # E of (a cos θ + c sin θ)² e^{2 g·w/s}, θ = τ s g·x: half the sum of squares, and a term that oscillates.
    bound = (a * a + c * c) * math.exp(tau**2 * s**2 * 0.09 + 0.09 / s**2)
    second = per_row.square().mean().item()
    g_mean = 2 * tau * float((x * w).sum())
    oscillating = math.exp(2 * 0.09 / s**2 - 2 * (tau * s) ** 2 * 0.09 + tau**2 * s**2 * 0.09 - 0.09 / s**2)
    exact = 0.5 * bound + 0.5 * oscillating * (
        (a * a - c * c) * math.cos(2 * g_mean) + 2 * a * c * math.sin(2 * g_mean)
    )
    assert second == pytest.approx(exact, rel=0.03)
    assert second <= bound


def test_urf_warns_at_bert_scale():
    with pytest.warns(NumericalWarning, match="the estimate is noise"):
        build_feature_map("urf", "orf", 32, 64, component_params={"x_norm": 20.0, "w_norm": 1.2})
    fm = build_feature_map("urf", "orf", 32, 256, component_params={"x_norm": 0.5, "w_norm": 0.5})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fm.phi(vectors(3, 32, length=0.5).float())
    fresh = build_feature_map("urf", "orf", 32, 256, component_params={"x_norm": 0.5, "w_norm": 0.5})
    with pytest.warns(NumericalWarning, match="input of length 20"):
        fresh.phi(vectors(3, 32, length=20.0).float())


@pytest.mark.parametrize("bound", [0.0, 0.1])
def test_urf_is_its_atoms(bound):
    """The features are those of trigonometric_atom.py, atom by atom."""
    params = {"atoms": 3, "bound": bound, "x_norm": 0.7, "w_norm": 1.1}
    fm = build_feature_map("urf", "gaussian", 5, 24, component_params=params).double()
    x, w, b = vectors(4, 5, length=0.7), vectors(4, 5, length=1.1), torch.randn(4, dtype=F64)
    ours = (fm.phi(x).dense() * fm.psi(w, {"bias": b}).dense())[:, 6:].sum(-1)
    f, g, total = fm.component, fm.projection.materialize(), torch.zeros(4, dtype=F64)
    for k, tau in enumerate(f.fit.frequencies.tolist()):
        rows = (f.tau - tau).abs() < 1e-6
        args = (float(tau), float(f.scale[rows][0]))
        phi = atom_phi(x, g[rows], *args, bound)
        psi = atom_psi(w, b, g[rows], *args, float(f.fit.cosines[k]), float(f.fit.sines[k]), bound)
        total = total + (phi * psi).sum(-1).mean(-1)
    torch.testing.assert_close(ours, total, rtol=1e-5, atol=1e-7)


def test_urf_affine_part_is_exact():
    fm = build_feature_map("urf", "orf", 5, 64, component_params={"activation": lambda z: 2 * z + 1}).double()
    x, w = torch.randn(3, 5, dtype=F64), torch.randn(3, 5, dtype=F64)
    estimate = (fm.phi(x).dense() * fm.psi(w).dense()).sum(-1)
    torch.testing.assert_close(estimate, 2 * (x * w).sum(-1) + 1, rtol=1e-6, atol=1e-6)


def test_urf_errors():
    with pytest.raises(ConfigError, match="unequal feature weights"):
        build_feature_map("urf", "sgq", 8, 17)
    with pytest.raises(ConfigError, match="phases would not cancel"):
        build_feature_map("cos", "sgq", 8, 17)
    build_feature_map("cos", "sgq", 8, 17, component_params={"phases": False})
    with pytest.raises(ConfigError, match="8 atoms but the projection only 4 rows"):
        build_feature_map("urf", "orf", 4, 4)
    with pytest.raises(ConfigError) as caught:
        COMPONENTS["urf"](sampling="all", block_size=0, x_norm=-1)
    assert len(caught.value.faults) == 3
    with pytest.raises(ConfigError, match="activation is 'gleu'"):
        COMPONENTS["urf"](activation="gleu")
    with pytest.raises(ConfigError, match="not finite"):
        COMPONENTS["urf"](activation=torch.log)


# --- power series ---------------------------------------------------------------------------------------------------


def test_series_are_those_of_the_functions():
    z = 0.3
    for name, function in (("exp", math.exp), ("sin", math.sin), ("cos", math.cos), ("tanh", math.tanh)):
        assert sum(a * z**n for n, a in enumerate(series_coefficients(name, 20))) == pytest.approx(
            function(z), abs=1e-14
        )
    assert sum(a * z**n for n, a in enumerate(series_coefficients("inverse", 40))) == pytest.approx(1 / 0.7)


@pytest.mark.parametrize(("series", "degree"), [("exp", 5), ("sin", 5), ("tanh", 5), ([0.5, -1.0, 0.0, 2.0], None)])
def test_taylor_mean_is_the_truncated_series(series, degree):
    """A power series with negative coefficients and a missing degree."""
    x, y = vectors(4, 5, length=0.9), vectors(4, 5, length=0.9)
    fm = build_feature_map(
        "taylor", "rademacher", 5, 300_000, component_params={"series": series, "degree": degree}
    ).double()
    phi, psi = fm.phi(x).dense(), fm.psi(y).dense()
    exact = sum(a * (x * y).sum(-1) ** n for n, a in enumerate(fm.component.coefficients))
    torch.testing.assert_close(fm.kernel(x, y), exact)
    # features of one degree are independent and alike; their mean has a known standard error
    counts = [c for c in fm.component._features_per_degree(300_000) if c]
    variance = torch.zeros(4, dtype=F64)
    start = 1
    for count in counts:
        group = (phi * psi)[:, start : start + count] * count
        variance, start = variance + group.var(-1) / count, start + count
    assert start == fm.feature_dim
    assert ((phi * psi).sum(-1) - exact).abs().max() < 5 * variance.max().sqrt()
    assert variance.max() < 1e-3


def test_taylor_limits():
    with pytest.raises(ConfigError, match="at least 10 rows"):
        build_feature_map("taylor", "rademacher", 4, 9)
    with pytest.raises(ConfigError, match=r"converges for \|x·y\| < 1.571"):
        COMPONENTS["taylor"]("tanh").kernel(torch.ones(4), torch.ones(4))
    fm = build_feature_map("taylor", "rademacher", 4, 16, component_params={"series": "tanh"})
    with pytest.warns(NumericalWarning, match="lengths below 1.25"):
        fm(torch.ones(2, 4))
    for series, degree in (("tang", None), ([], None), ([1.0], 3), ("exp", -1), ([float("nan")], None)):
        with pytest.raises(ConfigError, match="taylor"):
            COMPONENTS["taylor"](series, degree)


# --- parameters and pages -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "params", "message"),
    [
        ("gerf", {"A": 0.125}, "< 0.125"),
        ("gerf", {"s": 2}, "expected 1 or -1"),
        ("saderf", {"A": 0.2}, "< 0.125"),
        ("posrf", {"kernel": "sofmax"}, "expected 'softmax' or 'gaussian'. Did you mean 'softmax'"),
        ("trigrf", {"form": "sin"}, "'cos_sin' or 'phase'"),
        ("trigrf", {"kernel": "matern"}, "matern12"),
        ("derf", {"mode": "both"}, "'symmetric' or 'asymmetric'"),
        ("hrf", {"mode": "x", "directions": 0}, "'angular' or 'learned'"),
    ],
)
def test_bad_parameters(name, params, message):
    with pytest.raises(ConfigError, match=message):
        COMPONENTS[name](**params)


def test_describe_prints_what_the_pair_is(capsys):
    assert main(["describe", "posrf", "mm", "--dim", "32", "--num-features", "128"]) == 0
    page = capsys.readouterr().out
    for text in ("posrf over mm: dim 32, 128 rows, 128 features", "exp(ω·x − ‖x‖²/2)", "e^{x·y}", "variance", "4,096"):
        assert text in page
    assert main(["describe", "posrf", "poisson"]) == 2
    assert "valid projections" in capsys.readouterr().err
    assert main(["describe", "posrf", "sgq", "--dim", "8"]) == 2
    assert "2·dim + 1 = 17" in capsys.readouterr().err
    first, second = (float(describe("trigrf", "orf", 16, m).split("relative error ")[1].split()[0]) for m in (32, 512))
    assert 2.5 < first / second < 6


def test_tables_list_everybody(capsys):
    assert main(["table"]) == 0
    page = capsys.readouterr().out
    assert component_table() in page
    assert projection_table() in page
    for registry in (COMPONENTS, __import__("snnk_peft").PROJECTIONS):
        for name in registry:
            assert f"| `{name}` |" in page
            member = registry[name]
            assert member.formula
            assert member.source
            assert member.cost
            assert getattr(member, "kernel_formula", "-")


def test_debug_mode_names_the_tensor(monkeypatch):
    """SNNK_DEBUG=1 looks at every input; without it nothing is looked at, because that costs time."""
    fm = build_feature_map("posrf", "orf", 4, 8, site="layer.3.ffn")
    stage = FeatureStage(build_feature_map("relu", "orf", 4, 8), normalize=True)
    x = torch.ones(2, 3, 4)
    x[1, 2, 0] = float("inf")
    fm.phi(x)
    monkeypatch.setattr(package, "DEBUG", True)
    for call in (fm.phi, fm.psi, stage):
        with pytest.raises(
            NumericalError, match=r"shape \(2, 3, 4\).*1 entries are not finite, the first at \(1, 2, 0\)"
        ):
            call(x)
    with pytest.raises(NumericalError, match="input of psi at site 'layer\\.3\\.ffn'"):
        fm.psi(x)
    fm.phi(x[0])
