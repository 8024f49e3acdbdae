"""Linear attention against its definition, whole and block by block, and the band of the near field."""

from __future__ import annotations

import pytest
import torch

from snnk_cli.timing import operations
from snnk_peft import build_feature_map
from snnk_peft.errors import ConfigError
from snnk_peft.functional import blocks, exponential_causal
from snnk_peft.functional.linear_attention import causal_linear_attention, common_scale, linear_attention
from snnk_peft.functional.near_field import banded_softmax_attention
from snnk_peft.layers.attention_term import AttentionTerm
from snnk_peft.layers.kernel_attention import KernelAttention, continue_attention
from snnk_peft.parts.attention.interface import kernel_attention_forward
from tests import near_oracle
from tests.linear_oracle import quadratic_attention
from tests.tensor_sizes import LargestTensor

F64 = torch.float64
CLOSE = {"rtol": 1e-10, "atol": 1e-10}


def heads(length: int = 37, heads: int = 4, groups: int = 2, dim: int = 6, size: float = 0.7):
    q = torch.randn(3, heads, length, dim, dtype=F64) * size
    k, v = torch.randn(2, 3, groups, length, dim, dtype=F64)
    return q, k * size, v


def features(q, k, component="posrf", projection="orf", m=16):
    fm = build_feature_map(component, projection, q.shape[-1], m).double()
    statistics = fm.component.statistics(
        q.flatten(0, 1), k.repeat_interleave(q.shape[1] // k.shape[1], 1).flatten(0, 1)
    )
    if statistics:  # one set per head of the keys
        statistics = fm.component.statistics(q.unflatten(1, (k.shape[1], -1)).flatten(2, 3), k)
        phi = fm.phi(q.unflatten(1, (k.shape[1], -1)).flatten(2, 3), statistics)
        return phi.values.unflatten(2, (-1, q.shape[2])).flatten(1, 2), fm.psi(k, statistics)
    return fm.phi(q).values, fm.psi(k)


def lengths_mask(length: int = 37) -> torch.Tensor:
    return torch.arange(length) < torch.tensor([[length], [length - 5], [0]])


@pytest.mark.parametrize("component", ["posrf", "hyprf", "oprf", "saderf", "derf", "relu", "elu"])
@pytest.mark.parametrize("masked", [False, True])
def test_linear_is_quadratic(component, masked):
    """Sums over keys first, or weights first: one result (Katharopoulos et al. 2020)."""
    q, k, v = heads()
    phi, psi = features(q, k, component)
    mask = lengths_mask() if masked else None
    scaled, _ = common_scale(psi.values, psi.log_scale, mask)
    expected, weights = quadratic_attention(phi, scaled, v, mask)
    torch.testing.assert_close(linear_attention(phi, scaled, v, mask), expected, **CLOSE)
    sums = weights.sum(-1)
    torch.testing.assert_close(sums, torch.ones_like(sums) if not masked else sums.round(), **CLOSE)
    if masked:
        assert (expected[2] == 0).all()  # oracle 20: no key counts
    constant = torch.full_like(v, 2.5)
    if not masked:
        torch.testing.assert_close(linear_attention(phi, scaled, constant), torch.full_like(q, 2.5), **CLOSE)


def test_the_stabiliser_changes_nothing():
    """One scale per head against none; and a maximum per key would change the result."""
    q, k, v = heads(size=1.5)
    phi, psi = features(q, k)
    plain = psi.dense()
    scaled, top = common_scale(psi.values, psi.log_scale)
    torch.testing.assert_close(scaled * top.exp().unsqueeze(-1), plain, **CLOSE)
    expected = linear_attention(phi, plain, v)
    torch.testing.assert_close(linear_attention(phi, scaled, v), expected, **CLOSE)
    assert (linear_attention(phi, psi.values, v) - expected).abs().max() > 0.05
    scaled, _ = common_scale(psi.values, psi.log_scale + 2000.0)
    torch.testing.assert_close(linear_attention(phi, scaled, v), expected, **CLOSE)


def test_padding_is_truncation():
    """Masked keys count nothing, also where they are huge."""
    q, k, v = heads()
    mask = lengths_mask()
    k_bad = torch.where(mask[:, None, :, None], k, 40.0)
    phi, psi = features(q, k_bad)
    out = linear_attention(phi, common_scale(psi.values, psi.log_scale, mask)[0], v, mask)
    phi, psi = features(q[1:2], k[1:2, :, :32])
    cut = linear_attention(phi, common_scale(psi.values, psi.log_scale)[0], v[1:2, :, :32])
    torch.testing.assert_close(out[1:2], cut, **CLOSE)


@pytest.mark.parametrize("chunk", [1, 8, 37, 128])
@pytest.mark.parametrize("masked", [False, True])
def test_causal_forms_agree(chunk, masked):
    """Chunked = lower triangle of the quadratic form = one step at a time."""
    q, k, v = heads()
    phi, psi = features(q, k)
    mask = lengths_mask() if masked else None
    scaled, top = common_scale(psi.values, psi.log_scale, mask)
    expected, _ = quadratic_attention(phi, scaled, v, mask, causal=True)
    out, state = causal_linear_attention(phi, psi.values, v, mask, chunk=chunk, log_scale=psi.log_scale)
    torch.testing.assert_close(out, expected, **CLOSE)
    torch.testing.assert_close(state.normaliser, scaled.sum(-2), **CLOSE)
    torch.testing.assert_close(state.log_scale, top, **CLOSE)
    plain, _ = causal_linear_attention(phi, scaled, v, mask, chunk=chunk)
    torch.testing.assert_close(plain, expected, **CLOSE)
    steps, remembered = [], None
    for i in range(q.shape[-2]):
        at = slice(i, i + 1)
        one = None if mask is None else mask[:, at]
        step, remembered = causal_linear_attention(
            phi[:, :, at],
            psi.values[:, :, at],
            v[:, :, at],
            one,
            chunk=1,
            state=remembered,
            log_scale=psi.log_scale[:, :, at],
        )
        steps.append(step)
    torch.testing.assert_close(torch.cat(steps, 2), expected, **CLOSE)
    assert remembered.values.shape == (3, 2, 16, 6)


@pytest.mark.parametrize("order", ["rising", "falling", "mixed"])
@pytest.mark.parametrize("pieces", [[(0, 60)], [(0, 1), (1, 30), (30, 60)]])
def test_large_keys_do_not_erase_the_rows_before_them(order, pieces):
    """Keys whose scales span e^1800: each row is what it would be if the sequence ended with it."""
    length = 60
    q, k, v = heads(length)
    phi, psi = features(q, k)
    scale = torch.linspace(-900, 900, length, dtype=F64)
    scale = {"rising": scale, "falling": scale.flip(0), "mixed": scale[torch.randperm(length)]}[order][:, None]
    scale = (psi.log_scale + scale).requires_grad_()
    mask = torch.ones(3, length, dtype=torch.bool)
    mask[1, :9], mask[2, 20:29] = False, False
    state, parts = None, []
    for begin, end in pieces:
        part, state = causal_linear_attention(
            *(t[:, :, begin:end].float() for t in (phi, psi.values, v)),
            mask[:, begin:end],
            chunk=16,
            state=state,
            log_scale=scale[:, :, begin:end].float(),
        )
        parts.append(part)
    out = torch.cat(parts, 2)
    expected = []
    for i in range(length):
        keys, _ = common_scale(psi.values[:, :, : i + 1], scale[:, :, : i + 1], mask[:, : i + 1])
        expected.append(linear_attention(phi[:, :, i : i + 1], keys, v[:, :, : i + 1]))
    torch.testing.assert_close(out.double(), torch.cat(expected, 2), rtol=1e-4, atol=1e-4)
    assert (out[0].abs().amax(-1) > 1e-3).all()
    (gradient,) = torch.autograd.grad(out.sum(), scale)
    assert gradient.isfinite().all()


def test_gradients():
    q, k, v = heads(5, dim=3)

    def run(q, k, v):
        phi, psi = features(q, k, m=4)
        scaled, _ = common_scale(psi.values, psi.log_scale)
        causal, _ = causal_linear_attention(phi, psi.values, v, chunk=2, log_scale=psi.log_scale)
        return linear_attention(phi, scaled, v), causal

    q, k, v = (t[:1].clone().requires_grad_() for t in (q, k, v))
    assert torch.autograd.gradcheck(run, (q, k, v))


@pytest.mark.parametrize("causal", [False, True])
def test_compiles_in_one_graph(causal):
    q, k, v = (t.float() for t in heads(20))
    fm = build_feature_map("posrf", "orf", 6, 16)

    def run(q, k, v, mask):
        phi, psi = fm.phi(q).values, fm.psi(k)
        if causal:
            return causal_linear_attention(phi, psi.values, v, mask, log_scale=psi.log_scale, chunk=8)[0]
        return linear_attention(phi, common_scale(psi.values, psi.log_scale, mask)[0], v, mask)

    mask = lengths_mask(20)
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(q, k, v, mask), run(q, k, v, mask))


# --- near field -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [1, 2, 5, 37, 100])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_band_is_masked_softmax(width, causal, masked):
    """A band of the whole length is softmax, one of width 1 gives V."""
    q, k, v = heads()
    mask = lengths_mask() if masked else None
    out = banded_softmax_attention(q, k, v, width, mask, causal=causal, scaling=0.4)
    torch.testing.assert_close(out, near_oracle.dense(q, k, v, [], [], None, mask, width, causal, 0.4), **CLOSE)
    if width == 1 and not masked:
        torch.testing.assert_close(out, v.repeat_interleave(2, 1), **CLOSE)
    if masked:
        assert not out[2].any()


def test_band_memory_is_linear():
    """The largest tensor of the band grows with L · width and not with L²."""
    sizes = []
    for length in (256, 1024):
        q, k, v = heads(length)
        with LargestTensor() as largest:
            banded_softmax_attention(q, k, v, 8, causal=True)
        sizes.append(largest.numel)
    assert sizes[1] <= 4.1 * sizes[0]
    assert sizes[1] < 3 * 4 * 1024 * 1024 / 4


def test_band_gradients_and_errors():
    q, k, v = (t[:1].clone().requires_grad_() for t in heads(7, dim=3))
    assert torch.autograd.gradcheck(lambda *t: banded_softmax_attention(*t, 3, causal=True), (q, k, v))
    with pytest.raises(ConfigError, match="2 faults"):
        banded_softmax_attention(q, k[:, :, :3], v[:, :, :3], 0)


# === block by block, so that features never exist whole ===============================================================


LENGTH = 75


def tensors(queries: int = LENGTH) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k, v and a mask: lengths 75 and 60, and a gap that a whole block falls into; key norms that keep growing."""
    q = torch.randn(2, 4, queries, 6, dtype=torch.float64)
    k, v = torch.randn(2, 2, 2, LENGTH, 6, dtype=torch.float64)
    mask = torch.arange(LENGTH) < torch.tensor([[LENGTH], [60]])
    mask[1, 8:34] = False
    return q, k * torch.linspace(0.5, 8.0, LENGTH, dtype=torch.float64)[:, None], v, mask


def kernel(component: str, maps: int = 1) -> KernelAttention:
    features = [build_feature_map(component, "orf", 6, 16, site=str(i)) for i in range(maps)]
    return KernelAttention([AttentionTerm(features)], 4).double()


@pytest.fixture
def small_blocks(monkeypatch):
    """Blocks of 8 tokens."""
    monkeypatch.setattr(blocks, "FEWEST", 8)
    monkeypatch.setattr(blocks, "BLOCK", 1)


def whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "FEWEST", 2**40)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(
    ("component", "maps", "causal", "queries"),
    [
        ("posrf", 1, False, LENGTH),
        ("posrf", 1, True, LENGTH),
        ("posrf", 1, True, 20),  # a cache holds the first 55 keys
        ("posrf", 1, False, 20),
        ("posrf", 2, False, LENGTH),  # one map per key head
        ("posrf", 2, True, LENGTH),
        ("relu", 1, False, LENGTH),  # without scales
        ("relu", 1, True, LENGTH),
        ("saderf", 1, False, LENGTH),  # statistics of all tokens
        ("oprf", 2, False, LENGTH),
    ],
)
def test_blocks_change_nothing(component, maps, causal, queries, masked, small_blocks, monkeypatch):
    attention = kernel(component, maps)
    q, k, v, mask = tensors(queries)
    mask = mask if masked else None

    def results():
        leaves = [t.clone().requires_grad_() for t in (q, k, v)]
        out = attention(*leaves, mask, causal=causal)
        torch.manual_seed(1)
        gradients = torch.autograd.grad((out * torch.randn_like(out)).sum(), leaves)
        with torch.no_grad():
            return out.detach(), attention(q, k, v, mask, causal=causal), *gradients

    assert blocks.block_tokens(q, 16) == 8
    pieces = results()
    whole(monkeypatch)
    for mine, expected in zip(pieces, results(), strict=True):
        torch.testing.assert_close(mine, expected, **CLOSE)


def test_prefill_in_blocks_leaves_the_same_state(small_blocks, monkeypatch):
    attention = kernel("posrf")
    q, k, v, mask = tensors()
    out, state = continue_attention(attention, q, k, v, mask)
    whole(monkeypatch)
    expected, wanted = continue_attention(attention, q, k, v, mask)
    torch.testing.assert_close(out, expected, **CLOSE)
    for mine, sums in zip(state.sums[0], wanted.sums[0], strict=True):
        torch.testing.assert_close(mine, sums, **CLOSE)


@pytest.mark.parametrize("causal", [False, True])
def test_features_never_exist_whole(causal, small_blocks, monkeypatch):
    """With four features per number of the output, the output is the largest tensor that is made."""

    attention = KernelAttention([build_feature_map("posrf", "orf", 6, 24)], 4)
    q, k, v = torch.randn(3, 1, 4, 4096, 6)

    def largest() -> int:
        with torch.no_grad(), LargestTensor() as seen:
            attention(q, k, v, causal=causal)
        return seen.numel

    assert largest() == q.numel()
    whole(monkeypatch)
    assert largest() >= 4 * q.numel()


def test_graphs_and_accelerators_take_all_at_once():
    q = torch.randn(1, 2, 600, 6)
    assert blocks.block_tokens(q, 2**20) == blocks.FEWEST
    assert blocks.block_tokens(q.to("meta"), 2**20) is None
    attention = KernelAttention([build_feature_map("posrf", "orf", 6, 16)], 2)
    traced = torch.jit.trace(lambda q: attention(q, q, q), q, check_trace=False)
    longer = torch.randn(1, 2, 700, 6)
    torch.testing.assert_close(traced(longer), attention(longer, longer, longer))


@pytest.mark.parametrize("columns", [3, 40])
@pytest.mark.parametrize(("component", "maps"), [("posrf", 1), ("posrf", 2), ("hyprf", 1), ("saderf", 1)])
def test_blocks_that_share_memory_hold_the_same_numbers(component, maps, columns, small_blocks, monkeypatch):
    """Without gradients; the last block is shorter, and values are longer or shorter than features (16 or 32)."""
    q, k, _, mask = tensors()
    v = torch.randn(2, 2, LENGTH, columns, dtype=torch.float64)
    attention = kernel(component, maps)
    with torch.no_grad():
        in_blocks = attention(q, k, v, mask)
        whole(monkeypatch)
        torch.testing.assert_close(in_blocks, attention(q, k, v, mask), **CLOSE)


@pytest.mark.parametrize("component", ["posrf", "trigrf", "relu"])  # logarithms, scales, neither
def test_causal_blocks_of_an_accelerator_change_nothing(component, monkeypatch):
    for module in (blocks, exponential_causal):
        monkeypatch.setattr(module, "takes_blocks", lambda x: False)
    layer, (q, k, v, mask) = kernel(component), tensors()
    found = []
    for longest in (2**40, 16):
        monkeypatch.setattr(blocks, "LONGEST", longest)
        assert blocks.causal_tokens(q, 16) == longest
        leaves = [tensor.clone().requires_grad_() for tensor in (q, k / 4, v)]
        out = layer(*leaves, mask, causal=True)
        found.append([out, *torch.autograd.grad(out.square().sum(), leaves)])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, **CLOSE)


def test_causal_attention_on_an_accelerator_takes_memory_linear_in_length():
    layer = KernelAttention([build_feature_map("posrf", "orf", 64, 64)], 1).to("meta")
    largest = []
    for length in (16384, 65536):
        q = torch.empty(1, 1, length, 64, device="meta")
        with LargestTensor(meta=True) as seen, torch.no_grad():
            layer(q, q, q, causal=True)
        largest.append(seen.numel)
    assert 0 < largest[1] <= 4 * largest[0]


@pytest.mark.parametrize("causal", [False, True], ids=["", "causal"])
def test_positions_that_nothing_reads_are_not_formed(causal):
    """In no layer of an encoder, and not beside the one launch of a generated token."""
    module = torch.nn.Module()
    module.is_causal, module.snnk_kernel = causal, KernelAttention([build_feature_map("posrf", "orf", 8, 16)], 4)
    q, k, v = (torch.randn(2, heads, 9, 8) for heads in (4, 2, 2))
    found = operations(lambda: kernel_attention_forward(module, q, k, v, None))
    assert not [name for name in found if "arange" in name]
