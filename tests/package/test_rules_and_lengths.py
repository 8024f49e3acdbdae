"""Exponential features over every matrix of Gaussian rows: what the estimate is where it must be right.

At x = y = 0 every kernel is 1, and the estimate is the mean of the factor e^{2a‖ω‖²}(1−4a)^{d/2} over the rows alone: a
quadrature or rows of one length that did not integrate it are off there, for any number of rows.
"""

import math

import pytest
import torch

from snnk_peft import COMPONENTS, PROJECTIONS, build_feature_map
from snnk_peft.components.base_exponential import Exponential
from snnk_peft.errors import ConfigError
from snnk_peft.feature_map.describe import describe, projection_table
from snnk_peft.functional.exponential import optimal_a

DIM, ROWS, A = 8, 4096, -0.15
FIXED_LENGTHS = [("sgq", {}), ("ssr", {}), ("sorf", {}), ("rom", {}), ("rom", {"complex_unit": True})]
FIXED_LENGTHS += [("orf", {"norms": "sqrt_dim"}), ("ssf", {"norms": "sqrt_dim"}), ("sgq", {"rotate": True})]

COMPONENT_VARIANTS = {
    "gerf": [{"A": A}, {"A": A, "s": -1}, {"A": A, "kernel": "gaussian"}],
    "saderf": [{}, {"A": A}],
    "derf": [{}, {"mode": "asymmetric"}],
}
SAMPLED = [
    (name, {})
    for name in PROJECTIONS
    if COMPONENTS["posrf"].fits(PROJECTIONS[name])
    and PROJECTIONS[name].sampled_lengths
    and not PROJECTIONS[name].needs_layer
]
EXPONENTIAL = [
    (name, params)
    for name in COMPONENTS
    if issubclass(COMPONENTS[name], Exponential) and COMPONENTS[name].distribution == "gaussian"
    for params in COMPONENT_VARIANTS.get(name, [{}])
]
WITH_A = [case for case in EXPONENTIAL if COMPONENTS[case[0]].tilted]


@pytest.fixture(scope="module")
def matrices():
    def build(name, params):
        cls = PROJECTIONS[name]
        return cls(DIM, cls.nearest_size(DIM, ROWS, **params), **params).double()

    return {str(case): build(*case) for case in [*SAMPLED, *FIXED_LENGTHS, ("gaussian", {})]}


def estimate(component, projection, x, y):
    """K̂ of pairs, with the parameters that suit much longer vectors, so that a is far from 0."""
    component.prepare(projection)
    component.double()
    generator = torch.Generator().manual_seed(0)
    long = 3 * torch.randn(2, 50, DIM, generator=generator, dtype=torch.float64) / DIM**0.5
    statistics = component.statistics(long[0], long[1] * torch.linspace(0.5, 2, DIM))
    phi, psi = component.phi(x, projection, statistics), component.psi(y, projection, statistics)
    return (phi.dense() * psi.dense()).sum(-1), statistics


def row_spread(a: torch.Tensor) -> float:
    """Standard deviation of one row's factor over Gaussian rows, at x = y = 0, for one a per coordinate."""
    return math.sqrt(math.expm1(((1 - 4 * a).log() - (1 - 8 * a).log() / 2).sum().item()))


def parameters_of(component, params, statistics) -> torch.Tensor:
    """The a that a component has by its arguments or statistics, (DIM,)."""
    if not component.tilted or "A" in params:
        return torch.full((DIM,), params.get("A", 0.0), dtype=torch.float64)
    a = statistics["a"][0] if "a" in statistics else optimal_a(statistics["mean_square"][0], DIM).expand(DIM)
    assert (a < -0.01).any()  # not 0 for want of data
    return a


def test_there_is_something_to_test():
    assert len(EXPONENTIAL) > 8
    assert len(WITH_A) > 6
    assert len(SAMPLED) > 8


@pytest.mark.parametrize(("projection", "projection_params"), [*SAMPLED, *FIXED_LENGTHS])
def test_exact_at_zero_and_near_it(matrices, projection, projection_params):
    w = matrices[str((projection, projection_params))]
    zero = torch.zeros(1, DIM, dtype=torch.float64)
    generator = torch.Generator().manual_seed(1)
    x, y = torch.nn.functional.normalize(torch.randn(2, 5, DIM, generator=generator, dtype=torch.float64), dim=-1) / 10
    # Rows may depend on each other within blocks of DIM; short vectors add a little.
    blocks = ROWS / DIM
    statistical = 6 * row_spread(torch.full((DIM,), A)) / blocks**0.5
    deterministic = abs(math.exp(2 * A * DIM) * (1 - 4 * A) ** (DIM / 2) - 1)
    assert statistical < 0.7 * deterministic  # or the test could not see rows of one length
    for name, params in EXPONENTIAL:
        component = COMPONENTS[name](**params)
        at_zero, statistics = estimate(component, w, zero, zero)
        spread = row_spread(parameters_of(component, params, statistics))
        limit = 6 * spread / blocks**0.5 + 1e-9 if w.sampled_lengths else 1e-9
        assert abs(at_zero.item() - 1) < limit, (name, params)
        near, _ = estimate(component, w, x, y)
        relative = (near / component.kernel(x, y) - 1).abs().max().item()
        # ‖x + y‖ <= 0.2: posrf's standard error over blocks of rows, or a rule's error of degree 4, ‖x + y‖⁴/8.
        near_limit = 6 * math.sqrt(math.expm1(0.04) / blocks) if w.uniform else 0.2**4 / 8
        assert relative < near_limit + (limit if w.sampled_lengths else 0), (name, params)


@pytest.mark.parametrize(("projection", "projection_params"), FIXED_LENGTHS)
def test_a_is_zero_over_rules_and_rows_of_one_length(matrices, projection, projection_params):
    """Which pair is which, as the documentation says."""
    w = matrices[str((projection, projection_params))]
    x, y = torch.randn(2, 7, DIM, dtype=torch.float64) / 3
    for name, params in WITH_A:
        found, statistics = estimate(COMPONENTS[name](**params), w, x, y)
        same = COMPONENTS["trigrf" if params.get("s") == -1 else "posrf"](kernel=params.get("kernel", "softmax"))
        changed_x, changed_y = x, y
        if name == "saderf":
            changed_x, changed_y = x * statistics["balance"], y / statistics["balance"]
        if name == "derf":
            changed_x, changed_y = x @ statistics["x_map"], y @ statistics["y_map"]
        torch.testing.assert_close(found, estimate(same, w, changed_x, changed_y)[0], rtol=1e-9, atol=1e-9)


def test_a_counts_over_sampled_lengths(matrices):
    w = matrices[str(("gaussian", {}))]
    x, y = torch.randn(2, 7, DIM, dtype=torch.float64) / 3
    plain, _ = estimate(COMPONENTS["posrf"](), w, x, y)
    for name, params in WITH_A:
        if params.get("s") != -1 and "kernel" not in params:
            assert not torch.allclose(estimate(COMPONENTS[name](**params), w, x, y)[0], plain, rtol=1e-3)


def test_descriptions_say_so():
    assert "A = 0 (e^{A‖ω‖²} integrated beforehand)" in describe("oprf", "sgq", 8, 17)
    assert "A = 0" not in describe("oprf", "orf", 8, 17)
    assert "A = 0" not in describe("posrf", "sgq", 8, 17)
    marked = [line.split("`")[1] for line in projection_table().splitlines() if "(A = 0)" in line]
    assert marked == ["rom", "sgq", "sorf", "ssr"]


@pytest.mark.filterwarnings("ignore::snnk_peft.errors.NumericalWarning")  # few rows
def test_urf_with_a_bound_needs_sampled_lengths():
    for name, params in (("sorf", {}), ("orf", {"norms": "sqrt_dim"})):
        with pytest.raises(ConfigError, match=r"urf bound is 0.1 over rows of one length"):
            build_feature_map("urf", name, 8, 16, component_params={"bound": 0.1}, projection_params=params)
        build_feature_map("urf", name, 8, 16, projection_params=params)


@pytest.mark.filterwarnings("ignore:urf features with")  # few rows
def test_urf_features_have_a_scale():
    """e^{τ²s²‖x‖²/2} and e^{g·w/s} of long vectors overflow; the scale carries them."""
    feature_map = build_feature_map("urf", "gaussian", 4, 64, seed=1)
    x = torch.randn(5, 4) / 2
    with pytest.warns(match="predicted variance"):
        long = feature_map.phi(40 * x)
    assert long.values.isfinite().all()
    assert long.values.abs().max() <= 40 * x.abs().max()
    assert feature_map.psi(40 * x).values.isfinite().all()  # whose waves are far smaller than their affine part
    assert feature_map.phi(x.half()).values.isfinite().all()
    features = feature_map.double().phi(x.double())
    assert features.log_scale.shape == (5, 1)
    torch.testing.assert_close(features.dense()[:, :5], torch.cat((torch.ones(5, 1), x), 1).double())
    keys = feature_map.psi(x.double())
    assert keys.log_scale.shape == (5, 1)
    affine = torch.cat((torch.full((5, 1), feature_map.component.fit.constant), feature_map.component.fit.slope * x), 1)
    torch.testing.assert_close(keys.dense()[:, :5], affine.double())
