"""Attention at the norms of real models and ten times as much, in half precision and fp32, against its definition.

The oracle works in fp64 on the very numbers that the layer is given: the weights of all pairs of tokens from the
logarithms of their features. It knows nothing of blocks, chunks, scales or states.
"""

from __future__ import annotations

import copy
import math

import pytest
import torch
from accelerate import cpu_offload

from snnk_peft import build_feature_map
from snnk_peft.components import COMPONENTS
from snnk_peft.components.base import Component
from snnk_peft.components.posrf import Posrf
from snnk_peft.functional import exponential_causal
from snnk_peft.functional.exponential_attention import exponential_attention
from snnk_peft.functional.log_linear import LogLinear
from snnk_peft.layers.feature_stage import FeatureStage
from snnk_peft.layers.kernel_attention import KernelAttention
from snnk_peft.projections import PROJECTIONS
from tests.attention_models import in_pieces

F64 = torch.float64
DIM, LENGTH = 64, 40
ROOT = DIM**-0.25
# ‖x‖² of queries and keys after the temperature: 5 to 20 in BERT; ten times its norms; and what is between.
SQUARES = (10.0, 200.0, 1000.0)
TOLERANCE = {torch.float32: 2e-4, torch.float16: 2e-3, torch.bfloat16: 2e-2}


def estimates_softmax(name: str) -> bool:
    return getattr(COMPONENTS[name](), "kernel_name", None) == "softmax"


SOFTMAX = [name for name in COMPONENTS if estimates_softmax(name)]
CAUSAL = [name for name in SOFTMAX if not COMPONENTS[name].adapts]


def kernel_of(name: str) -> KernelAttention:
    projection = next(p for p in ("orf", "poisson", "geometric") if COMPONENTS[name].fits(PROJECTIONS[p]))
    return KernelAttention([build_feature_map(name, projection, DIM, 64)], 4)


def tensors(square: float, dtype: torch.dtype) -> list[torch.Tensor]:
    """q (1, 4, L, d), k and v (1, 2, L, d)."""
    size = (square / DIM) ** 0.5 / ROOT
    q, k, v = torch.randn(1, 4, LENGTH, DIM), torch.randn(1, 2, LENGTH, DIM), torch.randn(1, 2, LENGTH, DIM)
    return [(q * size).to(dtype), (k * size).to(dtype), v.to(dtype)]


# --- the definition -------------------------------------------------------------------------------------------------


def optimum(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """a of OPRF from the mean S of ‖x + y‖² over all pairs, per key head."""
    S = (x.unsqueeze(-2) + y.unsqueeze(-3)).square().sum(-1).mean((-2, -1))[..., None, None]
    rho = (((2 * S + DIM) ** 2 + 8 * DIM * S).sqrt() - 2 * S - DIM) / (4 * S)
    return (1 - 1 / rho) / 8


def exponents(W: torch.Tensor, x: torch.Tensor, a: torch.Tensor | float = 0.0) -> torch.Tensor:
    return a * W.square().sum(-1) + (1 - 4 * a) ** 0.5 * (x @ W.mT) - x.square().sum(-1, keepdim=True) / 2


def logarithms(name: str, kernel: KernelAttention, x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
    """Signs and logarithms of the features of queries x (B, G, n, d) and keys y, all in fp64."""
    feature_map = kernel.maps()[0]
    W = feature_map.projection.materialize()
    with torch.no_grad():
        a = {"gerf": -0.03, "oprf": optimum(x, y)}.get(name, 0.0)
        if name == "saderf":
            balance = (y.square().mean(-2, keepdim=True) / x.square().mean(-2, keepdim=True)) ** 0.25
            a = optimum(x * balance, y / balance)
    if name in ("posrf", "gerf", "oprf"):
        both = [exponents(W, x, a), exponents(W, y, a)]
    elif name == "saderf":
        both = [exponents(W, x * balance, a), exponents(W, y / balance, a)]
    elif name == "hyprf":
        both = [exponents(torch.cat((W, -W)), t) for t in (x, y)]
    else:  # with signs, or in coordinates of the data: from the features in fp64, in which they do not vanish
        statistics = feature_map.component.statistics(x, y)
        parts = [feature_map.phi(x, statistics), feature_map.psi(y, statistics)]
        logs = [p.values.abs().clamp_min(1e-300).log() + (0.0 if p.log_scale is None else p.log_scale) for p in parts]
        return [parts[0].values.detach().sign(), logs[0], parts[1].values.detach().sign(), logs[1]]
    return [torch.ones_like(both[0]), both[0], torch.ones_like(both[1]), both[1]]


def definition(
    name: str, kernel: KernelAttention, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Σ_j w_ij v_j / Σ_j w_ij, and per row how much its terms cancel: Σ |terms| / |Σ terms|."""
    x = (q * ROOT).unflatten(1, (2, 2)).flatten(2, 3)
    x_sign, a, y_sign, b = logarithms(name, kernel, x, k * ROOT)
    terms = a.unsqueeze(-2) + b.unsqueeze(-3)  # (B, G, n, N, m)
    if causal:
        future = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1).repeat(2, 1)
        terms = terms.masked_fill(future.unsqueeze(-1), -math.inf)
    sizes = (terms - terms.detach().amax((-2, -1), keepdim=True)).exp()
    weights = (sizes * x_sign.unsqueeze(-2) * y_sign.unsqueeze(-3)).sum(-1)
    total = weights.sum(-1, keepdim=True)
    cancelled = sizes.sum((-2, -1)).unsqueeze(-1) / total.abs()
    return tuple(t.unflatten(2, (2, -1)).flatten(1, 2) for t in (weights @ v / total, cancelled.detach()))


def relative(mine: torch.Tensor, exact: torch.Tensor) -> float:
    return ((mine.double() - exact).norm() / exact.norm()).item()


# --- attention ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(
    ("name", "causal"), [(name, False) for name in SOFTMAX] + [(name, True) for name in CAUSAL], ids=str
)
def test_near_the_definition(name, causal, dtype):
    kernel = kernel_of(name).to(dtype)
    exact = copy.deepcopy(kernel).double()
    for square in SQUARES:
        given = [t.requires_grad_() for t in tensors(square, dtype)]
        reference = [t.detach().double().requires_grad_() for t in given]
        expected, cancelled = definition(name, exact, *reference, causal)
        out = kernel(*given, causal=causal)
        assert out.dtype == dtype
        assert (out.abs().amax(-1) > 0).all()
        weight = torch.randn(out.shape)
        largest = torch.finfo(dtype).max
        gradients = torch.autograd.grad((out * weight).float().sum(), given)
        wanted = torch.autograd.grad((expected * weight.to(F64)).sum(), reference)
        if kernel.maps()[0].component.positive:
            assert cancelled.max() < 1 + 1e-9
            assert relative(out, expected) < TOLERANCE[dtype]
            assert out.isfinite().all()
            for mine, gradient in zip(gradients, wanted, strict=True):
                assert relative(mine, gradient) < TOLERANCE[dtype]
        else:
            # What terms of both signs leave of the rounding of W x: as good as their sum is determined.
            error = (out.double() - expected).abs().amax(-1, keepdim=True) / expected.abs().amax(-1, keepdim=True)
            determined = (cancelled < 300) & (expected.abs().amax(-1, keepdim=True) < largest / 2)
            assert determined.double().mean() > 0.5
            assert (error < TOLERANCE[dtype] * cancelled)[determined].all()
            assert out[determined.expand(out.shape)].isfinite().all()
            # 1 / denominator² can be beyond the numbers of fp16: only what is may be infinite.
            rows = determined.expand(gradients[0].shape)
            assert (gradients[0].isfinite() | (wanted[0].abs() > largest / 2))[rows].all()


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("name", CAUSAL)
def test_token_by_token(name, dtype):
    kernel = kernel_of(name).to(dtype)
    exact = copy.deepcopy(kernel).double()
    for square in SQUARES[::2]:
        q, k, v = tensors(square, dtype)
        expected, cancelled = definition(name, exact, q.double(), k.double(), v.double(), True)
        out, state = in_pieces(kernel, (q, k, v), [9, *[1] * 7, 24])
        error = (out.double() - expected).abs().amax(-1, keepdim=True) / expected.abs().amax(-1, keepdim=True)
        assert (error < 2 * TOLERANCE[dtype] * cancelled)[cancelled < 300].all()
        assert {tensor.dtype for tensor in state.sums[0]} == {torch.float32}


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", ["posrf", "hyprf"])
def test_a_hundred_times_the_norms(name, causal):
    """Finite, and no row lost."""
    given = [t.requires_grad_() for t in tensors(1e5, torch.float16)]
    out = kernel_of(name)(*given, causal=causal)
    assert (out.abs().amax(-1) > 1e-3).all()
    assert all(g.isfinite().all() for g in torch.autograd.grad(out.float().sum(), given))


@pytest.mark.parametrize("order", ["rising", "falling", "mixed"])
@pytest.mark.parametrize("careful", [False, True])
def test_causal_keys_of_all_sizes(order, careful, monkeypatch):
    """Norms from a tenth to ten times BERT's in one sequence: scales of keys that are e^hundreds apart."""
    if careful:
        monkeypatch.setattr(exponential_causal, "LEAST", 2.0)  # no denominator is large enough
    q, k, v = tensors(10.0, torch.float32)
    sizes = torch.linspace(0.1, 10, LENGTH)
    sizes = {"rising": sizes, "falling": sizes.flip(0), "mixed": sizes[torch.randperm(LENGTH)]}[order][:, None]
    kernel = kernel_of("posrf")
    given = [t.requires_grad_() for t in (q * sizes, k * sizes, v)]
    reference = [t.detach().double().requires_grad_() for t in given]
    expected, _ = definition("posrf", copy.deepcopy(kernel).double(), *reference, True)
    out = kernel(*given, causal=True)
    torch.testing.assert_close(out.double(), expected, rtol=1e-3, atol=1e-3)
    mine, wanted = (torch.autograd.grad(o.sum(), t) for o, t in ((out, given), (expected, reference)))
    assert all(relative(a, b) < 1e-3 for a, b in zip(mine, wanted, strict=True))


@pytest.mark.parametrize("careful", [False, True])
@pytest.mark.parametrize("projection", ["orf", "sgq"])
def test_both_causal_ways(projection, careful, monkeypatch):
    """Gaps in the mask, padding on the left, a state that is continued; signs of quadratures."""
    if careful:
        monkeypatch.setattr(exponential_causal, "LEAST", 2.0)
    monkeypatch.setattr(exponential_causal, "TOKENS", 8)
    features = build_feature_map("posrf", projection, 6, 13).double()
    kernel = KernelAttention([features], 4).double()
    q, k, v = torch.randn(2, 4, 30, 6, dtype=F64), *torch.randn(2, 2, 2, 30, 6, dtype=F64)
    mask = torch.ones(2, 30, dtype=torch.bool)
    mask[0, :10] = mask[1, 12:21] = False
    phi, psi = features.phi(q * 6**-0.25).dense(), features.psi(k * 6**-0.25).dense()
    weights = (phi @ psi.repeat_interleave(2, 1).mT * mask[:, None, None]).tril()
    expected = (weights @ v.repeat_interleave(2, 1) / weights.sum(-1, keepdim=True)).nan_to_num(0.0)
    torch.testing.assert_close(kernel(q, k, v, mask, causal=True), expected, rtol=1e-9, atol=1e-9)
    found, _ = in_pieces(kernel, (q, k, v), [5, 1, 13, 11], mask)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
    leaves = [t[:1, :, 8:17].clone().requires_grad_() for t in (q, k, v)]
    assert torch.autograd.gradcheck(lambda *t: kernel(*t, mask[:1, 8:17], causal=True), leaves, fast_mode=True)


@pytest.mark.parametrize("leading", [(), (1, 2)])
@pytest.mark.parametrize("square", [0.5, "diagonal", "matrix"])
def test_gradients_block_by_block(leading, square, monkeypatch):
    """Of everything, twice; rows of their own per key head, masks, grouped heads."""
    monkeypatch.setattr("snnk_peft.functional.blocks.FEWEST", 4)
    monkeypatch.setattr("snnk_peft.functional.blocks.BLOCK", 1)
    q, k, v = torch.randn(1, 4, 6, 3, dtype=F64), *torch.randn(2, 1, 2, 6, 3, dtype=F64)
    rows, offset = torch.randn(*leading, 4, 3, dtype=F64), torch.randn(*leading, 4, dtype=F64)
    if square == "diagonal":
        square = torch.rand(*leading, 1, 3, dtype=F64)
    elif square == "matrix":
        square = torch.eye(3, dtype=F64).expand(*leading, 3, 3) + 0.1
    mask = torch.tensor([[True] * 5 + [False]])

    def run(q, k, v, rows, offset, key_rows):
        out, means = exponential_attention(
            q, k, v, LogLinear(rows, offset, square), LogLinear(key_rows, offset, square), mask
        )
        return out, *means

    leaves = [t.clone().requires_grad_() for t in (q, k, v, rows, offset, rows)]
    assert torch.autograd.gradcheck(run, leaves, fast_mode=True)
    assert torch.autograd.gradgradcheck(lambda *t: run(*t)[0], leaves, fast_mode=True)


# --- logarithms and features say the same ---------------------------------------------------------------------------


@pytest.mark.parametrize("kernel", ["softmax", "gaussian"])
@pytest.mark.parametrize("projection", ["orf", "sgq", "free"])
@pytest.mark.parametrize("name", [n for n in SOFTMAX if COMPONENTS[n].log_linear is not Component.log_linear])
def test_logarithms_are_those_of_the_features(name, projection, kernel):
    features = build_feature_map(name, projection, 5, 11, component_params={"kernel": kernel}).double()
    x, y = torch.randn(2, 2, 7, 5, dtype=F64)
    component = features.component
    for statistics in ({}, component.statistics(x, y)):
        for second, given in enumerate((x, y)):
            linear = component.log_linear(features.projection, statistics, bool(second), x)
            square = linear.square
            if isinstance(square, torch.Tensor) and square.shape[-2] > 1:
                norms = ((given @ square) * given).sum(-1, keepdim=True)
            else:
                norms = (given.square() * square).sum(-1, keepdim=True)
            offset = linear.offset if linear.offset.dim() == 1 else linear.offset.unsqueeze(-2)
            logs = given @ linear.rows.mT + offset - norms
            signs = 1.0 if linear.signs is None else linear.signs
            dense = (features.psi if second else features.phi)(given, statistics).dense()
            ratio = dense / (signs * logs.exp())
            assert (ratio > 0).all()  # one factor for all vectors of a set is left out
            torch.testing.assert_close(ratio, ratio[:, :1, :1].expand_as(ratio), rtol=1e-9, atol=0)


def test_a_tower_of_ones_own_has_no_logarithms_of_another():
    class Louder(Posrf):
        def tower(self, x, projection, statistics, second):
            values, scale = super().tower(x, projection, statistics, second)
            return type(super().tower(x, projection, statistics, second))(values.square(), scale)

    features = build_feature_map("posrf", "orf", 4, 8)
    assert features.component.log_linear(features.projection, {}, False, torch.zeros(())) is not None
    assert Louder().log_linear(features.projection, {}, False, torch.zeros(())) is None


# --- cosines and sines ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("options", [{}, {"normalize": True, "scale": 1.5}, {"scale": 0.7}], ids=str)
@pytest.mark.parametrize("name", ["cos", "sin", "trigrf"])
def test_arguments_of_cosines_are_not_rounded(name, options, autocast):
    """bf16 has steps of 1/8 at 16 and more, a good part of a period."""
    params = {"kernel": "gaussian"} if name == "trigrf" else None
    stage = FeatureStage(build_feature_map(name, "orf", 64, 32, component_params=params), **options)
    dtype = torch.float32 if autocast else torch.bfloat16
    stage = stage.to(dtype)
    for square in (10.0, 50.0, 200.0):
        x = (torch.randn(100, 64) * (square / 64) ** 0.5).to(dtype)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            out = stage(x)
        assert out.dtype == dtype
        assert relative(out, copy.deepcopy(stage).double()(x.double())) < 5e-3


# --- the room around attention --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["posrf", "saderf", "derf"])
def test_autocast_lowers_nothing(name):
    kernel, (q, k, v) = kernel_of(name), tensors(100.0, torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        out = kernel(q, k, v)
    assert torch.equal(out, kernel(q, k, v))


def test_tensors_that_come_when_a_module_is_called():
    """accelerate's offloading: what a module holds is elsewhere until it is called."""
    kernel, (q, k, v) = KernelAttention([build_feature_map("posrf", "gmm", DIM, 16)], 4), tensors(10.0, torch.float32)
    expected = kernel(q, k, v)
    cpu_offload(kernel, torch.device("cpu"))
    assert {parameter.device.type for parameter in kernel.maps()[0].parameters()} == {"meta"}
    torch.testing.assert_close(kernel(q, k, v), expected)
