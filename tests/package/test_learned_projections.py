"""Learned weight matrices: they start at the matrix they replace, follow their formulas, learn, and draw noise anew."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from scipy.linalg import hadamard
from torch import nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from snnk_peft import COMPONENTS, PROJECTIONS, FFNPart, SNNKConfig, build_feature_map, bundle
from snnk_peft import get_snnk_model as patch
from snnk_peft.errors import ConfigError
from snnk_peft.feature_map import FeatureMap, advance
from snnk_peft.projections.base import Projection
from snnk_peft.projections.base_drawn import site_generator
from snnk_peft.projections.base_learned import Learned
from tests.sampling import within_standard_errors
from tests.tiny_models import inputs_for, tiny, trained

CASES: list[tuple[str, dict[str, Any]]] = [
    ("free", {}),
    ("free", {"init": "orf"}),
    ("free", {"bias": True}),
    ("gmm", {}),
    ("gmm", {"components": 1, "covariance": "full"}),
    ("gmm", {"components": 3, "covariance": "full"}),
    ("fastfood_learned", {}),
    ("fastfood_learned", {"learn": "S"}),
    ("generative", {}),
    ("inn", {}),
    ("inn", {"layers": 1}),
    ("bbq", {}),
    ("bbq", {"points": "random", "segments": 1}),
]
IDS = ["-".join([name, *map(str, params.values())]) for name, params in CASES]
cases = pytest.mark.parametrize(("name", "params"), CASES, ids=IDS)
RESAMPLED = [*(case for case in CASES if case[0] != "free"), ("gaussian", {}), ("orf", {})]
resampled = pytest.mark.parametrize(
    ("name", "params"), RESAMPLED, ids=["-".join([n, *map(str, p.values())]) for n, p in RESAMPLED]
)


def make(name: str, params: dict[str, Any], dim: int = 6, m: int = 20, **kwargs: Any) -> Projection:
    return PROJECTIONS[name](dim, m, **{"seed": 3, "site": "layer.0", **params, **kwargs})


def moved(w: Projection, size: float = 0.2) -> Projection:
    """The matrix with every learned number changed, as if it had been trained."""
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for parameter in w.parameters():
            parameter += size * torch.randn(parameter.shape, generator=generator).to(parameter)
    return w


def state(module: nn.Module) -> dict[str, torch.Tensor]:
    return {key: value.clone() for key, value in module.state_dict().items()}


def assert_same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> None:
    assert first.keys() == second.keys()
    assert [key for key in first if not torch.equal(first[key], second[key])] == []


def cosine_kernel(w: Projection, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """What cos/sin features estimate with the rows of w: Σ a_i cos(ω_i·(x − y))."""
    return torch.cos((x - y) @ w.materialize().T) @ w.feature_weights


def test_all_learned_members_are_here():
    # `centroids` stands for no distribution: see test_attention_fit.py.
    learned = {name for name in PROJECTIONS if PROJECTIONS[name].trainable}
    assert learned - {"centroids"} == {name for name, _ in CASES}
    assert all(issubclass(PROJECTIONS[name], Learned) for name, _ in CASES)


# --- the start ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "params", "replaced"),
    [
        ("free", {}, "gaussian"),
        ("free", {"init": "orf"}, "orf"),
        ("gmm", {}, "gaussian"),
        ("gmm", {"covariance": "full", "components": 3}, "gaussian"),
        ("generative", {}, "gaussian"),
        ("inn", {}, "gaussian"),
        ("bbq", {"points": "random"}, "gaussian"),
    ],
)
@pytest.mark.parametrize(("dim", "m"), [(6, 20), (16, 16), (5, 7), (1, 6)])
def test_starts_as_the_very_matrix_it_replaces(name, params, replaced, dim, m):
    assert torch.equal(make(name, params, dim, m).materialize(), make(replaced, {}, dim, m).materialize())


@cases
@pytest.mark.parametrize(("dim", "m"), [(8, 16), (6, 21)], ids=["powers-of-two", "odd-sizes"])
@pytest.mark.parametrize("component", ["relu", "cos"])
def test_estimates_are_unbiased_at_the_start(name, params, dim, m, component):
    f = COMPONENTS[component]()
    x = torch.randn(4, dim, dtype=torch.float64) * dim**-0.5
    other = torch.randn(4, dim, dtype=torch.float64) * dim**-0.5
    y = torch.stack([other[0], x[1] + 0.3 * other[1], -x[2], x[3]])
    with torch.no_grad():
        maps = [make(name, params, dim, m, seed=seed).double() for seed in range(300)]
        assert all(w.uniform for w in maps)
        samples = torch.stack([(f.phi(x, w).dense() * f.psi(y, w).dense()).sum(-1) for w in maps])
    within_standard_errors(samples, f.kernel(x, y))


@pytest.mark.parametrize("learn", ["S", "SGB"])
@pytest.mark.parametrize("dim", [8, 5])
def test_rows_of_fastfood_are_gaussian(learn, dim):
    """Vx ~ N(0, ‖x‖²), for padded dimensions too."""
    from scipy import stats

    x = torch.randn(dim)
    with torch.no_grad():
        z = torch.cat([make("fastfood_learned", {"learn": learn}, dim, 3, seed=s)(x)[:1] for s in range(1500)])
    assert stats.kstest((z / x.norm()).numpy(), "norm").pvalue > 1e-3


def test_sobol_points_beat_random_ones():
    x, y = torch.randn(50, 3) * 0.5, torch.randn(50, 3) * 0.5
    exact = torch.exp(-(x - y).square().sum(-1) / 2)

    def error(points: str) -> float:
        matrices = [make("bbq", {"points": points}, 3, 64, seed=seed) for seed in range(20)]
        with torch.no_grad():
            return float(torch.stack([(cosine_kernel(w, x, y) - exact).square() for w in matrices]).mean())

    assert error("sobol") < 0.5 * error("random")


# --- what every learned matrix promises -----------------------------------------------------------------------------


@cases
def test_product_with_the_matrix_after_training(name, params):
    w = moved(make(name, params, 6, 21).double())
    x = torch.randn(2, 3, 6, dtype=torch.float64)
    dense = w.materialize()
    assert dense.shape == (21, 6)
    added = torch.zeros(21, dtype=torch.float64) if w.bias is None else w.bias
    assert bool(added.any()) == bool(params.get("bias"))
    torch.testing.assert_close(w(x), x @ dense.T + added, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(w.squared_row_norms(), dense.square().sum(1))
    expected = nn.functional.layer_norm(x, (6,)) * 0.5 @ dense.T + added
    torch.testing.assert_close(w.normalized(x, 0.5), expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(w.feature_weights.sum(), torch.ones((), dtype=torch.float64))
    assert (w.trainable, w.redrawable, w.unbiased) == (True, False, False)


@cases
def test_gradients_of_matrix_and_product_are_right(name, params):
    w = moved(make(name, params, 3, 6).double())
    names = [key for key, _ in w.named_parameters()]
    x = torch.randn(2, 3, dtype=torch.float64)

    def outputs(*values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        class Both(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.w = w

            def forward(self) -> tuple[torch.Tensor, torch.Tensor]:
                return self.w.materialize(), self.w(x)

        return functional_call(Both(), {f"w.{key}": value for key, value in zip(names, values, strict=True)}, ())

    values = tuple(parameter.detach().clone().requires_grad_() for parameter in w.parameters())
    assert torch.autograd.gradcheck(outputs, values)


@cases
def test_learns_a_target_kernel(name, params):
    """Every learned number gets a gradient, and some steps bring the estimates closer to another kernel."""
    scale = torch.tensor([0.3, 0.3, 2.0, 2.0, 1.0, 1.0])
    x, y = torch.randn(200, 6) * 0.7, torch.randn(200, 6) * 0.7
    target = torch.exp(-((x - y) * scale).square().sum(-1) / 2) * torch.cos((x - y)[:, 0])
    w = make(name, params, 6, 64)
    optimizer = torch.optim.Adam(w.parameters(), lr=0.02)
    # A function of x − y cannot see what is added to both.
    learned = {key: value for key, value in w.named_parameters() if key != "bias"}
    before = {key: value.detach().clone() for key, value in learned.items()}
    errors = []
    for step in range(60):
        loss = (cosine_kernel(w, x, y) - target).square().mean()
        errors.append(float(loss.detach()))
        optimizer.zero_grad()
        loss.backward()
        if step == 3:
            for key, parameter in learned.items():
                assert parameter.grad is not None, key
                # a parameter with a whole row of zeros would be dead weight
                assert bool(parameter.grad.any()), key
        optimizer.step()
    assert errors[-1] < 0.75 * errors[0]
    assert all(not torch.equal(before[key], value) for key, value in learned.items())


def test_a_learned_bias_starts_at_zero_and_moves():
    w, plain = make("free", {"bias": True}), make("free", {})
    x = torch.randn(50, 6)
    assert torch.equal(w(x), plain(x))
    wanted = plain(x).detach() + torch.linspace(-1, 1, 20)
    optimizer = torch.optim.Adam(w.parameters(), lr=0.05)
    for _ in range(200):
        optimizer.zero_grad()
        (w(x) - wanted).square().mean().backward()
        optimizer.step()
    torch.testing.assert_close(w.bias.detach(), torch.linspace(-1, 1, 20), rtol=0, atol=0.02)


@cases
def test_forward_is_deterministic_and_changes_nothing(name, params):
    w = moved(make(name, params, redraw_every=None if name == "free" else 1))
    x, before, rng = torch.randn(4, 6), state(w), torch.get_rng_state()
    trained_output = w.train()(x)
    assert torch.equal(w(x), trained_output)
    assert torch.equal(w.eval()(x), trained_output)
    torch.testing.assert_close(w(x[:2]), trained_output[:2])
    w.train()
    checkpoint(w, x.requires_grad_(), use_reentrant=False).sum().backward()
    assert_same(before, state(w))
    assert torch.equal(rng, torch.get_rng_state())


@cases
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_draws_do_not_depend_on_the_default_dtype(name, params, dtype):
    expected = state(make(name, params))
    torch.set_default_dtype(dtype)
    try:
        found = state(make(name, params))
    finally:
        torch.set_default_dtype(torch.float32)
    assert {value.dtype for value in found.values()} <= {torch.float32, torch.int64}
    assert_same(expected, found)


# --- gmm ------------------------------------------------------------------------------------------------------------


def mixture(covariance: str, components: int, m: int, dim: int = 3, **kwargs: Any) -> Any:
    """A mixture far from its start, in fp64."""
    w: Any = PROJECTIONS["gmm"](dim, m, covariance=covariance, components=components, **kwargs).double()
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        w.root.add_(0.4 * torch.randn(w.root.shape, generator=generator, dtype=torch.float64))
        w.mean.add_(0.8 * torch.randn(w.mean.shape, generator=generator, dtype=torch.float64))
    return w


@pytest.mark.parametrize("components", [1, 3])
@pytest.mark.parametrize("covariance", ["diagonal", "full"])
@torch.no_grad()
def test_gmm_estimates_its_kernel(covariance, components):
    """The mean is the exact kernel, in a large sample and over many small ones; also where groups differ in size."""
    x, y = torch.randn(5, 3, dtype=torch.float64), torch.randn(5, 3, dtype=torch.float64)
    w = mixture(covariance, components, 60_000)
    means, sigmas = w.mean.double(), w.covariances()
    exact = torch.zeros(5, dtype=torch.float64)
    for mean, sigma in zip(means, sigmas, strict=True):
        for i, delta in enumerate(x - y):
            exact[i] += torch.exp(-delta @ sigma @ delta / 2) * torch.cos(mean @ delta) / components
    torch.testing.assert_close(w.kernel(x, y), exact, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(w.kernel(x, x), torch.ones(5, dtype=torch.float64), rtol=1e-14, atol=0)
    torch.testing.assert_close(w.kernel(y, x), exact, rtol=1e-12, atol=1e-12)
    terms = torch.cos((x - y) @ w.materialize().T)
    limit = 5 * terms.std(-1) / w.num_features**0.5
    assert ((terms @ w.feature_weights - exact).abs() < limit).all()
    torch.testing.assert_close(cosine_kernel(w, x, x), torch.ones(5, dtype=torch.float64), rtol=1e-12, atol=0)

    for m in (2 * components, 2 * components + 1):
        small = [mixture(covariance, components, m, seed=seed) for seed in range(1500)]
        samples = torch.stack([cosine_kernel(w, x, y) for w in small])
        within_standard_errors(samples, small[0].kernel(x, y))


def test_gmm_shares_of_the_rows():
    assert mixture("full", 3, 12).shares().tolist() == [1 / 3] * 3
    assert mixture("full", 3, 13).shares().tolist() == [5 / 13, 4 / 13, 4 / 13]
    assert mixture("full", 3, 16).shares().tolist() == [6 / 16, 5 / 16, 5 / 16]


@torch.no_grad()
def test_gmm_through_components():
    """cos and sin add up to K(x, x) = 1; phases, spread evenly over the rows, cancel in every component by itself."""
    x, y = torch.randn(2, 4, 3, dtype=torch.float64)
    w = mixture("full", 3, 12)
    parts = (COMPONENTS["cos"](phases=False), COMPONENTS["sin"]())
    total = sum((f.phi(x, w).dense() * f.psi(x, w).dense()).sum(-1) for f in parts)
    torch.testing.assert_close(total, torch.ones(4, dtype=torch.float64))
    f = COMPONENTS["cos"]()
    y[2:] = -x[2:]  # where x + y = 0, phases that do not cancel would show most
    matrices = [mixture("full", 3, 12, seed=seed) for seed in range(1500)]
    samples = torch.stack([(f.phi(x, w).dense() * f.psi(y, w).dense()).sum(-1) for w in matrices])
    within_standard_errors(samples, w.kernel(x, y) / 2)


@torch.no_grad()
def test_gmm_rows_are_symmetric():
    """Each component has as many rows around −μ as around +μ, each with its covariance."""
    w = mixture("full", 3, 60_000)
    for component in range(3):
        plus, minus = w.materialize()[component::6], w.materialize()[component + 3 :: 6]
        for rows, mean in ((plus, w.mean[component]), (minus, -w.mean[component])):
            assert ((rows.mean(0) - mean).abs() < 5 * rows.std(0) / len(rows) ** 0.5).all()
            sigma = w.covariances()[component]
            spread = (sigma.diag()[:, None] * sigma.diag() + sigma.square()).sqrt()
            assert ((rows.T.cov() - sigma).abs() < 5 * spread / len(rows) ** 0.5).all()


def test_gmm_components_are_told_apart_by_their_noise():
    w: Any = make("gmm", {"components": 2}, 4, 32)
    x, y = torch.randn(20, 4), torch.randn(20, 4)
    (cosine_kernel(w, x, y) - 0.5).square().mean().backward()
    assert not torch.allclose(w.root.grad[0], w.root.grad[1])
    assert w.mean.grad.abs().min() > 0  # with noise shared by +μ and −μ this would be exactly 0
    assert not torch.allclose(w.mean.grad[0], w.mean.grad[1])


@torch.no_grad()
def test_gmm_variances():
    """Theorem 3 as corrected, within 2% at 2e6 draws.

    The paper's theorem for cos/sin shares the noise of +μ and −μ; our rows are independent.
    """
    draws = 2_000_000
    w: Any = PROJECTIONS["gmm"](3, 2 * draws, components=1, covariance="full").double()
    w.root.copy_(torch.tensor([[0.6, 0.2, 0.0], [-0.1, 0.5, 0.1], [0.2, 0.0, 0.7]]))
    w.mean.copy_(torch.tensor([0.3, -0.4, 0.2]))
    q, k = torch.tensor([[0.4, -0.5, 0.3], [-0.3, 0.2, 0.4]], dtype=torch.float64)
    mean, p, o = w.mean[0], k - q, q + k
    plus, minus = w.materialize()[::2], w.materialize()[1::2]
    close = {"rtol": 0.02, "atol": 0.0}

    norms = q.square().sum() + k.square().sum()
    for rows, mu in ((plus, mean), (minus, -mean)):
        s = (w.root[0].T @ o).square().sum()
        expected = torch.exp(-2 * (norms - mu @ o)) * (torch.exp(2 * s) - torch.exp(s))
        torch.testing.assert_close(torch.exp(rows @ o - norms).var(), expected, **close)

    s, angle = (w.root[0].T @ p).square().sum(), mean @ p
    one_row = (1 + torch.exp(-2 * s) * torch.cos(2 * angle)) / 2 - torch.exp(-s) * angle.cos().square()
    torch.testing.assert_close(torch.cos(plus @ p).var(), one_row, **close)
    torch.testing.assert_close(torch.cos(minus @ p).var(), one_row, **close)
    paired = w.noise[::2] @ w.root[0].T
    estimate = (torch.cos((paired + mean) @ p) + torch.cos((paired - mean) @ p)) / 2
    torch.testing.assert_close(estimate.var(), angle.cos().square() * (1 - torch.exp(-s)).square() / 2, **close)


# --- fastfood_learned -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("learn", ["S", "SGB"])
@pytest.mark.parametrize(("dim", "m"), [(8, 8), (8, 20), (6, 21), (5, 3), (1, 3)])
def test_fastfood_is_its_formula(learn, dim, m):
    """Fast apply = dense S H G Π H B / √d, 1e-12."""
    w: Any = moved(make("fastfood_learned", {"learn": learn}, dim, m).double())
    d, blocks = w.order, w.blocks
    H = torch.tensor(hadamard(d), dtype=torch.float64)
    rows = []
    for block in range(blocks):
        order = w.permutation[block * d : (block + 1) * d] - block * d
        assert sorted(order.tolist()) == list(range(d))
        permute = torch.eye(d, dtype=torch.float64)[order]
        signs = torch.diag(nn.functional.pad(w.signs[block], (0, d - dim)))
        rows.append(H @ torch.diag(w.gauss[block] / w.gauss[block].norm()) @ permute @ H @ signs)
    expected = w.lengths[:, None] * torch.cat(rows)[:m, :dim] / d**0.5
    torch.testing.assert_close(w.materialize(), expected, rtol=1e-12, atol=1e-12)
    assert {key for key, _ in w.named_parameters()} == {"lengths", *(("gauss", "signs") if learn == "SGB" else ())}
    if learn == "S" and dim == d:
        torch.testing.assert_close(w.materialize().norm(dim=1), w.lengths.abs())


@pytest.mark.parametrize("learn", ["S", "SGB"])
def test_fastfood_keeps_no_dense_matrix(learn):
    w = make("fastfood_learned", {"learn": learn}, 512, 512)
    held = [*w.parameters(), *w.buffers()]
    assert sum(value.numel() * value.element_size() for value in held) <= 512 * 512 * 4 / 10
    assert not hasattr(w, "weight")
    assert not hasattr(w, "noise")
    w(torch.randn(2, 512)).sum().backward()
    assert sum(value.numel() for value in w.parameters()) == (512 if learn == "S" else 3 * 512)


# --- generative, inn, bbq -------------------------------------------------------------------------------------------


def test_generative_is_the_network_of_the_paper():
    """With skip = 0 it is the paper's generator, built here from torch's layers in training mode."""
    w: Any = moved(make("generative", {}, 5, 30).double())
    layers: list[nn.Module] = []
    for weight, scale, shift in zip(w.hidden, w.row_scale, w.row_shift, strict=True):
        linear, norm = nn.Linear(5, 5, bias=False).double(), nn.BatchNorm1d(5).double()
        linear.weight, norm.weight, norm.bias = nn.Parameter(weight), nn.Parameter(scale), nn.Parameter(shift)
        layers += [linear, norm, nn.LeakyReLU()]
    last = nn.Linear(5, 5).double()
    last.weight, last.bias = w.out, w.out_bias
    network = nn.Sequential(*layers, last, nn.Tanh()).train()
    with torch.no_grad():
        torch.testing.assert_close(w.materialize(), w.skip * w.noise + w.gain * network(w.noise))
        w.skip.zero_()
        w.gain.fill_(1.0)
        torch.testing.assert_close(w.materialize(), network(w.noise))
        assert w.materialize().abs().max() < 1


@cases
def test_autocast_does_not_lower_the_matrix(name, params):
    w = moved(make(name, params))
    expected = w.materialize()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = w.materialize()
    assert found.dtype == torch.float32
    assert torch.equal(found, expected)


def test_generative_in_half_precision_normalises_in_fp32():
    w: Any = moved(make("generative", {}, 8, 64))
    half = copy.deepcopy(w).to(torch.bfloat16)
    torch.testing.assert_close(half.materialize().float(), w.materialize(), rtol=0.1, atol=0.1)


@pytest.mark.parametrize("layers", [1, 2, 5])
@pytest.mark.parametrize("dim", [1, 2, 7])
def test_inn_is_invertible(layers, dim):
    w: Any = moved(make("inn", {"layers": layers}, dim, 12).double(), 0.5)
    with torch.no_grad():
        rows = w.materialize()
        assert not torch.allclose(rows, w.noise)
        torch.testing.assert_close(w.inverse(rows), w.noise, rtol=1e-9, atol=1e-9)
        other = torch.randn(4, dim, dtype=torch.float64)
        assert w.inverse(other).shape == (4, dim)


@pytest.mark.parametrize("segments", [1, 2, 8])
def test_bbq_quantiles_are_increasing_and_continuous(segments):
    w: Any = moved(make("bbq", {"segments": segments}, 3, 50).double(), 0.7)
    levels = torch.linspace(1e-6, 1 - 1e-6, 20001, dtype=torch.float64)[:, None].expand(-1, 3)
    with torch.no_grad():
        values = w.quantile(levels)
        steps = values.diff(dim=0)
        assert (steps > 0).all()
        middle = steps[1000:-1000]  # a jump would be far above the steps around it
        assert middle.max() / middle.min() < math.exp(2 * 0.7 * 4) * 10
        torch.testing.assert_close(w.quantile(torch.full((1, 3), 0.5, dtype=torch.float64))[0], w.offset)
        start: Any = make("bbq", {"segments": segments}, 3, 50).double()
        torch.testing.assert_close(start.quantile(levels), torch.special.ndtri(levels), rtol=0, atol=0)
        # slopes: the derivative in z of each interval of equal probability
        z = torch.special.ndtri((torch.arange(segments, dtype=torch.float64) + 0.5) / segments)[:, None].expand(-1, 3)
        slope = (w.warp(z + 1e-4) - w.warp(z - 1e-4)) / 2e-4
        torch.testing.assert_close(slope, w.log_slope.exp().T, rtol=1e-8, atol=1e-8)


# --- drawing anew ---------------------------------------------------------------------------------------------------


def draw_of(w: Projection) -> list[torch.Tensor]:
    """What is random in a matrix."""
    return [getattr(w, name).clone() for name in w.draw_buffers(site_generator(0))]


def identical(first: list[torch.Tensor], second: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@resampled
def test_advance_draws_every_k_steps(name, params):
    w = make(name, params, redraw_every=3)
    model = nn.Sequential(nn.ModuleDict({"map": FeatureMap(COMPONENTS["relu"](), w)}), nn.Linear(2, 2))
    assert identical(draw_of(w), draw_of(make(name, params)))  # the first draw is the one of a matrix that keeps it
    rng = torch.get_rng_state()
    learned = {key: value.detach().clone() for key, value in w.named_parameters()}
    seen = [draw_of(w)]
    for step in range(1, 10):
        advance(model)
        assert int(w.steps) == step
        assert identical(seen[-1], draw_of(w)) == (step % 3 != 0)
        seen.append(draw_of(w))
    assert all(not identical(seen[i], seen[j]) for i in (0, 3, 6, 9) for j in (0, 3, 6, 9) if i != j)
    model.eval()
    before = state(w)
    for _ in range(5):
        advance(model)
    assert_same(before, state(w))
    assert_same(learned, {key: value.detach() for key, value in w.named_parameters()})
    assert torch.equal(rng, torch.get_rng_state())
    w.redraw()  # what a loader may call: gives the present draw, not the first
    assert_same(before, state(w))


@resampled
def test_a_resumed_run_continues_bit_for_bit(name, params):
    x = torch.randn(30, 6)
    target = torch.exp(-x.square().sum(-1))

    def run(w: Projection, steps: int) -> None:
        for _ in range(steps):
            loss = (cosine_kernel(w, x, torch.zeros(6)) - target).square().mean()
            if w.trainable:
                w.zero_grad()
                loss.backward()
                with torch.no_grad():
                    for parameter in w.parameters():
                        parameter -= 0.1 * parameter.grad
            advance(w)

    straight = make(name, params, redraw_every=3)
    run(straight, 8)
    first = make(name, params, redraw_every=3)
    run(first, 4)
    resumed = PROJECTIONS[name](6, 20, seed=3, site="layer.0", **first.params)
    assert resumed.redraw_every == 3
    resumed.load_state_dict(state(first))
    run(resumed, 4)
    assert_same(state(straight), state(resumed))
    assert resumed.steps.dtype == torch.int64


@resampled
def test_draws_follow_casts_and_meta(name, params):
    w = make(name, params, redraw_every=1).to(torch.bfloat16)
    wide = make(name, params, redraw_every=1)
    for module in (w, wide):
        module.advance()
    assert w.steps.dtype == torch.int64
    for low, full in zip(draw_of(w), draw_of(wide), strict=True):
        assert low.dtype == (torch.bfloat16 if full.is_floating_point() else full.dtype)
        assert torch.equal(low, full.to(low.dtype))
    with torch.device("meta"):
        empty = make(name, params, redraw_every=1)
    assert empty.state_dict().keys() == wide.state_dict().keys()
    assert empty.steps.is_meta
    empty.load_state_dict(state(wide), assign=True)
    assert_same(state(empty), state(wide))


def test_two_places_draw_differently_and_sharing_counts_once():
    first, second = (make("gmm", {}, site=site, redraw_every=2) for site in ("a", "b"))
    model = nn.ModuleList([first, second, first])
    for _ in range(2):
        advance(model)
    assert int(first.steps) == 2
    assert not identical(draw_of(first), draw_of(second))


def test_without_redraw_every_nothing_is_counted():
    for name in ("gaussian", "orf", "landmark", *sorted({name for name, _ in CASES})):
        w = PROJECTIONS[name](4, 8)
        before = state(w)
        advance(w)
        assert "steps" not in before
        assert "redraw_every" not in w.params
        assert_same(before, state(w))


# --- errors ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("every", [0, -3, 2.0, True, "100"])
@pytest.mark.parametrize("name", ["gaussian", "orf", "gmm", "generative"])
def test_bad_intervals(name, every):
    with pytest.raises(ConfigError, match=r"redraw_every is .*expected an integer >= 1 .*or None"):
        PROJECTIONS[name](4, 8, redraw_every=every)


def test_what_cannot_be_drawn_anew():
    with pytest.raises(ConfigError, match="nothing is random"):
        PROJECTIONS["free"](4, 8, redraw_every=10)
    with pytest.raises(ConfigError, match="nothing is random"):
        PROJECTIONS["landmark"](4, 8, redraw_every=10)
    for name in ("gaussian", "orf"):
        with pytest.raises(ConfigError, match=r"redraw_every=10 with save_projection=False.*save_projection=True"):
            PROJECTIONS[name](4, 8, redraw_every=10, save=False)


def test_bad_options_are_all_named_at_once():
    with pytest.raises(ConfigError) as caught:
        PROJECTIONS["gmm"](0, 8, components=0, covariance="spherical", redraw_every=0)
    assert len(caught.value.faults) == 4
    for text in ("dim is 0", "components is 0", "'spherical'; expected 'diagonal' or 'full'", "redraw_every is 0"):
        assert text in str(caught.value)
    with pytest.raises(ConfigError, match="num_features is 5 with 3 components; expected at least 6"):
        PROJECTIONS["gmm"](4, 5, components=3)
    with pytest.raises(ConfigError, match="free init is 'haar'; expected 'gaussian' or 'orf'"):
        PROJECTIONS["free"](4, 8, init="haar")
    with pytest.raises(ConfigError, match="learn is 'GB'; expected 'S' or 'SGB'"):
        PROJECTIONS["fastfood_learned"](4, 8, learn="GB")
    for layers in (0, 2.0, True):
        with pytest.raises(ConfigError, match="inn layers is"):
            PROJECTIONS["inn"](4, 8, layers=layers)
    with pytest.raises(ConfigError, match="segments is 0") as caught:
        PROJECTIONS["bbq"](4, 8, segments=0, points="halton")
    assert len(caught.value.faults) == 2
    with pytest.raises(ConfigError, match="at most 21201, use points='random'"):
        PROJECTIONS["bbq"](21202, 8)
    with pytest.raises(ConfigError, match="parameter 'component' is unknown; valid: components, covariance"):
        build_feature_map("relu", "gmm", 4, 8, projection_params={"component": 2})


# --- in a model -----------------------------------------------------------------------------------------------------


def test_in_a_whitened_ffn():
    """Whitening folds into the learned rows."""
    part = FFNPart("relu", "gmm", 9, linear_path=True, train_contraction=True)
    model = trained(patch(tiny("bert"), SNNKConfig(ffn=part)))
    batch = inputs_for(model)
    with torch.no_grad():
        torch.testing.assert_close(bundle(model)(**batch).logits, model(**batch).logits, rtol=1e-4, atol=1e-5)


def test_fastfood_many_vectors_go_through_the_matrix_and_few_through_the_transform(monkeypatch):
    """Both ways give the same, gradients included; which one is taken depends on the sizes."""
    w = make("fastfood_learned", {}, 24, 40)
    x = torch.randn(100, 24)
    seen = []
    plain = type(w)._product
    monkeypatch.setattr(type(w), "_product", lambda self, x: (seen.append(x.shape[0]), plain(self, x))[1])
    found = {}
    for name, parts in (("many", [x]), ("few", x.split(10))):
        w.zero_grad()
        out = torch.cat([w(part) for part in parts])
        out.square().sum().backward()
        found[name] = [out.detach(), *(parameter.grad.clone() for parameter in w.parameters())]
    assert seen == [24, *[10] * 10]
    for many, few in zip(found["many"], found["few"], strict=True):
        torch.testing.assert_close(many, few, rtol=1e-4, atol=1e-4)
