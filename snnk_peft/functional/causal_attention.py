"""Causal attention in linear time: query i sees keys 0 to i; sums are kept per chunk and carried from call to call.

    out_i = Σ_{j<=i} φ(q_i)·ψ(k_j) v_j / Σ_{j<=i} φ(q_i)·ψ(k_j),     ψ(k_j) = e^{s_j} ψ̃(k_j)

(Katharopoulos et al. 2020, Eqs. 16-20.) Within a chunk the weights are formed and cut to the lower triangle; what lies
before it enters through S = Σ ψ(k_j) v_jᵀ and z = Σ ψ(k_j). Shapes as in `linear_attention.py`: q (B, H, L, m),
k (B, G, L, m), v (B, G, L, D) -> (B, H, L, D). Time O(L m D + L (m + D) chunk) per head and (L/chunk)² m D for the
prefixes, which callers keep small by handing over the state from one block of chunks to the next; memory
O(L (m + D + chunk)).

One scale for all keys, which serves where every query sees every key, would let a large key erase rows before it that
never see it: at ten times the norms of BERT, s_j spans hundreds. So each row has the scale ρ_i = max_{j<=i} s_j, each
prefix the largest of its keys, and every exponential taken is that of a difference <= 0."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from snnk_peft.functional.backend import dispatched, exporting
from snnk_peft.functional.blocks import block_count
from snnk_peft.functional.linear_attention import AttentionState, divide, finite, grouped
from snnk_peft.functional.precision import full_precision, wide

CHUNK = 64  # tokens per chunk: the products within a chunk cost CHUNK per token and column


@dispatched
def causal_linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    *,
    chunk: int = CHUNK,
    state: AttentionState | None = None,
    log_scale: Tensor | None = None,
) -> tuple[Tensor, AttentionState]:
    """Query i attends to keys 0..i, and to all keys in `state` before them.

    Args:
        q: features of the queries, (B, H, L, m); the scale of each may be left out.
        k: features of the keys, (B, G, L, m), but for their scales.
        v: values, (B, G, L, D).
        mask: (B, L) bool, True where a key counts.
        chunk: tokens per chunk.
        state: sums over earlier keys, to continue from; of the same feature map.
        log_scale: s, broadcastable to (B, G, L, 1): the features of the keys are k · exp(log_scale). None for 0.

    Returns:
        (B, H, L, D) in the dtype of v (0 where no key counts), and the state after the last key.
    """
    with full_precision(v):
        length, groups, keys = k.shape[-2], k.shape[1], wide(k)
        q, values = grouped(wide(q), groups), wide(v)
        if mask is not None:
            keys = keys.masked_fill(~mask[:, None, :, None], 0.0)
        scales = None if log_scale is None else log_scale.to(keys.dtype).expand(*k.shape[:-1], 1).squeeze(-1)
        if scales is not None and mask is not None:
            scales = scales.masked_fill(~mask[:, None], float("-inf"))
        chunks = block_count(length, chunk)
        padding = chunks * chunk - length
        if exporting() or padding:
            q, keys, values = (torch.nn.functional.pad(t, (0, 0, 0, padding)) for t in (q, keys, values))
            scales = None if scales is None else torch.nn.functional.pad(scales, (0, padding), value=float("-inf"))
        # Contiguous: what is used in two products would be copied for each.
        keys, values = (t.contiguous().unflatten(-2, (chunks, chunk)) for t in (keys, values))
        # The queries of all heads of a group are rows of one matrix, chunk by chunk: (B, G, chunks, H/G · chunk, m).
        q = q.unflatten(-2, (chunks, chunk)).transpose(2, 3)
        weights = torch.matmul(q.flatten(3, 4), keys.mT).unflatten(-2, q.shape[3:5])
        if scales is None:
            weights = weights.tril()
            across = keys.new_ones(chunks + 1, chunks + 1).tril().expand(*k.shape[:2], -1, -1)
            scale = keys.new_zeros(*k.shape[:2], 1)
        else:
            given = keys.new_full((*k.shape[:2], 1), float("-inf")) if state is None else state.log_scale
            factors = _scale_factors(given, scales.unflatten(-1, (chunks, chunk)))
            weights = _product(weights, factors.within.unsqueeze(-3))
            keys = _product(keys, factors.keys.unsqueeze(-1))
            q = q * factors.queries.unsqueeze(-2).unsqueeze(-1)
            across, scale = factors.across, factors.scale
        weights, q = weights.flatten(3, 4), q.flatten(3, 4)
        S, z = torch.matmul(keys.mT, values), keys.sum(-2)
        if state is None:
            across = across[..., 1:]
        else:
            S, z = torch.cat((state.values.unsqueeze(2), S), 2), torch.cat((state.normaliser.unsqueeze(2), z), 2)
        before, behind = across[..., :-1, :], across[..., -1:, :]
        shape, S = S.shape[-2:], S.flatten(-2)
        numerator = torch.matmul(q, torch.matmul(before, S).unflatten(-1, shape))
        numerator = _sum(torch.matmul(weights, values), numerator)
        denominator = weights.sum(-1, keepdim=True) + torch.matmul(q, torch.matmul(before, z).unsqueeze(-1))
        out = divide(numerator, denominator).unflatten(3, (-1, chunk)).transpose(2, 3).flatten(3, 4)
        S, z = torch.matmul(behind, S).squeeze(2).unflatten(-1, shape), torch.matmul(behind, z).squeeze(2)
        return out[..., :length, :].flatten(1, 2).to(v.dtype), AttentionState(S, z, scale)


def _product(x: Tensor, factor: Tensor) -> Tensor:
    """x · factor, in the memory of x where no gradient is needed: fresh memory costs more than the product."""
    return x * factor if torch.is_grad_enabled() else x.mul_(factor)


def _sum(x: Tensor, other: Tensor) -> Tensor:
    return x + other if torch.is_grad_enabled() else x.add_(other)


class Factors(NamedTuple):
    """Rescaling factors from the scales of the keys, all at most 1.

    Attributes:
        within: e^{s_j − ρ_i}, 0 for j > i: weights within a chunk, (B, G, chunks, chunk, chunk).
        keys: takes features to the largest scale of their chunk, (B, G, chunks, chunk).
        queries: takes what a row has from the prefix, at the prefix's scale, to ρ_i; likewise.
        across: (B, G, chunks + 1, chunks + 1). Row x takes the sums of the state and of each chunk, at their own
            largest scales, to their sum before chunk x (after the last chunk in the last row).
        scale: of that last sum, (B, G, 1), −∞ where no key counts.
    """

    within: Tensor
    keys: Tensor
    queries: Tensor
    across: Tensor
    scale: Tensor


def _scale_factors(given: Tensor, scales: Tensor) -> Factors:
    """The factors for scales of keys (B, G, chunks, chunk) after a state of scale `given` (B, G, 1)."""
    chunk, largest = scales.shape[-1], scales.detach().amax(-1)
    own = torch.cat((given.to(scales.dtype), largest), -1)
    seen = own.new_ones(own.shape[-1], own.shape[-1]).tril() > 0
    own = own.unsqueeze(-2).masked_fill(~seen, float("-inf"))
    tops = own.amax(-1)
    prefix = tops[..., :-1, None]
    rows = finite(torch.maximum(_running_maximum(scales.detach()), prefix))
    later = scales.new_full((chunk, chunk), float("-inf")).triu(1)
    return Factors(
        within=(scales.unsqueeze(-2) - rows.unsqueeze(-1)).add_(later).exp_(),
        keys=(scales - finite(largest).unsqueeze(-1)).exp(),
        queries=(prefix - rows).exp(),
        across=(own - finite(tops).unsqueeze(-1)).exp(),
        scale=tops[..., -1:],
    )


def _running_maximum(scales: Tensor) -> Tensor:
    """Largest of the first 1, 2, ... entries along the last dimension."""
    # torch.cummax has no counterpart in ONNX.
    shift = 1
    while shift < scales.shape[-1]:
        earlier = torch.nn.functional.pad(scales[..., :-shift], (shift, 0), value=float("-inf"))
        scales, shift = torch.maximum(scales, earlier), 2 * shift
    return scales
