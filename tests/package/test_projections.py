"""The fixed weight matrices: each against its formula, fast against dense, and what is particular to one member.

What all members promise (shapes, dtypes, seeds, checksums, unbiased estimates) is tested in test_conformance.py.
"""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from scipy import linalg, stats
from scipy.stats import qmc as scipy_qmc
from transformers import AutoModelForSequenceClassification

from snnk_peft import PROJECTIONS, FFNPart, SNNKConfig, build_feature_map, bundle, get_snnk_model
from snnk_peft.errors import ConfigError
from snnk_peft.functional import low_discrepancy
from snnk_peft.functional.circulant import circulant_matrix, hankel_matrix, toeplitz_matrix
from snnk_peft.functional.random_numbers import simplex
from snnk_peft.layers.feature_stage import FeatureStage
from snnk_peft.projections.base import Projection
from snnk_peft.projections.base_drawn import site_generator
from snnk_peft.projections.base_structured import Structured
from snnk_peft.projections.ssf import fourier_indices, riesz_energy, sphere_points
from tests.tiny_models import inputs_for, same, tiny, trained

F64 = torch.float64
STRUCTURED: list[tuple[str, dict[str, Any]]] = [
    ("sorf", {}),
    ("rom", {"factors": 1}),
    ("rom", {"factors": 2}),
    ("rom", {"factors": 4, "complex_unit": True}),
    ("rom", {"factors": 1, "complex_unit": True}),
    ("fastfood", {}),
    ("scrf", {}),
    ("dct", {}),
    ("dct", {"rounds": 1}),
    ("pmodel", {"structure": "circulant"}),
    ("pmodel", {"structure": "toeplitz"}),
    ("pmodel", {"structure": "hankel"}),
]
structured_cases = pytest.mark.parametrize(
    ("name", "params"), STRUCTURED, ids=["-".join([name, *map(str, params.values())]) for name, params in STRUCTURED]
)
# dim = n, several blocks, cut in the middle of one, fewer rows than dim, odd, the smallest
SIZES = [(16, 16), (16, 64), (16, 40), (16, 6), (7, 22), (1, 2)]


def draw(name: str, dim: int, m: int, seed: int = 0, **params: Any) -> torch.Tensor:
    """W as drawn, in fp64 where the member works in it."""
    return PROJECTIONS[name](dim, m, **params).draw(site_generator(seed, "")).to(F64)


def drawn_factors(name: str, dim: int, m: int, **params: Any) -> dict[str, torch.Tensor]:
    """What the matrix of seed 0 is made of, in fp64."""
    matrix = PROJECTIONS[name](dim, m, **params)
    assert isinstance(matrix, Structured)
    return {key: value.to(F64) for key, value in matrix.draw_factors(site_generator(0, "")).items()}


def hadamard(n: int) -> torch.Tensor:
    return torch.tensor(linalg.hadamard(n), dtype=F64)


def power_of_two(dim: int) -> int:
    return 2 ** math.ceil(math.log2(dim))


def assert_same(given: torch.Tensor, expected: torch.Tensor, tolerance: float = 1e-12) -> None:
    torch.testing.assert_close(given, expected, rtol=tolerance, atol=tolerance)


# --- structured matrices against their formulas ---------------------------------------------------------------------


def test_sorf_has_unit_entries_and_orthogonal_blocks():
    """W Wᵀ = n I in a block (SORF, Yu et al. 2016)."""
    rows = draw("sorf", 256, 600)
    assert_same(rows[:256] @ rows[:256].T, 256 * torch.eye(256, dtype=F64), 1e-10)
    assert_same(rows[512:] @ rows[512:].T, 256 * torch.eye(88, dtype=F64), 1e-10)
    # entries of orthogonal blocks have mean square exactly 1
    assert abs(rows[:512].std() - 1) < 1e-3
    padded = draw("sorf", 200, 512)  # columns of whole blocks stay orthogonal when others are cut off
    assert_same(padded[:256].T @ padded[:256], 256 * torch.eye(200, dtype=F64), 1e-10)


@pytest.mark.parametrize(("dim", "m"), SIZES)
@pytest.mark.parametrize("t", [1, 2, 3, 5])
def test_rom_is_a_product_of_rotations(dim, m, t):
    """√n ∏ HD with the normalised H of scipy, blocks of n rows, first dim columns."""
    n = power_of_two(dim)
    H, blocks = hadamard(n) / n**0.5, []
    for signs in drawn_factors("rom", dim, m, factors=t)["signs"].transpose(0, 1):
        block = n**0.5 * torch.eye(n, dtype=F64)
        for D in reversed(signs):
            block = block @ H @ D.diag()
        assert_same(block @ block.T, n * torch.eye(n, dtype=F64), 1e-10)
        blocks.append(block[:, :dim])
    assert_same(draw("rom", dim, m, factors=t), torch.cat(blocks)[:m])


@pytest.mark.parametrize(("dim", "m"), SIZES)
def test_three_factors_are_sorf(dim, m):
    assert torch.equal(draw("rom", dim, m, factors=3), draw("sorf", dim, m))


@pytest.mark.parametrize(("dim", "m"), SIZES)
@pytest.mark.parametrize("t", [1, 3])
def test_complex_rom_is_the_hybrid_estimator(dim, m, t):
    """Linear features give Re(conj φ(x) · φ(y)) of the complex matrix √n H D^(U) ∏ H D."""
    n = power_of_two(dim)
    H, blocks = hadamard(n) / n**0.5, []
    factors = drawn_factors("rom", dim, m, factors=t, complex_unit=True)
    circle = torch.complex(*factors["circle"])
    assert_same(circle.abs(), torch.ones_like(circle.abs()), 1e-6)
    for block, unit in enumerate(circle):
        z = n**0.5 * H.to(unit) @ unit.diag()
        for D in reversed(factors["signs"][:, block]):
            z = z @ (H @ D.diag()).to(unit)
        blocks.append(z[:, :dim])
    z = torch.cat(blocks)[: m // 2]
    w = draw("rom", dim, m, factors=t, complex_unit=True)
    assert_same(w, 2**0.5 * torch.cat((z.real, z.imag)))
    x, y = torch.randn(2, dim, dtype=F64)
    hybrid = ((z @ x.to(z)).conj() * (z @ y.to(z))).real.mean()
    assert_same((w @ x * (w @ y)).mean(), hybrid)


@pytest.mark.parametrize(("dim", "m"), SIZES)
def test_fastfood_is_its_five_factors(dim, m):
    """(√n)⁻¹ S H G Π H B."""
    n, blocks = power_of_two(dim), []
    H, f = hadamard(n), drawn_factors("fastfood", dim, m)
    shuffles = f["permutation"].long().reshape(-1, n)
    for index, (B, G, S) in enumerate(zip(f["signs"], f["gaussian"], f["scaling"], strict=True)):
        permutation = torch.eye(n, dtype=F64)[shuffles[index] - n * index]
        assert (permutation.sum(0) == 1).all()
        block = S.diag() @ H @ G.diag() @ permutation @ H @ B.diag() / n**0.5
        assert_same(block.norm(dim=1), S * G.norm())  # S_ii ‖G‖_F is the length of row i, drawn from χ_n
        blocks.append(block[:, :dim])
    assert_same(draw("fastfood", dim, m), torch.cat(blocks)[:m])


@pytest.mark.parametrize(("dim", "m"), SIZES)
def test_circulant_matrices_are_those_of_scipy(dim, m):
    """By FFT and as a dense circulant matrix."""
    f = drawn_factors("scrf", dim, m)
    rows = [s.diag() @ torch.tensor(linalg.circulant(c)) for c, s in zip(f["column"], f["signs"], strict=True)]
    assert_same(draw("scrf", dim, m), torch.cat(rows)[:m])
    dense = {
        "circulant": lambda g: linalg.circulant(g),
        "toeplitz": lambda g: linalg.toeplitz(g[dim - 1 :], g[:dim].flip(0)),
        "hankel": lambda g: linalg.hankel(g[:dim], g[dim - 1 :]),
    }
    for structure, form in dense.items():
        numbers = drawn_factors("pmodel", dim, m, structure=structure)["gaussian"]
        rows = [torch.as_tensor(form(g)) for g in numbers]
        assert_same(draw("pmodel", dim, m, structure=structure), torch.cat(rows)[:m])
    for form in (circulant_matrix, toeplitz_matrix, hankel_matrix):
        assert form(torch.randn(2, 7)).any()


# --- fast against dense ---------------------------------------------------------------------------------------------


@structured_cases
@pytest.mark.parametrize(("dim", "m"), SIZES)
def test_the_fast_transform_is_the_dense_product(name, params, dim, m):
    """The same matrix from the same seed, applied in two ways."""
    slow = PROJECTIONS[name](dim, m, seed=3, site="s", fast=False, **params)
    fast = PROJECTIONS[name](dim, m, seed=3, site="s", fast=True, **params)
    assert fast.fast
    assert "weight" in dict(slow.named_buffers())
    assert "weight" not in dict(fast.named_buffers())
    assert_same(fast.materialize(), slow.materialize(), 1e-6)
    fast = fast.double()
    W = fast.materialize()
    assert W.shape == (m, dim)
    assert W.any()
    assert_same(W, slow.draw(site_generator(3, "s")))
    x = torch.randn(2, 3, dim, dtype=F64, requires_grad=True)
    assert_same(fast(x), x @ W.T)
    assert torch.autograd.gradcheck(fast, x)
    assert fast(x[:0]).shape == (0, 3, m)
    assert_same(fast.normalized(x, 0.5), slow.double().normalized(x, 0.5), 1e-6)
    assert_same(fast.squared_row_norms(), W.square().sum(1))


@structured_cases
def test_half_precision_inputs_are_transformed_in_full_precision(name, params):
    fast = PROJECTIONS[name](16, 32, fast=True, **params)
    x = torch.randn(5, 16)
    for dtype in (torch.bfloat16, torch.float16):
        out = fast(x.to(dtype))
        assert out.dtype == dtype
        assert torch.equal(out, fast(x.to(dtype).float()).to(dtype))
        assert copy.deepcopy(fast).to(dtype).dtype == dtype
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = fast(x)
    assert torch.equal(inside, fast(x))


@pytest.mark.parametrize(("name", "params"), [("sorf", {}), ("fastfood", {}), ("pmodel", {"structure": "toeplitz"})])
def test_fast_transforms_compile_in_one_graph(name, params):
    fast = PROJECTIONS[name](12, 20, fast=True, **params)
    compiled = torch.compile(fast, fullgraph=True, backend="aot_eager")
    x = torch.randn(4, 12, requires_grad=True)
    assert_same(compiled(x), fast(x), 1e-5)
    (expected,) = torch.autograd.grad(fast(x).square().sum(), x)
    (given,) = torch.autograd.grad(compiled(x).square().sum(), x)
    assert_same(given, expected, 1e-4)


@structured_cases
def test_fast_is_chosen_by_size_and_recorded(name, params):
    cls = PROJECTIONS[name]
    size = cls.fast_from
    with torch.device("meta"):  # no need to draw
        big, few, small = cls(size, size, **params), cls(size, 16, **params), cls(16, size, **params)
    assert (big.fast, few.fast, small.fast) == (True, False, False)
    assert big.params["fast"] is True
    assert few.params["fast"] is False
    stored = sum(tensor.numel() for tensor in big.buffers())
    assert stored <= 5 * size  # instead of size²
    assert {tensor.device.type for tensor in big.buffers()} == {"meta"}
    assert big(torch.empty(2, size, device="meta")).shape == (2, size)
    with pytest.raises(ConfigError, match="fast is 'yes'; expected True or False, or None"):
        cls(4, 4, fast="yes", **params)


def test_layers_accept_fast_and_weighted_matrices():
    """Whitening is folded only into a plain dense matrix: not where that would lose the transform or the weights."""
    shift, inverse_std = torch.randn(8), torch.rand(8) + 0.5
    x = torch.randn(3, 8)
    for name, m, params, folded in [
        ("sorf", 16, {"fast": False}, True),
        ("sorf", 16, {"fast": True}, False),
        ("sgq", 17, {}, False),
        ("ssr", 19, {}, False),
    ]:
        feature_map = build_feature_map("relu", name, 8, m, projection_params=params)
        stage = FeatureStage(feature_map, shift=shift, inverse_std=inverse_std, center=True)
        simple = stage.simplified()
        assert (simple is not stage) == folded
        assert_same(simple(x), stage(x), 1e-5)
        again = FeatureStage.from_spec(stage.spec())
        again.load_state_dict(stage.state_dict())
        assert torch.equal(again(x), stage(x))
        normalized = FeatureStage(feature_map, normalize=True, scale=0.5)
        expected = feature_map(torch.nn.functional.layer_norm(x, (8,)) * 0.5)
        assert_same(normalized(x), expected, 1e-5)


@pytest.mark.parametrize("save", [True, False])
def test_a_bundle_with_a_fast_matrix_reloads(tmp_path, save):
    part = FFNPart(num_features=40, projection="fastfood", component="relu", projection_params={"fast": True})
    model = trained(get_snnk_model(tiny("bert"), SNNKConfig(ffn=part, save_projection=save)))
    small = bundle(model)
    assert small.bundle_report.parity_error < 1e-5
    keys = [key for key in small.state_dict() if "projection" in key]
    assert len(keys) == (4 if save else 1) * 2
    small.save_pretrained(tmp_path)
    loaded = AutoModelForSequenceClassification.from_pretrained(tmp_path)
    inputs = inputs_for(small)
    assert same(loaded(**inputs).logits, small(**inputs).logits)


# --- rows that are Gaussian one by one ------------------------------------------------------------------------------

GAUSSIAN: list[tuple[str, dict[str, Any]]] = [
    ("orf", {}),
    ("orf", {"norms": "chi_pairs"}),
    ("simrf", {}),
    ("simrf", {"coupling": "weight_dependent"}),
    ("qmc", {}),
    ("qmc", {"sequence": "halton"}),
    ("ssf", {}),
    ("fastfood", {}),
    ("scrf", {}),
    ("pmodel", {"structure": "circulant"}),
    ("pmodel", {"structure": "toeplitz"}),
    ("pmodel", {"structure": "hankel"}),
]


def test_every_unbiased_gaussian_member_is_checked():
    names = {n for n in PROJECTIONS if PROJECTIONS[n].unbiased and PROJECTIONS[n].distribution == "gaussian"}
    assert names - {"gaussian"} == {name for name, _ in GAUSSIAN}


@pytest.mark.parametrize("row", [0, -1])
@pytest.mark.parametrize(("name", "params"), GAUSSIAN)
def test_rows_are_standard_normal(name, params, row):
    """One row of many draws, in a size that needs padding, several blocks and truncation."""
    dim, m, draws = 5, 14, 1000
    matrix = PROJECTIONS[name](dim, m, **params)
    assert matrix.unbiased
    rows = torch.stack([matrix.draw(site_generator(seed, "rows"))[row] for seed in range(draws)]).to(F64)
    for vector in (torch.eye(5, dtype=F64)[2], torch.full((5,), 5**-0.5, dtype=F64)):
        assert stats.kstest((rows @ vector).numpy(), "norm").pvalue > 1e-4
    assert stats.kstest(rows.square().sum(1).numpy(), stats.chi2(dim).cdf).pvalue > 1e-4
    covariance = rows.T @ rows / draws
    assert (covariance - torch.eye(dim, dtype=F64)).abs().max() < 5 * (2 / draws) ** 0.5


def test_members_that_are_not_gaussian_do_not_claim_it():
    for name, dim, m, params in [
        ("sorf", 4, 4, {}),
        ("rom", 4, 4, {}),
        ("mm", 4, 8, {}),
        ("dct", 4, 8, {}),
        ("sgq", 4, 9, {}),
        ("ssr", 4, 11, {}),
        ("qmc", 4, 8, {"scramble": False}),
        ("ssf", 4, 8, {"rotate": False}),
        ("ssf", 4, 8, {"norms": "sqrt_dim"}),
    ]:
        assert not PROJECTIONS[name](dim, m, **params).unbiased


# --- simplices ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [2, 3, 5, 20])
def test_simplex_corners_are_equally_far_apart(count):
    corners = simplex(count)
    assert corners.shape == (count, count - 1)
    expected = torch.full((count, count), -1 / (count - 1), dtype=F64).fill_diagonal_(1.0)
    assert_same(corners @ corners.T, expected)


@pytest.mark.parametrize(("dim", "m"), [(2, 4), (8, 8), (8, 20), (5, 3)])
def test_simrf_rows_meet_at_the_angle_of_a_simplex(dim, m):
    rows = draw("simrf", dim, m)
    for start in range(0, m, dim):
        block = rows[start : start + dim]
        directions = block / block.norm(dim=1, keepdim=True)
        expected = torch.full((len(block), len(block)), -1 / (dim - 1), dtype=F64).fill_diagonal_(1.0)
        assert_same(directions @ directions.T, expected, 1e-10)


def test_weight_dependent_simplices_sum_to_almost_nothing():
    """And keep lengths that are independent of the coupling: with the same seed, those of the other variant."""
    sums = []
    for seed in range(20):
        plain, coupled = (draw("simrf", 16, 16, seed, coupling=c) for c in ("independent", "weight_dependent"))
        assert_same(coupled.norm(dim=1), plain.norm(dim=1), 1e-10)
        sums.append((plain.sum(0).norm(), coupled.sum(0).norm()))
    plain, coupled = torch.tensor(sums).T
    assert coupled.mean() < plain.mean() / 3


def test_simplices_serve_positive_features():
    """Reid et al.: exp features over simplices have less variance than over orthogonal rows, coupled ones the least."""
    dim = 6
    total = torch.full((dim,), 1.2 * dim**-0.5, dtype=F64)  # x + y
    variance = {}
    for name, params in [("gaussian", {}), ("orf", {}), ("simrf", {}), ("simrf", {"coupling": "weight_dependent"})]:
        estimates = [(draw(name, dim, dim, seed, **params) @ total).exp().mean() for seed in range(2000)]
        variance[" ".join([name, *params.values()])] = torch.stack(estimates).var()
    assert variance["simrf"] < variance["orf"] < variance["gaussian"]
    assert variance["simrf weight_dependent"] < variance["simrf"]


# --- low discrepancy ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sequence", ["sobol", "halton"])
@pytest.mark.parametrize(("dim", "m"), [(1, 1), (3, 16), (40, 7)])
def test_plain_sequences_are_those_of_scipy(sequence, dim, m):
    """m points in dim dimensions, behind the first point 0."""
    engine = {"sobol": scipy_qmc.Sobol, "halton": scipy_qmc.Halton}[sequence](dim, scramble=False)
    engine.fast_forward(1)
    expected = torch.as_tensor(stats.norm.ppf(engine.random(m)))
    assert_same(draw("qmc", dim, m, sequence=sequence, scramble=False), expected, 1e-9)


@pytest.mark.parametrize("sequence", ["sobol", "halton"])
def test_scrambled_points_stay_even_and_inside(sequence):
    points = getattr(low_discrepancy, sequence)(128, 30, site_generator(1, "q"))
    assert points.shape == (128, 30)
    assert ((points > 0) & (points < 1)).all()
    # the first coordinate is in base 2 for both: one point in each of 128 intervals
    assert torch.equal((points[:, 0] * 128).long().sort().values, torch.arange(128))
    again = getattr(low_discrepancy, sequence)(128, 30, site_generator(2, "q"))
    assert not torch.equal(points, again)
    if sequence == "halton":  # base 3: one in each of 81
        assert torch.equal((points[:81, 1] * 81).long().sort().values, torch.arange(81))
    primes = [2, 3, 5, 7, 11, 13, 17, 19, 23, 29]
    assert all(low_discrepancy.first_primes(count) == primes[:count] for count in range(1, 11))
    assert low_discrepancy.first_primes(768)[-1] == 5849


@pytest.mark.parametrize("params", [{}, {"sequence": "halton"}, {"scramble": False}], ids=str)
def test_even_points_have_smaller_errors(params):
    """Error of the Gaussian kernel below the median of independent rows."""
    delta = torch.tensor([0.8, -0.5, 0.3], dtype=F64)
    exact = (-delta.square().sum() / 2).exp()

    def errors(name, count, **kwargs):
        return torch.stack(
            [((draw(name, 3, 128, s, **kwargs) @ delta).cos().mean() - exact).abs() for s in range(count)]
        )

    assert errors("qmc", 41, **params).median() < 0.5 * errors("gaussian", 200).median()


@pytest.mark.parametrize("name", ["qmc", "mm"])
def test_plain_sequences_do_not_depend_on_the_seed(name):
    cls = PROJECTIONS[name]
    first, second = (cls(4, 8, seed=seed, site=str(seed), scramble=False, save=False) for seed in (1, 2))
    assert torch.equal(first.weight, second.weight)
    assert not first.seeded
    assert cls(4, 8).seeded
    second.load_state_dict(first.state_dict())


@pytest.mark.parametrize("sequence", ["sobol", "halton"])
@pytest.mark.parametrize(("dim", "m"), [(4, 5), (16, 40), (40, 128)])
def test_matched_moments_are_exact(sequence, dim, m):
    """Mean 0 and Wᵀ W / m = I, not only in expectation (moment matching)."""
    rows = draw("mm", dim, m, sequence=sequence)
    assert_same(rows.mean(0), torch.zeros(dim, dtype=F64), 1e-10)
    assert_same(rows.T @ rows / m, torch.eye(dim, dtype=F64), 1e-10)
    x, y = torch.randn(2, dim, dtype=F64)
    assert_same((rows @ x * (rows @ y)).mean(), x @ y, 1e-10)
    # the matched rows are still the quasi-Monte Carlo points, moved a little
    plain = draw("qmc", dim, m, sequence=sequence)
    if m >= 2 * dim:
        assert torch.corrcoef(torch.stack((rows.flatten(), plain.flatten())))[0, 1] > 0.8


def test_moment_matching_below_full_rank():
    for dim, m in [(8, 8), (8, 3)]:
        matrix = PROJECTIONS["mm"](dim, m)
        assert matrix.params["covariance"] is False
        rows, plain = draw("mm", dim, m), draw("qmc", dim, m)
        assert_same(rows.mean(0), torch.zeros(dim, dtype=F64), 1e-10)
        assert_same(rows, plain - plain.mean(0))
    assert PROJECTIONS["mm"](8, 9).params["covariance"] is True
    assert PROJECTIONS["mm"](8, 9, covariance=False).params["covariance"] is False
    with pytest.raises(ConfigError, match=r"take num_features >= 9, or covariance=False"):
        PROJECTIONS["mm"](8, 8, covariance=True)
    with pytest.raises(ConfigError, match="a single row minus its mean is 0"):
        PROJECTIONS["mm"](8, 1)
    # plain Halton points in large bases are ramps, almost the same in every coordinate
    with pytest.raises(ConfigError, match="almost collinear in 60 dimensions"):
        PROJECTIONS["mm"](60, 64, sequence="halton", scramble=False)


# --- quadrature -----------------------------------------------------------------------------------------------------


def weighted(matrix: Projection) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights and nodes in fp64, as drawn."""
    nodes = matrix.draw(site_generator(matrix.seed, matrix.site))
    matrix = matrix.double()
    matrix.weight = nodes
    return matrix.feature_weights, nodes


def polynomial_moments(weights: torch.Tensor, nodes: torch.Tensor) -> None:
    """Σ a = 1, Σ a p = 0, Σ a p pᵀ = I, third moments 0."""
    dim = nodes.shape[1]
    assert_same(weights.sum(), torch.ones((), dtype=F64))
    assert_same(weights @ nodes, torch.zeros(dim, dtype=F64))
    assert_same(nodes.T @ (weights[:, None] * nodes), torch.eye(dim, dtype=F64))
    assert_same(torch.einsum("i,ia,ib,ic->abc", weights, nodes, nodes, nodes), torch.zeros(dim, dim, dim, dtype=F64))


@pytest.mark.parametrize("dim", [1, 2, 3, 7, 32])
@pytest.mark.parametrize("rotate", [False, True])
def test_sparse_grid_moments(dim, rotate):
    """Σ a = 1, Σ a p pᵀ = I, Σ a p_i⁴ = 3 (sparse-grid quadrature)."""
    matrix = PROJECTIONS["sgq"](dim, 2 * dim + 1, rotate=rotate)
    assert matrix.seeded == rotate
    weights, nodes = weighted(matrix)
    polynomial_moments(weights, nodes)
    if not rotate:
        assert_same(weights @ nodes.pow(4), torch.full((dim,), 3.0, dtype=F64))


@pytest.mark.parametrize("m", [1, 12, 14, 26])
def test_sparse_grid_has_one_size(m):
    with pytest.raises(ConfigError, match=rf"num_features is {m} with dim 6; expected 2·dim \+ 1 = 13"):
        PROJECTIONS["sgq"](6, m)
    assert PROJECTIONS["sgq"].nearest_size(6, m) == 13


@pytest.mark.parametrize(("dim", "k"), [(1, 1), (2, 1), (5, 1), (5, 3), (16, 2)])
def test_spherical_radial_moments(dim, k):
    matrix = PROJECTIONS["ssr"](dim, 2 * k * (dim + 1) + 1, seed=4)
    weights, nodes = weighted(matrix)
    assert not nodes[0].any()
    polynomial_moments(weights, nodes)
    by_rule = nodes[1:].reshape(k, 2, dim + 1, dim)
    assert_same(by_rule[:, 0], -by_rule[:, 1])
    lengths = by_rule[:, 0].norm(dim=-1)
    assert_same(lengths, lengths[:, :1].expand(k, dim + 1))
    # a_0 = mean of 1 − dim/ρ²
    assert_same(weights[0], (1 - dim / lengths[:, 0].square()).mean())


def test_spherical_radial_rules_are_unbiased_as_integrals():
    delta = torch.tensor([0.9, -0.7, 0.4, 0.2], dtype=F64)
    exact = (-delta.square().sum() / 2).exp()
    estimates = []
    for seed in range(2000):
        weights, nodes = weighted(PROJECTIONS["ssr"](4, 11, seed=seed))
        estimates.append(weights @ (nodes @ delta).cos())
    estimates = torch.stack(estimates)
    assert (estimates.mean() - exact).abs() < 5 * estimates.std() / len(estimates) ** 0.5
    # 11 Gaussian rows have variance (1 + e^{−2‖δ‖²} − 2e^{−‖δ‖²})/2m
    assert estimates.var() < (1 - exact.square()).square() / (2 * 11)


@pytest.mark.parametrize("m", [1, 3, 14, 16, 28])
def test_spherical_radial_rules_come_whole(m):
    with pytest.raises(ConfigError, match=rf"ssr num_features is {m} with dim 6; .* for a whole k: 15, 29|: 29, 43"):
        PROJECTIONS["ssr"](6, m)
    assert PROJECTIONS["ssr"].nearest_size(6, m) in (15, 29)


@pytest.mark.parametrize(("name", "m"), [("sgq", 13), ("ssr", 15)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_signed_weights_ride_on_the_towers(name, m, dtype):
    """The product of both towers carries a_i, also where a_i < 0; x·y is reproduced exactly."""
    matrix = PROJECTIONS[name](6, m).to(dtype)
    weights = matrix.feature_weights
    assert weights.dtype == dtype
    assert name != "sgq" or weights[0] < 0
    tolerance = 1e-6 if dtype == F64 else 0.02
    product = matrix.amplitudes() * matrix.amplitudes(signed=True)
    assert_same(product, weights, tolerance)
    x, y = torch.randn(2, 6, dtype=dtype)
    estimate = (matrix.amplitudes() * matrix(x)).double() @ (matrix.amplitudes(signed=True) * matrix(y)).double()
    torch.testing.assert_close(
        estimate, (x.double() @ y.double()), rtol=0.1 if dtype != F64 else 1e-6, atol=tolerance * 10
    )


# --- spherical points -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("h", "n"), [(1, 2), (2, 3), (3, 7), (4, 16), (8, 32)])
def test_fourier_points_are_a_tight_frame_on_the_sphere(h, n):
    indices = fourier_indices(h, n, site_generator(0, "f"))
    assert len(set(indices.tolist())) == h
    assert indices.min() >= 1
    assert indices.max() < n
    points = sphere_points(indices, n)
    assert points.shape == (2 * n, 2 * h)
    assert_same(points.norm(dim=1), torch.ones(2 * n, dtype=F64))
    assert_same(points.T @ points, n / h * torch.eye(2 * h, dtype=F64), 1e-11)
    # the energy from one sequence of inner products is that of all pairs
    squared = torch.cdist(points, points).square()
    pairs = squared[~torch.eye(2 * n, dtype=torch.bool)].clamp_min(1e-12)
    roots = torch.polar(torch.ones(n, dtype=F64), torch.arange(n, dtype=F64) * (2 * torch.pi / n))
    correlation = torch.stack([roots[k * torch.arange(n) % n] for k in indices]).mean(0)
    assert_same(riesz_energy(correlation), pairs.pow(-1.0).mean(), 1e-6)


def test_the_search_spreads_the_points():
    """Lower energy than random Fourier rows and than independent points."""

    def energy(points):
        return torch.pdist(points).square().clamp_min(1e-12).pow(-1.0).mean()

    for h, n in [(4, 16), (8, 24)]:
        generator = site_generator(0, "f")
        found = energy(sphere_points(fourier_indices(h, n, generator), n))
        random = [energy(sphere_points(torch.randperm(n - 1, generator=generator)[:h] + 1, n)) for _ in range(50)]
        independent = [
            energy(torch.nn.functional.normalize(torch.randn(2 * n, 2 * h, generator=generator, dtype=F64)))
            for _ in range(20)
        ]
        assert found <= sorted(random)[2]
        assert found < min(independent)


@pytest.mark.parametrize("rotate", [False, True])
@pytest.mark.parametrize(("dim", "m"), [(8, 20), (7, 10), (1, 4), (768, 770)])
def test_spherical_features_have_the_points_directions(dim, m, rotate):
    rows = draw("ssf", dim, m, norms="sqrt_dim", rotate=rotate)
    even = dim + dim % 2
    assert rows.shape == (m, dim)
    assert_same(rows.T @ rows / m, torch.eye(dim, dtype=F64), 1e-10)
    if even == dim:
        assert_same(rows.norm(dim=1), torch.full((m,), dim**0.5, dtype=F64))


@pytest.mark.parametrize(("dim", "m", "least"), [(8, 11, 10), (8, 8, 10), (7, 4, 10), (6, 9, 8)])
def test_spherical_features_have_even_sizes(dim, m, least):
    with pytest.raises(ConfigError, match=rf"num_features is {m} with dim {dim}; expected an even number >= {least}"):
        PROJECTIONS["ssf"](dim, m)
    PROJECTIONS["ssf"](dim, PROJECTIONS["ssf"].nearest_size(dim, m))


# --- other distributions --------------------------------------------------------------------------------------------


def frequencies_match(values: torch.Tensor, probability: Any, support: range) -> None:
    """A chi-square test of whole numbers against their probabilities; the tail is one class."""
    counts = [int((values == k).sum()) for k in support]
    expected = [probability(k) * values.numel() for k in support]
    counts.append(values.numel() - sum(counts))
    expected.append(values.numel() - sum(expected))
    assert stats.chisquare(counts, expected).pvalue > 1e-4


@pytest.mark.parametrize("rate", [0.3, 1.0, 4])
def test_poisson_entries(rate):
    w = PROJECTIONS["poisson"](100, 200, rate=rate)
    assert w.distribution == "poisson"
    assert w.params == {"rate": rate}
    assert PROJECTIONS["poisson"](50, 8).params == {"rate": 1 / 50}
    assert PROJECTIONS["geometric"](50, 8).params == {"p": 1 - 1 / 50}
    frequencies_match(w.weight, stats.poisson(rate).pmf, range(int(3 * rate) + 2))


@pytest.mark.parametrize("p", [0.2, 0.5, 0.9])
def test_geometric_entries_count_failures(p):
    w = PROJECTIONS["geometric"](100, 200, p=p)
    assert w.distribution == "geometric"
    assert w.params == {"p": p}
    frequencies_match(w.weight, lambda k: p * (1 - p) ** k, range(3))
    assert abs(w.weight.mean() - (1 - p) / p) < 5 * ((1 - p) / p**2 / 20000) ** 0.5


def test_rademacher_entries():
    w = PROJECTIONS["rademacher"](100, 200)
    assert w.distribution == "rademacher"
    assert set(w.weight.unique().tolist()) == {-1.0, 1.0}
    assert abs(w.weight.mean()) < 5 / 20000**0.5


# --- errors ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "params", "message"),
    [
        ("rom", {"factors": 0}, "rom factors is 0; expected an integer >= 1"),
        ("rom", {"complex_unit": True}, "num_features is 9 with complex_unit=True; expected an even number"),
        ("poisson", {"rate": 0}, "poisson rate is 0; expected a number > 0"),
        ("poisson", {"rate": math.nan}, "poisson rate is nan"),
        ("geometric", {"p": 1.0}, "geometric p is 1.0; expected a number > 0 and < 1"),
    ],
    ids=str,
)
def test_wrong_arguments_are_named(name, params, message):
    with pytest.raises(ConfigError, match=message):
        PROJECTIONS[name](6, 9, **params)


@pytest.mark.parametrize("name", ["qmc", "mm"])
def test_sobol_has_a_largest_dimension(name):
    with pytest.raises(ConfigError, match="dim is 30000; sequence 'sobol' has 21201 at most, use 'halton'"):
        PROJECTIONS[name](30000, 4)
