"""Every component over every projection: what all feature maps promise, and the numeric oracles of the present members.

The cases come from the registries, so a new file in components/ or projections/ is tested without a change here.
"""

from __future__ import annotations

import copy
import functools
import importlib
import math
import pkgutil
import random
import re
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

import snnk_peft.components
import snnk_peft.parts
import snnk_peft.projections
from snnk_peft import COMPONENTS, FAMILIES, PROJECTIONS, build_feature_map
from snnk_peft.components.base import Component, Features
from snnk_peft.errors import ConfigError
from snnk_peft.feature_map import FeatureMap
from snnk_peft.functional.random_numbers import haar
from snnk_peft.parts import PARTS
from snnk_peft.projections.base import Projection
from snnk_peft.projections.base_drawn import site_generator
from snnk_peft.registry import Registry
from tests.sampling import within_standard_errors

# Parameters worth a case of their own, beside every member's defaults.
VARIANTS: dict[str, list[dict[str, Any]]] = {
    "arccos": [{"order": 0}, {"order": 2}],
    "cos": [{"phases": False}],
    "posrf": [{"kernel": "gaussian"}],
    "hyprf": [{"kernel": "gaussian"}],
    "gerf": [{"s": -1}, {"A": -0.2, "kernel": "gaussian"}],
    "oprf": [{"kernel": "gaussian"}],
    "saderf": [{"A": -0.1, "kernel": "gaussian"}],
    "derf": [{"mode": "asymmetric", "kernel": "gaussian"}],
    "hrf": [{"mode": "learned"}, {"directions": 1, "kernel": "gaussian"}],
    "poisrf": [{"kernel": "gaussian"}],
    "geomrf": [{"kernel": "gaussian"}],
    "trigrf": [
        {"form": "phase"},
        {"form": "phase", "kernel": "gaussian"},
        *({"kernel": kernel} for kernel in ("gaussian", "laplace", "matern32", "matern52", "cauchy")),
    ],
    "urf": [{"activation": "tanh", "sampling": "iid"}, {"activation": "silu", "sampling": "block", "block_size": 3}],
    "taylor": [{"series": "tanh", "degree": 3}, {"series": [0.5, -1.0, 0.0, 2.0]}, {"series": "inverse", "degree": 2}],
    "gmmrf": [{"kernel": "gaussian"}],
    "polysketch": [{"degree": 2}],
    "gmm": [{"components": 1, "covariance": "full"}],
    "fastfood_learned": [{"learn": "S"}],
    "poisson": [{"rate": 0.3}],
    "geometric": [{"p": 0.7}],
    "orf": [{"norms": "sqrt_dim"}, {"norms": "chi_pairs"}],
    "free": [{"bias": True}],
    "sorf": [{"fast": True}],
    "rom": [{"complex_unit": True, "fast": True}, {"factors": 2}],
    "fastfood": [{"fast": True}],
    "scrf": [{"fast": True}],
    "dct": [{"fast": True}, {"rounds": 1}],
    "pmodel": [{"structure": "toeplitz", "fast": True}, {"structure": "hankel"}],
    "simrf": [{"coupling": "weight_dependent"}],
    "qmc": [{"sequence": "halton"}, {"scramble": False}],
    "mm": [{"sequence": "halton", "covariance": False}],
    "sgq": [{"rotate": True}],
    "ssf": [{"norms": "sqrt_dim", "rotate": False}],
}


# A variant of a component is tested over these projections, one of a projection under these components.
USUAL = ("gaussian", "orf", "poisson", "geometric", "rademacher", "relu", "posrf", "poisrf", "geomrf", "taylor")


def variants(registry: Registry) -> list[Any]:
    return [
        pytest.param(name, params, id="-".join([name, *map(str, params.values())]))
        for name in registry.names()
        for params in [{}, *VARIANTS.get(name, [])]
    ]


ALL_COMPONENTS, ALL_PROJECTIONS = variants(COMPONENTS), variants(PROJECTIONS)
projection_cases = pytest.mark.parametrize(("projection", "projection_params"), ALL_PROJECTIONS)


def components_over(projection: str, projection_params: dict[str, Any]) -> list[Any]:
    """Every component that fits; of variants, one at a time."""
    return [
        case
        for case in ALL_COMPONENTS
        if fits(case.values[0], projection)
        and (not case.values[1] or (projection in USUAL and not projection_params))
        and (not projection_params or (case.values[0] in USUAL and not case.values[1]))
    ]


class Pair(NamedTuple):
    """A component over a projection, both with their parameters."""

    component: str
    component_params: dict[str, Any]
    projection: str
    projection_params: dict[str, Any]

    def build(self, dim: int = 6, num_features: int = 9, seed: int = 0, site: str = "") -> FeatureMap:
        """A feature map of about the wanted size."""
        num_features = max(num_features, COMPONENTS[self.component](**self.component_params).fewest_rows())
        if self.component == "urf":  # equal feature weights: as many rows for each half of a Gaussian mixture
            num_features = -(-num_features // 4) * 4
        num_features = PROJECTIONS[self.projection].nearest_size(dim, num_features, **self.projection_params)
        layer = source(self.projection, dim, num_features)
        return self.sized(dim, num_features, seed, site, **layer)

    def sized(self, dim: int, num_features: int, seed: int, site: str, **layer: torch.Tensor) -> FeatureMap:
        return build_feature_map(
            self.component,
            self.projection,
            dim,
            num_features,
            seed=seed,
            site=site,
            component_params=self.component_params,
            projection_params={**self.projection_params, **layer},
        )


PARTNERS = 3  # that each component and each projection is tested with by `make test`; `make test-all` takes all


def pair_cases(
    projections: list[Any], usual_only: bool = False, estimating: bool = False, complete: bool = False
) -> Any:
    """Every component (that has a kernel) over every one of the projections that fits.

    All components of a projection follow each other, so that they can share its draws. Unless `complete`, those beside
    a covering sample are marked `product`.
    """
    pairs = [
        (first, second)
        for second in projections
        for first in components_over(*second.values)
        if (not estimating or COMPONENTS[first.values[0]].has_kernel()) and (not usual_only or first.values[0] in USUAL)
    ]
    names = [f"{first.id}-{second.id}" for first, second in pairs]
    sample = set(names) if complete else covering(pairs)
    return pytest.mark.parametrize(
        "pair",
        [
            pytest.param(
                Pair(*first.values, *second.values), id=name, marks=() if name in sample else pytest.mark.product
            )
            for name, (first, second) in zip(names, pairs, strict=True)
        ],
    )


def covering(pairs: list[Any]) -> set[str]:
    """Ids of pairs in which every member has `PARTNERS` partners, or as many as there are."""
    shuffled, found, sample = list(pairs), Counter(), set()
    random.Random(0).shuffle(shuffled)
    for first, second in shuffled:
        if min(found[first.id], found["over", second.id]) < PARTNERS:
            sample.add(f"{first.id}-{second.id}")
            found.update([first.id, ("over", second.id)])
    return sample


def fits(component: str, projection: str) -> bool:
    """Whether a component can be built over a projection."""
    if component in ("urf", "cos") and not PROJECTIONS[projection].uniform:
        return False
    return COMPONENTS[component].fits(PROJECTIONS[projection])


def source(projection: str, dim: int, num_features: int) -> dict[str, torch.Tensor]:
    """A random pretrained layer for a projection that takes rows from one."""
    if not PROJECTIONS[projection].needs_layer:
        return {}
    generator = torch.Generator().manual_seed(7)
    return {
        "source_weight": torch.randn(num_features + 3, dim, generator=generator),
        "source_bias": torch.randn(num_features + 3, generator=generator),
    }


def matrix(projection: str, dim: int, num_features: int, params: dict[str, Any] | None = None, **kwargs) -> Projection:
    """The weight matrix alone, of about the wanted size."""
    cls, params = PROJECTIONS[projection], params or {}
    size = cls.nearest_size(dim, num_features, **params)
    return cls(dim, size, **source(projection, dim, size), **params, **kwargs)


def test_there_is_something_to_test():
    assert len(ALL_COMPONENTS) >= len(COMPONENTS) > 0
    assert len(ALL_PROJECTIONS) >= len(PROJECTIONS) > len(UNBIASED) > 0
    assert set(VARIANTS) <= {*COMPONENTS.names(), *PROJECTIONS.names()}


# --- what every pair promises ---------------------------------------------------------------------------------------


# Nine rows are too few for some estimates, and some vectors are too long: that it says so is tested elsewhere.
@pytest.mark.filterwarnings("ignore::snnk_peft.errors.NumericalWarning")
@pair_cases(ALL_PROJECTIONS)
class TestEveryPair:
    def test_shapes_are_the_same_for_any_number_of_leading_dimensions(self, pair):
        phi = pair.build()
        x = torch.randn(4, 3, 6) / 4
        given = x.clone()
        assert phi.dim == 6
        out = phi(x)
        assert out.shape == (4, 3, phi.feature_dim)
        torch.testing.assert_close(phi(x[1]), out[1])
        torch.testing.assert_close(phi(x[1, 2]), out[1, 2])
        assert phi(x[:0]).shape == (0, 3, phi.feature_dim)
        for features in (phi.phi(x), phi.psi(x)):
            assert isinstance(features, Features)
            assert features.dense().shape == out.shape
        assert torch.equal(x, given)  # work in place, but not on what was given
        if phi.component.has_kernel():
            assert phi.kernel(x[:, None], x[:, :, None]).shape == (4, 3, 3)
        else:
            with pytest.raises(TypeError, match="no exact kernel"):
                phi.kernel(x, x)

    def test_outputs_do_not_depend_on_the_rest_of_the_batch(self, pair):
        phi = pair.build().double()
        x = torch.randn(5, 6, dtype=torch.float64)
        x[3:] *= 1e3
        torch.testing.assert_close(phi(x)[0], phi(x[:1])[0], rtol=1e-12, atol=1e-12)

    @pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
    def test_moves_between_dtypes(self, pair, dtype):
        phi = pair.build()
        x = torch.randn(4, 6) / 2
        moved = copy.deepcopy(phi).to(dtype)
        out = moved(x.to(dtype))
        assert out.dtype == dtype
        if pair.component_params != {"order": 0}:  # a step is not continuous
            exact = phi(x)
            torch.testing.assert_close(out.float(), exact, rtol=0.05, atol=0.05 * max(1, exact.abs().max().item()))
        # fp32 matrices serve inputs of any dtype, as adapters beside a half-precision model need it
        assert phi(x.to(dtype)).dtype == dtype

    def test_moves_to_another_device(self, pair):
        phi = pair.build().to("meta")
        assert phi(torch.empty(2, 6, device="meta")).shape == (2, phi.feature_dim)

    def test_global_random_states_are_untouched(self, pair):
        before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
        phi = pair.build()
        phi.train()(torch.ones(2, 6))
        phi.eval()(torch.ones(2, 6))
        assert torch.equal(torch.get_rng_state(), before[0])
        assert (random.getstate(), np.random.get_state()[1].tolist()) == before[1:]

    def test_state_dict_and_copies_are_bitwise(self, pair):
        phi = pair.build(seed=1, site="a")
        # a map for another seed and, for landmarks, without the pretrained layer: everything must come from the file
        other = pair.sized(6, phi.num_features, seed=2, site="b")
        x = torch.randn(3, 6)
        copied = copy.deepcopy(phi)
        result = other.load_state_dict({key: value.clone() for key, value in phi.state_dict().items()})
        assert not result.missing_keys
        assert not result.unexpected_keys
        assert torch.equal(other(x), phi(x))
        assert torch.equal(copied(x), phi(x))
        for tensor in copied.projection.state_tensors():
            tensor.detach().zero_()
        assert torch.equal(other(x), phi(x))

    def test_gradients_are_right(self, pair):
        if pair.component_params == {"order": 0}:
            pytest.skip("a step function has no gradient")
        phi = pair.build(3, 4).double()
        assert torch.autograd.gradcheck(phi, torch.randn(2, 3, dtype=torch.float64, requires_grad=True))
        if phi.component.has_kernel():
            x, y = (torch.randn(2, 2, 3, dtype=torch.float64) / 3).requires_grad_()
            assert torch.autograd.gradcheck(phi.kernel, (x, y))


@projection_cases
def test_projection_is_its_matrix(projection, projection_params):
    w = matrix(projection, 6, 9, projection_params).double()
    x = torch.randn(2, 5, 6, dtype=torch.float64)
    expected = x @ w.materialize().T + (0 if w.bias is None else w.bias)
    torch.testing.assert_close(w(x), expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(w.squared_row_norms(), w.materialize().square().sum(1))
    assert w.feature_weights.shape == (w.num_features,)
    torch.testing.assert_close(w.feature_weights.sum(), torch.ones((), dtype=torch.float64))
    assert bool(list(w.parameters())) == w.trainable
    assert f"num_features={w.num_features}" in repr(w)


@pytest.mark.filterwarnings("ignore::snnk_peft.errors.NumericalWarning")
@projection_cases
def test_draws_follow_seed_and_slot_alone(projection, projection_params):
    """Not the global state, and not the component: under each one that fits, W is what the projection draws alone."""

    def weight(dim, num_features, **kwargs):
        return matrix(projection, dim, num_features, projection_params, **kwargs).materialize()

    torch.manual_seed(1)
    first = weight(6, 9, seed=3, site="layer.0")
    torch.manual_seed(2)
    assert torch.equal(first, weight(6, 9, seed=3, site="layer.0"))
    with_defaults = matrix(projection, 6, 9, projection_params)
    if with_defaults.seeded and not with_defaults.needs_layer:
        assert not torch.equal(first, weight(6, 9, seed=3, site="layer.1"))
        assert not torch.equal(first, weight(6, 9, seed=4, site="layer.0"))
    alone = functools.cache(lambda size: weight(6, size, seed=3, site="layer.0"))
    cases = components_over(projection, projection_params)
    assert cases
    for case in cases:
        phi = Pair(*case.values, projection, projection_params).build(seed=3, site="layer.0")
        assert torch.equal(phi.projection.materialize(), alone(phi.num_features)), case.id


@projection_cases
def test_a_checksum_replaces_the_matrix(projection, projection_params):
    cls = PROJECTIONS[projection]
    if not cls.redrawable:
        with pytest.raises(ConfigError, match="save_projection=True"):
            cls(6, 9, save=False, **projection_params)
        return
    w = matrix(projection, 6, 9, projection_params, seed=5, site="s", save=False)
    state = w.state_dict()
    assert {key: tuple(value.shape) for key, value in state.items()} == {"checksum": (32,)}
    again = matrix(projection, 6, 9, projection_params, seed=5, site="s", save=False)
    again.load_state_dict(state)
    assert torch.equal(again.materialize(), w.materialize())
    again.half().load_state_dict(state)  # a cast W has the checksum of what was drawn
    other = matrix(projection, 6, 9, projection_params, seed=6, site="s", save=False)
    kept = other.materialize().clone()
    if not other.seeded:  # the same matrix for every seed: nothing to refuse
        other.load_state_dict(state)
        return
    with pytest.raises(ConfigError, match=r"checksum of the redrawn projection of 's' \(seed 6\) differs"):
        other.load_state_dict(state)
    with pytest.raises(ConfigError, match="checksum"):
        other.checksum = state["checksum"]  # what the loader of transformers does
    assert torch.equal(other.materialize(), kept)
    for tensor in other.state_tensors():
        tensor.zero_()
    other.redraw()
    assert torch.equal(other.materialize(), kept)


# --- unbiased estimates ---------------------------------------------------------------------------------------------

UNBIASED = [case for case in ALL_PROJECTIONS if matrix(case.values[0], 4, 4, case.values[1]).unbiased]


def estimates(pair: Pair, x: torch.Tensor, y: torch.Tensor, m: int, draws: int) -> torch.Tensor:
    """phi(x)·psi(y) under `draws` independent matrices, (draws, pairs)."""
    f, params = COMPONENTS[pair.component](**pair.component_params), tuple(pair.projection_params.items())
    results = []
    assert draws % 100 == 0
    for hundred in range(draws // 100):
        for w in hundred_matrices(pair.projection, params, x.shape[-1], m, hundred):
            phi = FeatureMap(f, w).double()
            results.append((phi.phi(x).dense() * phi.psi(y).dense()).sum(-1))
    return torch.stack(results)


def exact_kernel(pair: Pair, x: torch.Tensor, y: torch.Tensor, m: int) -> torch.Tensor:
    """The mean of `estimates`, of some kernels a matter of m: (pairs,)."""
    w = matrix(pair.projection, x.shape[-1], m, pair.projection_params)
    return FeatureMap(COMPONENTS[pair.component](**pair.component_params), w).kernel(x, y)


@functools.lru_cache(maxsize=50)
def hundred_matrices(
    projection: str, projection_params: tuple[tuple[str, Any], ...], dim: int, m: int, hundred: int
) -> list[Projection]:
    """Matrices of a hundred seeds, shared by the components that follow each other; nobody changes them."""
    seeds = range(100 * hundred, 100 * hundred + 100)
    return [matrix(projection, dim, m, dict(projection_params), seed=seed).double() for seed in seeds]


def pairs(dim: int, length: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
    """Vectors of about the given length: independent, close, opposite, equal."""
    x = torch.randn(4, dim, dtype=torch.float64) * length * dim**-0.5
    other = torch.randn(4, dim, dtype=torch.float64) * length * dim**-0.5
    return x, torch.stack([other[0], x[1] + 0.3 * other[1], -x[2], x[3]])


@pytest.mark.filterwarnings("ignore::snnk_peft.errors.NumericalWarning")
@pair_cases(UNBIASED, estimating=True, complete=True)
def test_estimates_are_unbiased(pair):
    """The mean over draws is the exact kernel, within five standard errors; two whole blocks."""
    check_unbiased(pair, 8, 16)


@pytest.mark.filterwarnings("ignore::snnk_peft.errors.NumericalWarning")
@pair_cases(UNBIASED, usual_only=True, estimating=True)
def test_estimates_are_unbiased_at_odd_sizes(pair):
    """A dimension that is no power of two, and a last block that is cut off."""
    check_unbiased(pair, 6, 21)


def check_unbiased(pair, dim, m):
    # Exponentials and products of long vectors have heavy tails: only many draws know their own standard error.
    x, y = pairs(dim, length=0.7)
    draws = 1500 if pair.component_params == {"order": 2} or pair.projection == "pmodel" else 300
    within_standard_errors(estimates(pair, x, y, m, draws), exact_kernel(pair, x, y, m))


@pytest.mark.filterwarnings("ignore::snnk_peft.errors.NumericalWarning")
@pair_cases(UNBIASED, estimating=True)
def test_errors_fall_as_one_over_root_num_features(pair):
    x, y = pairs(8, length=0.7)
    squared = [(estimates(pair, x, y, m, 100) - exact_kernel(pair, x, y, m)).square().mean(1) for m in (16, 256)]
    # 16 times the features: a 16th of the squared error, within what 100 draws know of the two.
    ratio = squared[0].mean() / squared[1].mean()
    uncertainty = sum((s.std() / s.mean()).square() / len(s) for s in squared) ** 0.5
    if pair.component in ("taylor", "polysketch", "urf", "cos") or pair.projection in ("qmc", "ssf"):
        # Rows are shared out among degrees, atoms or phases, or are one design instead of independent blocks; or the
        # square of a sum is an estimate.
        assert ratio > 3
    else:
        # Coupled rows need not follow the law to the last per cent.
        assert abs((ratio / 16).log()) < max(4 * uncertainty, math.log(1.5))


def test_variance_of_cosine_and_sine_together():
    """m Var[cos·cos + sin·sin] = (1 − e^{−‖δ‖²})²/2 per row."""
    x, y = pairs(8)
    cos = estimates(Pair("cos", {"phases": False}, "gaussian", {}), x, y, 32, 1500)
    sin = estimates(Pair("sin", {}, "gaussian", {}), x, y, 32, 1500)
    delta = (x - y).square().sum(-1)
    torch.testing.assert_close((cos + sin).var(0) * 32, (1 - torch.exp(-delta)).square() / 2, rtol=0.2, atol=1e-12)
    torch.testing.assert_close(
        COMPONENTS["cos"](phases=False).kernel(x, y) + COMPONENTS["sin"]().kernel(x, y), (-delta / 2).exp()
    )


@pytest.mark.parametrize(
    ("parts", "draws"),
    [
        ([("arccos", {"order": 0})], 1500),
        ([("arccos", {"order": 1})], 1500),
        ([("arccos", {"order": 2})], 6000),  # fourth powers of Gaussian numbers: their variance is known less well
        ([("cos", {"phases": False}), ("sin", {})], 1500),
    ],
    ids=["step", "relu", "relu-squared", "cos-and-sin"],
)
def test_orthogonal_rows_have_less_variance(parts, draws):
    """d = m = 16, summed over pairs at several angles. (Steps at small angles gain nothing.)"""
    u, v = torch.linalg.qr(torch.randn(16, 2, dtype=torch.float64))[0].T
    x = u.expand(3, 16)
    y = torch.stack([math.cos(angle) * u + math.sin(angle) * v for angle in (0.7, 1.2, math.pi / 2)])
    variance = {
        name: sum(estimates(Pair(f, params, name, {}), x, y, 16, draws) for f, params in parts).var(0).sum()
        for name in ("orf", "gaussian")
    }
    assert variance["orf"] / variance["gaussian"] < 0.95


# --- orthogonal rows, landmarks -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dim", "m"), [(16, 16), (16, 40), (12, 5), (7, 21), (1, 3)])
@pytest.mark.parametrize("norms", ["chi", "chi_pairs", "sqrt_dim"])
def test_orf_blocks_are_orthogonal(dim, m, norms):
    """Q Qᵀ = I block by block (Yu et al. 2016), the last one cut off."""
    w = PROJECTIONS["orf"](dim, m, norms=norms)
    rows = w.draw(site_generator(0, ""))
    assert rows.shape == (m, dim) == w.materialize().shape
    assert rows.dtype == torch.float64
    for start in range(0, m, dim):
        block = rows[start : start + dim]
        q = block / block.norm(dim=1, keepdim=True)
        torch.testing.assert_close(q @ q.T, torch.eye(len(q), dtype=torch.float64), rtol=0, atol=1e-10)
    if norms == "sqrt_dim":
        torch.testing.assert_close(rows.norm(dim=1), torch.full((m,), dim**0.5, dtype=torch.float64))


def test_orf_rows_are_as_long_as_gaussian_ones():
    """Squared row norms are chi-square with dim degrees of freedom."""
    from scipy import stats

    dim = 12
    squared = torch.cat([PROJECTIONS["orf"](dim, 24, seed=seed).squared_row_norms() for seed in range(40)])
    assert stats.kstest(squared.numpy(), stats.chi2(dim).cdf).pvalue > 1e-3


def test_orf_is_haar():
    """E[Q] = 0, which plain QR misses; E[Q_ij²] = 1/d and E[Q_11 Q_22 Q_12 Q_21] = −1/(d(d−1)(d+2))."""
    count, dim = 4000, 4
    generator = site_generator(0, "haar")
    q = torch.stack([haar(dim, generator) for _ in range(count)])
    limit = 5 / count**0.5
    assert q.mean(0).abs().max() < limit
    assert (q.square().mean(0) - 1 / dim).abs().max() < limit
    mixed = (q[:, 0, 0] * q[:, 1, 1] * q[:, 0, 1] * q[:, 1, 0]).mean()
    assert abs(mixed + 1 / (dim * (dim - 1) * (dim + 2))) < limit / 3


@pytest.mark.parametrize(
    ("component", "component_params"), [case for case in ALL_COMPONENTS if COMPONENTS[case.values[0]].elementwise()]
)
def test_landmarks_are_units_of_the_layer(component, component_params):
    weight, bias = torch.randn(20, 6), torch.randn(20)
    importance = torch.randperm(20).float()
    f = COMPONENTS[component](**component_params)
    x = torch.randn(5, 6)
    for m in (7, 20):
        w = PROJECTIONS["landmark"](6, m, source_weight=weight, source_bias=bias, importance=importance)
        chosen = importance.topk(m).indices.sort().values
        added = f.offsets(m)
        z = x @ weight[chosen].T + bias[chosen] + (0 if added is None else added)
        expected = f.function(z) * m**-0.5
        torch.testing.assert_close(FeatureMap(f, w)(x), expected)
    assert torch.equal(w.weight, weight)
    assert torch.equal(w.bias, bias)
    without = PROJECTIONS["landmark"](6, 20, source_weight=weight)
    assert torch.equal(without.weight, weight)
    assert not without.bias.any()
    weight.zero_()
    assert without.weight.any()  # a copy, not a view of the pretrained weight


# --- errors ---------------------------------------------------------------------------------------------------------


def test_every_fault_is_named_at_once():
    with pytest.raises(ConfigError) as caught:
        build_feature_map("rleu", "ofr", 4, 4)
    assert len(caught.value.faults) == 2
    assert "unknown component 'rleu'; did you mean 'relu'?" in str(caught.value)
    assert "unknown projection 'ofr'; did you mean 'orf'?" in str(caught.value)
    assert all(name in str(caught.value) for name in [*COMPONENTS.names(), *PROJECTIONS.names()])
    with pytest.raises(ConfigError, match="parameter 'order' is unknown") as caught:
        build_feature_map("relu", "orf", 4, 4, component_params={"order": 2}, projection_params={"norm": "chi"})
    assert len(caught.value.faults) == 2
    assert "valid: norms" in str(caught.value)


@pytest.mark.parametrize("value", [0, -1, 2.0, True, None, "8"])
@projection_cases
def test_bad_sizes(projection, projection_params, value):
    with pytest.raises(ConfigError) as caught:
        PROJECTIONS[projection](value, value, **projection_params)
    assert len(caught.value.faults) == 2
    assert "dim is" in str(caught.value)
    assert "num_features is" in str(caught.value)


def test_bad_member_parameters():
    with pytest.raises(ConfigError, match="order is 3; expected 0, 1 or 2"):
        COMPONENTS["arccos"](order=3)
    with pytest.raises(ConfigError, match="norms is 'chy'"):
        PROJECTIONS["orf"](4, 4, norms="chy")
    with pytest.raises(ConfigError, match="has only 3 rows"):
        PROJECTIONS["landmark"](4, 5, source_weight=torch.ones(3, 4))
    with pytest.raises(ConfigError, match=r"shape \(3, 5\)"):
        PROJECTIONS["landmark"](4, 2, source_weight=torch.ones(3, 5))


def test_incompatible_distributions_name_the_partners():
    class Poisson(Component):
        distribution = "poisson"

    with pytest.raises(ConfigError, match="needs rows drawn from 'poisson'"):
        FeatureMap(Poisson(), PROJECTIONS["orf"](4, 4))


def test_rows_that_are_no_sample_suit_functions_of_single_projections():
    fitting = {name for name in COMPONENTS if COMPONENTS[name].fits(PROJECTIONS["identity"])}
    assert fitting == {"arccos", "cos", "elu", "gelu", "mixture", "relu", "sin", "softmax_pm", "taylor_exp"}
    with pytest.raises(ConfigError, match=r"Identity's rows are no sample; valid projections: .*orf"):
        build_feature_map("posrf", "identity", 4, 4)


def test_features_with_a_scale():
    features = Features(torch.ones(2, 3), torch.full((2, 1), 0.5))
    torch.testing.assert_close(features.dense(), torch.full((2, 3), 0.5).exp())
    assert Features(features.values).dense() is features.values


# --- registries -----------------------------------------------------------------------------------------------------


def member_files(package) -> list[str]:
    return [m.name for m in pkgutil.iter_modules(package.__path__) if not m.name.startswith(("_", "base"))]


@pytest.mark.parametrize(
    ("registry", "package", "base"),
    [(COMPONENTS, snnk_peft.components, Component), (PROJECTIONS, snnk_peft.projections, Projection)],
    ids=["components", "projections"],
)
def test_file_name_is_registry_key_is_one_class(registry, package, base):
    files = member_files(package)
    assert files
    assert sorted(files) == registry.names()
    for name in files:
        module = importlib.import_module(f"{package.__name__}.{name}")
        classes = [v for v in vars(module).values() if isinstance(v, type) and v.__module__ == module.__name__]
        assert classes == [registry[name]]
        assert issubclass(registry[name], base)
        assert registry[name].__name__.lower() == name.replace("_", "")


def test_families_carry_the_names_of_their_entries():
    assert FAMILIES.names()
    assert all(FAMILIES[name].name == name for name in FAMILIES)


def test_parts_of_all_files_and_folders_are_found():
    own = [name for name in PARTS if PARTS[name].__module__.startswith("snnk_peft.")]  # another test brings its part
    sources = [path.read_text(encoding="utf-8") for path in Path(snnk_peft.parts.__path__[0]).rglob("*.py")]
    registered = [name for source in sources for name in re.findall(r'^@PARTS\.register\("(\w+)"\)', source, re.M)]
    assert len(registered) > 5
    assert sorted(registered) == own


def test_registry_behaves_like_a_table():
    registry: Registry[object] = Registry("thing", "snnk_peft.components")
    member = object()
    registry.register("thing", member)
    registry.register("thing", member)  # again the same: fine, modules may be reloaded
    assert registry["thing"] is member
    assert "thing" in registry
    assert list(registry) == registry.names() == ["thing"]
    with pytest.raises(ConfigError, match="already registered"):
        registry.register("thing", object())
    with pytest.raises(ConfigError, match="unknown thing 'thinf'; did you mean 'thing'"):
        registry["thinf"]
    with pytest.raises(ConfigError, match=r"unknown thing 'zzz'\. Available: thing"):
        registry["zzz"]


def test_members_are_found_in_files_and_in_folders_below(tmp_path, monkeypatch):
    """What begins with base or _ is shared by members, and none itself."""
    package = tmp_path / "a_shelf_of_things"
    for name in ("one", "kind/two", "kind/base_of_kind", "_helper"):
        file = package / f"{name}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        (file.parent / "__init__.py").touch()
        file.write_text(f"from a_shelf_of_things import THINGS\nTHINGS.register({file.stem!r}, object())\n")
    start = "from snnk_peft.registry import Registry\nTHINGS = Registry('thing', __name__)\n"
    (package / "__init__.py").write_text(start)
    monkeypatch.syspath_prepend(tmp_path)
    assert importlib.import_module("a_shelf_of_things").THINGS.names() == ["one", "two"]
