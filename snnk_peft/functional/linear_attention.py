"""Attention in linear time: softmax weights replaced by φ(q)·ψ(k), so that all queries share sums over keys.

    out_i = Σ_j φ(q_i)·ψ(k_j) v_j / Σ_j φ(q_i)·ψ(k_j)  =  φ(q_i) S / φ(q_i) z,     S = Σ_j ψ(k_j) v_jᵀ,  z = Σ_j ψ(k_j)

(Katharopoulos et al. 2020, Eqs. 16-20; FAVOR+.) Shapes: q (B, H, L, m), k (B, G, N, m), v (B, G, N, D) -> (B, H, L, D),
with H a multiple of G (grouped-query attention); a mask (B, N) is True where a key counts. Cost O((L + N) m D) per
head; memory O(L (m + D)).

The inputs are features, not queries and keys: masks act on ψ(k), since ψ(0) is not zero. A factor common to the
features of one query cancels; from the keys only one number per batch entry and head may be taken out (`common_scale`):
a maximum per key would silently reweight the keys. Sums are accumulated in at least fp32, also under autocast.
A query whose keys are all masked gives 0.

**Causal**, query i sees keys 0 to i. Within a chunk the weights are formed and cut to the lower triangle; everything
before it enters through S and z, which are carried from call to call. Time O(L m D + L (m + D) chunk) per head and
(L/chunk)² m D for the prefixes, which callers keep small by passing the state from one block of chunks to the
next; memory O(L (m + D + chunk)). With one scale for all keys, a large key would erase earlier rows that never see it:
at ten times the norms of BERT, the scales s_j of ψ(k_j) = e^{s_j} ψ̃(k_j) span hundreds. So each row has the scale ρ_i
= max_{j<=i} s_j, each prefix the largest of its keys, and every exponential is of a difference <= 0.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from snnk_peft.functional.backend import dispatched, exporting
from snnk_peft.functional.blocks import block_count
from snnk_peft.functional.precision import full_precision, wide


class AttentionState(NamedTuple):
    """Sums over keys; their size does not depend on the number of keys.

    Attributes:
        values: S (B, G, m, D) in at least fp32.
        normaliser: z (B, G, m).
        log_scale: (B, G, 1); the true sums are S and z times exp(log_scale). −∞ if no key has counted so far: zeros
            have no scale, and a finite one would make later, smaller keys vanish next to it.
    """

    values: Tensor
    normaliser: Tensor
    log_scale: Tensor


def common_scale(
    values: Tensor, log_scale: Tensor | None, mask: Tensor | None = None, *, overwrite: bool = False
) -> tuple[Tensor, Tensor]:
    """Return key features (B, G, N, m) in at least fp32 with one scale per batch entry and head, and its log (B, G,
    1).

    The features are values · exp(log_scale), for values (B, G, N, m) and a scale broadcastable to (B, G, N, 1), None
    for 0. Masked keys become 0 and do not affect the scale, which is −∞ where no key counts. `overwrite`: whether
    `values` may hold the result where no gradient is needed: fresh memory of this size costs more than the product.
    """
    values = wide(values)
    if mask is not None:
        keep = mask[:, None, :, None]
        values = values.masked_fill(~keep, 0.0)
    if log_scale is None:
        return values, values.new_zeros(*values.shape[:2], 1)
    log_scale = log_scale.to(values.dtype).expand(*values.shape[:-1], 1)
    if mask is not None:
        log_scale = log_scale.masked_fill(~keep, float("-inf"))
    top = log_scale.detach().amax(-2)
    factor = (log_scale - finite(top).unsqueeze(-2)).exp()
    if not overwrite or (torch.is_grad_enabled() and (values.requires_grad or factor.requires_grad)):
        return values * factor, top
    return values.mul_(factor), top


def finite(log_scale: Tensor) -> Tensor:
    """Replace −∞ by 0: zeros may have any scale."""
    return torch.where(log_scale.isfinite(), log_scale, 0.0)


def grouped(q: Tensor, groups: int) -> Tensor:
    """Group (B, H, L, m) -> (B, G, H/G, L, m)."""
    return q.unflatten(1, (groups, q.shape[1] // groups))


def divide(numerator: Tensor, denominator: Tensor) -> Tensor:
    """Divide; where no key counts, both are 0, and so is the result."""
    return numerator / torch.where(denominator == 0, 1.0, denominator)


@dispatched
def key_sums(
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    *,
    log_scale: Tensor | None = None,
    state: AttentionState | None = None,
    overwrite: bool = False,
) -> AttentionState:
    """Sum S and z of these keys (B, G, N, m) and values (B, G, N, D), and those in `state`; see `common_scale` for the
    rest."""
    with full_precision(v):
        k, top = common_scale(k, log_scale, mask, overwrite=overwrite)
        sums, normaliser = torch.einsum("bgnm,bgnd->bgmd", k, wide(v)), k.sum(-2)
        if state is None:
            return AttentionState(sums, normaliser, top)
        both = torch.maximum(state.log_scale, top)
        old, new = ((scale - finite(both)).exp() for scale in (state.log_scale, top))
        return AttentionState(
            torch.addcmul(state.values * old.unsqueeze(-1), sums, new.unsqueeze(-1)),
            torch.addcmul(state.normaliser * old, normaliser, new),
            both,
        )


def attend(q: Tensor, state: AttentionState, dtype: torch.dtype) -> Tensor:
    """Attend to all keys in `state`: query features (B, H, L, m), each up to a scale, -> (B, H, L, D) in
    `dtype`."""
    with full_precision(q):
        q = grouped(wide(q), state.normaliser.shape[1])
        numerator = torch.einsum("bghlm,bgmd->bghld", q, state.values)
        denominator = torch.einsum("bghlm,bgm->bghl", q, state.normaliser).unsqueeze(-1)
        return divide(numerator, denominator).flatten(1, 2).to(dtype)


def linear_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    """Let every query attend to every key: `attend` to the `key_sums`, in the dtype of v."""
    return attend(q, key_sums(k, v, mask), v.dtype)


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
    """Compute attention of query i to keys 0..i, and to all keys in `state` before them.

    Args:
        q: features of the queries, (B, H, L, m); each up to a scale.
        k: features of the keys, (B, G, L, m), without their scales.
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
        # Contiguous, since it would otherwise be copied for each of two products.
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
            weights = _scaled(weights, factors.within.unsqueeze(-3))
            keys = _scaled(keys, factors.keys.unsqueeze(-1))
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


def _scaled(x: Tensor, factor: Tensor) -> Tensor:
    """Compute x · factor, in place if no gradient is needed: fresh memory costs more than the product."""
    return x * factor if torch.is_grad_enabled() else x.mul_(factor)


def _sum(x: Tensor, other: Tensor) -> Tensor:
    return x + other if torch.is_grad_enabled() else x.add_(other)


class Factors(NamedTuple):
    """Rescaling factors from the scales of the keys, all at most 1.

    Attributes:
        within: e^{s_j − ρ_i}, 0 for j > i: weights within a chunk, (B, G, chunks, chunk, chunk).
        keys: converts features to the largest scale of their chunk, (B, G, chunks, chunk).
        queries: converts a row's part from the prefix, at the prefix's scale, to ρ_i; likewise.
        across: (B, G, chunks + 1, chunks + 1). Row x converts the sums of the state and of each chunk, at their own
            largest scales, to their sum before chunk x (after the last chunk in the last row).
        scale: scale of that last sum, (B, G, 1), −∞ where no key counts.
    """

    within: Tensor
    keys: Tensor
    queries: Tensor
    across: Tensor
    scale: Tensor


def _scale_factors(given: Tensor, scales: Tensor) -> Factors:
    """Compute the factors for scales of keys (B, G, chunks, chunk) after a state of scale `given` (B, G, 1)."""
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
    # torch.cummax has no counterpart in ONNX.
    shift = 1
    while shift < scales.shape[-1]:
        earlier = torch.nn.functional.pad(scales[..., :-shift], (shift, 0), value=float("-inf"))
        scales, shift = torch.maximum(scales, earlier), 2 * shift
    return scales
