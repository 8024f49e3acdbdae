"""Linear attention against its definition: oracles 18 to 22 and 33."""

from __future__ import annotations

import pytest
import torch

from snnk_peft import build_feature_map
from snnk_peft.errors import ConfigError
from snnk_peft.functional.causal_attention import causal_linear_attention
from snnk_peft.functional.linear_attention import common_scale, linear_attention
from snnk_peft.functional.near_field import banded_softmax_attention
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


def test_prefill_in_pieces():
    q, k, v = heads(50)
    phi, psi = features(q, k)
    expected, _ = causal_linear_attention(phi, psi.values, v, log_scale=psi.log_scale)
    state, parts = None, []
    for piece in (slice(0, 7), slice(7, 40), slice(40, 50)):
        part, state = causal_linear_attention(
            *(t[:, :, piece] for t in (phi, psi.values, v)),
            chunk=16,
            state=state,
            log_scale=psi.log_scale[:, :, piece],
        )
        parts.append(part)
    torch.testing.assert_close(torch.cat(parts, 2), expected, **CLOSE)


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


def test_no_gradient_from_the_future():
    q, k, v = heads(12)
    v.requires_grad_()
    phi, psi = features(q, k)
    out, _ = causal_linear_attention(phi, psi.values, v, chunk=5, log_scale=psi.log_scale)
    out[:, :, 6].sum().backward()
    assert v.grad[:, :, :7].abs().min() > 0
    assert not v.grad[:, :, 7:].any()


def test_gradients():
    q, k, v = heads(5, dim=3)

    def run(q, k, v):
        phi, psi = features(q, k, m=4)
        scaled, _ = common_scale(psi.values, psi.log_scale)
        causal, _ = causal_linear_attention(phi, psi.values, v, chunk=2, log_scale=psi.log_scale)
        return linear_attention(phi, scaled, v), causal

    q, k, v = (t[:1].clone().requires_grad_() for t in (q, k, v))
    assert torch.autograd.gradcheck(run, (q, k, v))


def test_examples_do_not_meet():
    """An example's output does not depend on its batch-mates."""
    q, k, v = heads()
    phi, psi = features(q, k)
    scaled, _ = common_scale(psi.values, psi.log_scale)
    alone, _ = common_scale(psi.values[:1], psi.log_scale[:1])
    torch.testing.assert_close(linear_attention(phi, scaled, v)[:1], linear_attention(phi[:1], alone, v[:1]), **CLOSE)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_at_large_norms(dtype):
    """Ten times the norms of BERT's queries: finite, in the dtype of the values, near the fp64 result."""
    q, k, v = heads(64, size=4.0)
    phi, psi = features(q, k)
    exact = linear_attention(phi, common_scale(psi.values, psi.log_scale)[0], v)
    fm = build_feature_map("posrf", "orf", 6, 16)
    with torch.autocast("cpu", torch.bfloat16):
        psi = fm.psi(k.float())
        out = linear_attention(fm.phi(q.float()).values, common_scale(psi.values, psi.log_scale)[0], v.to(dtype))
    assert out.dtype == dtype
    assert out.isfinite().all()
    torch.testing.assert_close(out.double(), exact, rtol=0.05, atol=0.05)


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


def dense_band(q, k, v, width, mask=None, causal=False):
    groups = k.shape[1]
    k, v = (t.repeat_interleave(q.shape[1] // groups, 1) for t in (k, v))
    i, j = torch.arange(q.shape[-2])[:, None], torch.arange(k.shape[-2])[None, :]
    seen = ((i - j).abs() < width) & ((j <= i) if causal else True)
    seen = seen if mask is None else seen & mask[:, None, None, :]
    scores = (0.4 * q @ k.mT).masked_fill(~seen, float("-inf"))
    return scores.softmax(-1).nan_to_num(0.0) @ v


@pytest.mark.parametrize("width", [1, 2, 5, 37, 100])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_band_is_masked_softmax(width, causal, masked):
    """A band of the whole length is softmax, one of width 1 gives V."""
    q, k, v = heads()
    mask = lengths_mask() if masked else None
    out = banded_softmax_attention(q, k, v, width, mask, causal=causal, scaling=0.4)
    torch.testing.assert_close(out, dense_band(q, k, v, width, mask, causal), **CLOSE)
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
