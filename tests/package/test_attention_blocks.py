"""Attention block by block of tokens is attention: the same numbers and gradients, and features never exist whole."""

from __future__ import annotations

import pytest
import torch

from snnk_peft import build_feature_map
from snnk_peft.functional import blocks, exponential_causal
from snnk_peft.layers.attention_term import AttentionTerm
from snnk_peft.layers.kernel_attention import KernelAttention
from snnk_peft.layers.recurrent_attention import continue_attention
from tests.tensor_sizes import LargestTensor

LENGTH = 75
CLOSE = {"rtol": 1e-10, "atol": 1e-10}


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
