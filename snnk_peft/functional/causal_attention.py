"""Causal attention in linear time: query i sees keys 0 to i; sums are kept per chunk and carried from call to call.

    out_i = Σ_{j<=i} φ(q_i)·ψ(k_j) v_j / Σ_{j<=i} φ(q_i)·ψ(k_j),     ψ(k_j) = e^{s_j} ψ̃(k_j)

(Katharopoulos et al. 2020, Eqs. 16-20.) Within a chunk the weights are formed and cut to the lower triangle; what lies
before it enters through S = Σ ψ(k_j) v_jᵀ and z = Σ ψ(k_j). Shapes as in `linear_attention.py`: q (B, H, L, m),
k (B, G, L, m), v (B, G, L, D) -> (B, H, L, D). Time O(L m D + L (m + D) chunk) per head and (L/chunk)² m D for the
prefixes, which is less up to 10⁵ tokens; memory O(L (m + D)).

One scale for all keys, which serves where every query sees every key, would let a large key erase rows before it that
never see it: at ten times the norms of BERT, s_j spans hundreds. So each row has the scale ρ_i = max_{j<=i} s_j, each
prefix the largest of its keys, and every exponential taken is that of a difference <= 0."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from snnk_peft.functional.blocks import block_count, exporting
from snnk_peft.functional.linear_attention import divide, finite, grouped
from snnk_peft.functional.precision import full_precision, wide

CHUNK = 128  # tokens per chunk: the products within a chunk cost CHUNK per token and column


class AttentionState(NamedTuple):
    """What a recurrent step remembers of all keys so far; its size does not depend on how many there were.

    Attributes:
        values: S (B, G, m, D) in at least fp32.
        normaliser: z (B, G, m).
        log_scale: (B, G, 1), the true sums are S and z times exp(log_scale). −∞ where no key counted so far: zeros
            have no scale, and a finite one would make later, smaller keys vanish beside it.
    """

    values: Tensor
    normaliser: Tensor
    log_scale: Tensor


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
        (B, H, L, D) in the dtype of v (0 where no key counts), and the state behind the last key.
    """
    with full_precision(v):
        length, batch = k.shape[-2], k.shape[:2]
        q, k, values = grouped(wide(q), k.shape[1]), wide(k), wide(v)
        if mask is not None:
            k = k.masked_fill(~mask[:, None, :, None], 0.0)
        # Values get a column of ones: the denominator is one more column of the numerator.
        values = torch.cat((values, torch.ones_like(values[..., :1])), -1)
        if state is None:
            first = values.new_zeros(*batch, 1, k.shape[-1], values.shape[-1])
        else:
            first = torch.cat((state.values, state.normaliser.unsqueeze(-1)), -1).unsqueeze(2)
        chunks = block_count(length, chunk)
        padding = chunks * chunk - length
        if exporting() or padding:
            q, k, values = (torch.nn.functional.pad(t, (0, 0, 0, padding)) for t in (q, k, values))
        q, k, values = (t.unflatten(-2, (chunks, chunk)) for t in (q, k, values))
        weights = torch.einsum("bghcim,bgcjm->bghcij", q, k)
        if log_scale is None:
            total = torch.einsum("bghcij,bgcjd->bghcid", weights.tril(), values)
            sums = torch.cat((first, torch.einsum("bgcnm,bgcnd->bgcmd", k, values)), 2).cumsum(2)
            total = total + torch.einsum("bghcim,bgcmd->bghcid", q, sums[:, :, :-1])
            scale = k.new_zeros(*batch, 1)
        else:
            scales = log_scale.to(k.dtype).expand(*batch, length, 1).squeeze(-1)
            if mask is not None:
                scales = scales.masked_fill(~mask[:, None], float("-inf"))
            if exporting() or padding:
                scales = torch.nn.functional.pad(scales, (0, padding), value=float("-inf"))
            scales = scales.unflatten(-1, (chunks, chunk))
            begin = k.new_full((*batch, 1), float("-inf")) if state is None else state.log_scale
            tops, across = _prefix_scales(begin, scales)
            rows = finite(torch.maximum(_running_maximum(scales.detach()), tops[..., :-1, None]))
            later = k.new_full((chunk, chunk), float("-inf")).triu(1)
            within = (scales.unsqueeze(-2) - rows.unsqueeze(-1)).add_(later).exp_().unsqueeze(2)
            total = torch.einsum("bghcij,bgcjd->bghcid", _product(weights, within), values)
            own = (scales - finite(scales.detach().amax(-1, keepdim=True))).exp().unsqueeze(-1)
            sums = torch.cat((first, torch.einsum("bgcnm,bgcnd->bgcmd", k, _product(values, own))), 2)
            sums = torch.einsum("bgxy,bgymd->bgxmd", across, sums)
            prefix = torch.einsum("bghcim,bgcmd->bghcid", q, sums[:, :, :-1])
            total = torch.addcmul(total, prefix, (tops[..., :-1, None] - rows).exp()[:, :, None, ..., None])
            scale = tops[..., -1:]
        last = sums[:, :, -1]
        total = total.flatten(-3, -2)[..., :length, :]
        out = divide(total[..., :-1], total[..., -1:]).flatten(1, 2).to(v.dtype)
        return out, AttentionState(last[..., :-1], last[..., -1], scale)


def _product(x: Tensor, factor: Tensor) -> Tensor:
    """x · factor, in the memory of x where no gradient is needed: fresh memory costs more than the product."""
    return x * factor if torch.is_grad_enabled() else x.mul_(factor)


def _prefix_scales(begin: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """Scales of the prefixes that end before the first chunk, behind it, ..., behind the last one.

    Args:
        begin: scale of the state, (B, G, 1).
        scales: of the keys, (B, G, chunks, chunk).

    Returns:
        The largest scale in each prefix, (B, G, chunks + 1), −∞ where no key counts; and factors
        (B, G, chunks + 1, chunks + 1), whose row x takes the sums of the state and of each chunk, at their own largest
        scales, to the sum of prefix x.
    """
    own = torch.cat((begin.to(scales.dtype), scales.detach().amax(-1)), -1)
    seen = own.new_ones(own.shape[-1], own.shape[-1]).tril() > 0
    own = own.unsqueeze(-2).masked_fill(~seen, float("-inf"))
    tops = own.amax(-1)
    return tops, (own - finite(tops).unsqueeze(-1)).exp()


def _running_maximum(scales: Tensor) -> Tensor:
    """Largest of the first 1, 2, ... entries along the last dimension."""
    # torch.cummax has no counterpart in ONNX.
    shift = 1
    while shift < scales.shape[-1]:
        earlier = torch.nn.functional.pad(scales[..., :-shift], (shift, 0), value=float("-inf"))
        scales, shift = torch.maximum(scales, earlier), 2 * shift
    return scales
