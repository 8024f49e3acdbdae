"""Feature maps of recent years against closed forms, scipy and brute force; exponential features over every matrix."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from scipy import fft, stats

from snnk_peft import COMPONENTS, PROJECTIONS, build_feature_map
from snnk_peft.components.base_exponential import Exponential
from snnk_peft.errors import ConfigError
from snnk_peft.feature_map import FeatureMap
from snnk_peft.feature_map.describe import describe, measured_error, projection_table
from snnk_peft.functional.exponential import optimal_a
from snnk_peft.functional.random_numbers import chi_quantile, paired_lengths, stratified_lengths
from snnk_peft.projections.base_drawn import site_generator
from snnk_peft.projections.dct import cosine_matrix, cosine_transform
from tests.sampling import vectors, within_standard_errors

F64 = torch.float64


# --- coupled norms (Reid et al. 2024) -------------------------------------------------------------------------------


@pytest.mark.parametrize("dim", [1, 2, 5, 64, 768])
def test_quantiles_are_those_of_scipy(dim):
    u = torch.tensor([2.0**-30, 1e-4, 0.1, 0.5, 0.9, 1 - 1e-4, 1 - 2.0**-30], dtype=F64)
    expected = torch.tensor(stats.chi(dim).ppf(u.numpy()))
    torch.testing.assert_close(chi_quantile(u, dim), expected, rtol=1e-7, atol=1e-12)


@pytest.mark.parametrize("make", [paired_lengths, stratified_lengths])
def test_coupled_lengths_keep_their_distribution(make):
    lengths = make(4000, 6, site_generator(0, "lengths"))
    if make is stratified_lengths:  # one in each part
        ranks = stats.chi(6).cdf(lengths.numpy()) * 4000
        assert sorted(ranks.astype(int).tolist()) == list(range(4000))
        assert abs(stats.spearmanr(ranks[:-1], ranks[1:]).statistic) < 5 / 4000**0.5
        lengths = torch.stack([make(7, 6, site_generator(seed, "lengths"))[3] for seed in range(800)])
    else:
        lengths = lengths[::2]
    assert stats.kstest(lengths.numpy(), stats.chi(6).cdf).pvalue > 1e-3


@pytest.mark.parametrize(("dim", "m"), [(6, 6), (7, 7), (5, 12), (1, 3)])
def test_paired_norms_mirror_each_other(dim, m):
    """F(r₁) + F(r₂) = 1 for the rows 1 and 2, 3 and 4, ... of each block; the last one of an odd block is free."""
    w = PROJECTIONS["orf"](dim, m, norms="chi_pairs", seed=3)
    norms = w.draw(site_generator(3, "")).norm(dim=1)
    seen = []
    for block in norms.split(dim):
        ranks = torch.tensor(stats.chi(dim).cdf(block.numpy()))
        pairs = ranks[: len(block) // 2 * 2].reshape(-1, 2)
        torch.testing.assert_close(pairs.sum(1), torch.ones(len(pairs), dtype=F64), rtol=0, atol=1e-7)
        seen += ranks.tolist()
    assert len({round(min(u, 1 - u), 6) for u in seen}) == sum(-(-len(block) // 2) for block in norms.split(dim))
    assert not torch.allclose(norms, PROJECTIONS["orf"](dim, m, seed=3).draw(site_generator(3, "")).norm(dim=1))


@pytest.fixture(scope="module")
def blocks() -> dict[str, torch.Tensor]:
    """Thousands of independent blocks of four rows, (blocks, 4, 4), by kind of norms."""
    return {
        norms: PROJECTIONS["orf"](4, 4 * 3000, norms=norms).weight.double().unflatten(0, (-1, 4))
        for norms in ("chi", "chi_pairs")
    }


@pytest.mark.parametrize("function", [torch.cosh, torch.cos], ids=["hyprf", "trigrf"])
def test_paired_norms_lower_the_variance_of_estimates(blocks, function):
    """Of whole blocks, over many directions, by four standard errors; the mean stays e^{±‖v‖²/2}."""
    v = vectors(32, 4, length=0.5)
    sign = 1 if function is torch.cosh else -1
    samples = {norms: function(rows @ v.T).mean(-2) for norms, rows in blocks.items()}
    for estimates in samples.values():
        within_standard_errors(estimates, torch.tensor(math.exp(sign * 0.25 / 2)))
    squares = {norms: (s - s.mean(0)).square().mean(1) for norms, s in samples.items()}
    uncertainty = sum((s.std() / s.mean()).square() / len(s) for s in squares.values()) ** 0.5
    ratio = squares["chi_pairs"].mean() / squares["chi"].mean()
    assert ratio.log() < -4 * uncertainty, (ratio, uncertainty)


# --- Taylor map of the exponential (Based) --------------------------------------------------------------------------


@pytest.mark.parametrize("dim", [1, 2, 7, 16])
def test_based_is_the_second_order_series(dim):
    """Exactly, at any length, with the d² products of the published map and with each once."""
    fm = build_feature_map("taylor_exp", "identity", dim, dim).double()
    x, y = 3 * torch.randn(5, dim, dtype=F64), 3 * torch.randn(4, dim, dtype=F64)
    t = x @ y.T
    close = {"rtol": 1e-11, "atol": 1e-11}
    torch.testing.assert_close(fm.phi(x).dense() @ fm.psi(y).dense().T, 1 + t + t**2 / 2, **close)
    torch.testing.assert_close(fm.kernel(x[:, None], y), 1 + t + t**2 / 2, **close)
    assert fm.feature_dim == 1 + dim + dim * (dim + 1) // 2
    whole = [torch.cat((torch.ones(1), v, torch.outer(v, v).flatten() / 2**0.5)) for v in (x[0], y[0])]
    torch.testing.assert_close(whole[0] @ whole[1], 1 + t[0, 0] + t[0, 0] ** 2 / 2, **close)
    found, products = fm(x[0]).tolist(), itertools.combinations_with_replacement(x[0].tolist(), 2)
    pairs = itertools.combinations_with_replacement(range(dim), 2)
    expected = [a * b * (0.5**0.5 if i == j else 1.0) for (a, b), (i, j) in zip(products, pairs, strict=True)]
    assert found == pytest.approx([1.0, *x[0].tolist(), *expected], rel=1e-12)


def test_based_says_what_it_is():
    page = describe("taylor_exp", "identity", 6, 6)
    assert "properties  exact, signed features" in page
    assert measured_error("taylor_exp", "identity", 6, 6)["relative_error"] < 1e-14
    with pytest.raises(ConfigError, match=r"needs rows drawn from 'none'.*valid projections: .*identity"):
        build_feature_map("taylor_exp", "orf", 4, 4)
    with pytest.raises(TypeError, match="depends on the matrix"):
        COMPONENTS["taylor_exp"]().kernel(torch.ones(3), torch.ones(3))


# --- polynomial sketches (PolySketchFormer) -------------------------------------------------------------------------


@pytest.mark.parametrize(("degree", "m"), [(2, 1), (2, 2), (4, 2), (4, 4)])
def test_polysketch_kernel_by_all_sign_matrices(degree, m):
    """The mean over every matrix of signs that there is, not a sample of them."""
    x, y = torch.randn(2, 3, 2, dtype=F64)
    fm = build_feature_map("polysketch", "rademacher", 2, m, component_params={"degree": degree}).double()
    found = []
    for signs in itertools.product((-1.0, 1.0), repeat=2 * m):
        fm.projection.weight.copy_(torch.tensor(signs).reshape(m, 2))
        found.append((fm.phi(x).dense() * fm.psi(y).dense()).sum(-1))
    torch.testing.assert_close(torch.stack(found).mean(0), fm.kernel(x, y), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("degree", "r"), [(8, 3), (16, 6)])
def test_polysketch_kernel_of_the_tree(degree, r):
    """The kernel by sampling; the sketch by a recursion over its definition."""
    x, y = vectors(2, 3, length=1.0), vectors(2, 3, length=1.0)
    half, count = degree // 2, 3000
    maps = [
        build_feature_map("polysketch", "rademacher", 3, half * r, seed=seed, component_params={"degree": degree})
        for seed in range(count)
    ]
    samples = torch.stack([(fm.phi(x).dense() * fm.psi(y).dense()).sum(-1) for fm in maps])
    # The tails of degree 16 are so heavy that 3000 draws do not know their own standard error.
    if degree == 8:
        within_standard_errors(samples, maps[0].kernel(x, y))
    assert (samples >= 0).all()

    def sketch(v, rows, mixing):
        if len(rows) == 2:
            return [float(a @ v) * float(b @ v) / r**0.5 for a, b in zip(*rows, strict=True)]
        middle, top = len(rows) // 2, mixing[-1]
        halves = [sketch(v, part, [level[s] for level in mixing[:-1]]) for part, s in sides(rows, mixing, middle)]
        mixed = [[float(row @ torch.tensor(one, dtype=F64)) for row in g] for g, one in zip(top, halves, strict=True)]
        return [a * b / r**0.5 for a, b in zip(*mixed, strict=True)]

    def sides(rows, mixing, middle):
        for first in (True, False):
            yield (
                rows[:middle] if first else rows[middle:],
                slice(None, len(mixing[0]) // 2) if first else slice(len(mixing[0]) // 2, None),
            )

    fm = maps[0].double()
    levels, sizes = fm.component.mixing, [half >> (k + 1) for k in range(int(math.log2(half)) - 1)]
    tree = sketch(x[0], fm.projection.weight.reshape(half, r, 3), list(levels.split(sizes)))
    other = sketch(y[0], fm.projection.weight.reshape(half, r, 3), list(levels.split(sizes)))
    exact = sum(a * b for a, b in zip(tree, other, strict=True)) ** 2
    assert float((fm.phi(x[0]).dense() * fm.psi(y[0]).dense()).sum()) == pytest.approx(exact, rel=1e-5)


def test_polysketch_nears_the_power_of_the_inner_product():
    """The bias falls as 1/r; what vectors at a right angle get is ‖x‖⁴‖y‖⁴/r, but for what signs save."""
    x, y = vectors(8, 16, length=1.0), vectors(8, 16, length=1.0)
    power = (x * y).sum(-1) ** 4
    off = {}
    for r in (50, 500):
        fm = build_feature_map("polysketch", "rademacher", 16, 2 * r)
        off[r] = fm.kernel(x, y) - power
    torch.testing.assert_close(off[50], 10 * off[500], rtol=1e-9, atol=1e-12)
    first, second = torch.eye(4, dtype=F64)[:2]
    fm = build_feature_map("polysketch", "rademacher", 4, 20)
    u, v = (first + second) / 2**0.5, (first - second) / 2**0.5
    assert float(fm.kernel(u, v)) == pytest.approx(0.0, abs=1e-15)  # ω₁² − ω₂² = 0 for signs
    assert float(fm.kernel(first, second)) == pytest.approx(1 / 10)
    with pytest.raises(ConfigError, match="degree 8 needs at least 4 rows"):
        build_feature_map("polysketch", "rademacher", 4, 3, component_params={"degree": 8})
    with pytest.raises(ConfigError, match="polysketch degree is 6; expected 2, 4, 8 or 16"):
        COMPONENTS["polysketch"](degree=6)


# --- positive features of a learned mixture -------------------------------------------------------------------------


def learned(covariance: str, components: int, m: int, seed: int = 0, kernel: str = "softmax") -> FeatureMap:
    """Over a mixture far from its start, the same one for every seed, in fp64."""
    fm = build_feature_map(
        "gmmrf",
        "gmm",
        3,
        m,
        seed=seed,
        component_params={"kernel": kernel},
        projection_params={"covariance": covariance, "components": components},
    ).double()
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in (fm.projection.root, fm.projection.mean):
            parameter += 0.4 * torch.randn(parameter.shape, generator=generator, dtype=F64)
    return fm


@pytest.mark.parametrize("kernel", ["softmax", "gaussian"])
@pytest.mark.parametrize(("covariance", "components"), [("diagonal", 2), ("full", 1), ("full", 3)])
@torch.no_grad()
def test_learned_mixtures_estimate_their_kernel(covariance, components, kernel):
    x, y = vectors(4, 3, length=0.6), vectors(4, 3, length=0.6)
    maps = [learned(covariance, components, 2 * components * 8, seed, kernel) for seed in range(800)]
    exact = torch.zeros(4, dtype=F64)
    root, mean = maps[0].projection.root, maps[0].projection.mean
    for c in range(components):
        sigma = torch.diag(root[c] ** 2) if covariance == "diagonal" else root[c] @ root[c].T
        for i in range(4):
            for sign in (1, -1):  # the moment generating function, and the factors of the two features
                total, power = x[i] + y[i], 0.5 if kernel == "softmax" else 1.0
                exponent = sign * mean[c] @ total + total @ sigma @ total / 2
                exact[i] += (exponent - power * (x[i] @ sigma @ x[i] + y[i] @ sigma @ y[i])).exp() / (2 * components)
    torch.testing.assert_close(maps[0].kernel(x, y), exact, rtol=1e-10, atol=1e-12)
    samples = torch.stack([(fm.phi(x).dense() * fm.psi(y).dense()).sum(-1) for fm in maps])
    within_standard_errors(samples, exact)
    rows, found = maps[0].projection.materialize(), maps[0].phi(x).dense()
    for i, row in itertools.product(range(4), range(len(rows))):  # feature by feature
        c = row % (2 * components) % components
        sigma = torch.diag(root[c] ** 2) if covariance == "diagonal" else root[c] @ root[c].T
        power = 0.5 if kernel == "softmax" else 1.0
        expected = (rows[row] @ x[i] - power * x[i] @ sigma @ x[i]).exp() / len(rows) ** 0.5
        assert float(found[i, row]) == pytest.approx(float(expected), rel=1e-9)


@pytest.mark.parametrize("kernel", ["softmax", "gaussian"])
def test_learned_mixtures_start_as_posrf(kernel):
    params = {"component_params": {"kernel": kernel}, "seed": 4}
    x, y = torch.randn(2, 5, 6)
    fm = build_feature_map("gmmrf", "gmm", 6, 12, **params)
    posrf = build_feature_map("posrf", "gaussian", 6, 12, **params)
    torch.testing.assert_close(fm(x), posrf(x))
    torch.testing.assert_close(fm.kernel(x, y), posrf.kernel(x, y))


def test_learned_mixtures_learn_and_overflow_nothing():
    """Gradients of features and kernel reach roots and means, and are right."""
    fm = learned("full", 2, 8)
    x = torch.randn(2, 3, dtype=F64)
    names = [name for name, _ in fm.projection.named_parameters()]
    assert sorted(names) == ["mean", "root"]

    def outputs(*values):
        return torch.func.functional_call(
            Both(fm, x), dict(zip([f"map.projection.{n}" for n in names], values, strict=True)), ()
        )

    values = tuple(p.detach().clone().requires_grad_() for p in fm.projection.parameters())
    assert torch.autograd.gradcheck(outputs, values)
    long = build_feature_map("gmmrf", "gmm", 64, 64)
    features = long.phi(vectors(4, 64, length=30.0).half())
    assert features.values.isfinite().all()
    assert features.log_scale.isfinite().all()
    with pytest.raises(ConfigError, match="needs rows drawn from 'gmm'"):
        build_feature_map("gmmrf", "orf", 4, 8)


class Both(torch.nn.Module):
    """Features and kernel of one map."""

    def __init__(self, feature_map, x):
        super().__init__()
        self.map, self.x = feature_map, x

    def forward(self):
        return self.map.phi(self.x).dense(), self.map.kernel(self.x, self.x.flip(0))


# --- cosine transforms (DiJiang) ------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 2, 3, 8, 21])
def test_cosine_transform_is_that_of_scipy(n):
    x = torch.randn(2, 3, n, dtype=F64)
    expected = torch.tensor(fft.dct(x.numpy(), type=2, norm="ortho"))
    torch.testing.assert_close(cosine_transform(x), expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(x @ cosine_matrix(n, x).T, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("dim", "m"), [(8, 8), (8, 20), (7, 3), (1, 2)])
@pytest.mark.parametrize("rounds", [1, 2, 3])
def test_dct_rows_are_its_formula(dim, m, rounds):
    w = PROJECTIONS["dct"](dim, m, rounds=rounds)
    f = {key: value.double() for key, value in w.draw_factors(site_generator(0, "")).items()}
    x, blocks = torch.randn(dim, dtype=F64), []
    for block in range(-(-m // dim)):
        z = x.numpy()
        for signs in f["signs"][:, block]:
            z = fft.dct(z * signs.numpy(), type=2, norm="ortho")
        blocks.append(torch.tensor(z))
    rows = w.draw(site_generator(0, ""))
    torch.testing.assert_close(rows @ x, torch.cat(blocks)[f["order"].long()] * f["lengths"], rtol=1e-6, atol=1e-6)
    for block, lengths in zip(rows.split(dim), f["lengths"].split(dim), strict=True):
        torch.testing.assert_close(block @ block.T, lengths.square().diag(), rtol=1e-9, atol=1e-9)
    ranks = stats.chi(dim).cdf(f["lengths"].sort().values.numpy()) * m  # one in each of m equal parts
    assert (abs(ranks - torch.arange(m).numpy() - 0.5) <= 0.5 + 1e-4).all()


def test_dct_rows_have_the_moments_of_gaussian_ones_up_to_the_third():
    """And a fourth moment that is known: E r⁴ = d(d + 2) times the mean fourth power in a column of C for one round."""
    dim, m, draws = 5, 8, 1500
    fourth = torch.tensor(fft.dct(torch.eye(dim).double().numpy(), norm="ortho", axis=0)).pow(4).mean(0)
    drawn = torch.stack(
        [PROJECTIONS["dct"](dim, m, rounds=1, seed=seed).weight.double() for seed in range(draws)]
    ).unbind(1)
    for rows in (drawn[0], drawn[-1]):  # the last one of a block that is cut
        within_standard_errors(rows, torch.zeros(dim, dtype=F64))
        within_standard_errors(rows.unsqueeze(-1) * rows.unsqueeze(-2), torch.eye(dim, dtype=F64))
        within_standard_errors(torch.einsum("na,nb,nc->nabc", rows, rows, rows), torch.zeros(dim, dim, dim, dtype=F64))
        assert stats.kstest(rows.norm(dim=1).numpy(), stats.chi(dim).cdf).pvalue > 1e-3
        within_standard_errors(rows.pow(4), dim * (dim + 2) * fourth)


def test_polysketch_tree_by_all_signs_and_gauss_hermite_nodes():
    """Degree 8 with r = 1: nodes 0, ±√3 integrate the fourth powers of its two Gaussian numbers exactly."""
    x, y = torch.randn(2, 3, 2, dtype=F64)
    fm = build_feature_map("polysketch", "rademacher", 2, 4, component_params={"degree": 8}).double()
    total = torch.zeros(3, dtype=F64)
    nodes = {0.0: 2 / 3, 3**0.5: 1 / 6, -(3**0.5): 1 / 6}
    for signs in itertools.product((-1.0, 1.0), repeat=8):
        fm.projection.weight.copy_(torch.tensor(signs).reshape(4, 2))
        for first, second in itertools.product(nodes, repeat=2):
            fm.component.mixing.copy_(torch.tensor([first, second]).reshape(2, 1, 1))
            product = (fm.phi(x).dense() * fm.psi(y).dense()).sum(-1)
            total += product * nodes[first] * nodes[second] / 256
    torch.testing.assert_close(fm.kernel(x, y), total, rtol=1e-6, atol=1e-9)


# === exponential features over quadratures and rows of one length =====================================================


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
