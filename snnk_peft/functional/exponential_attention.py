"""Linear attention over positive exponential features, from their logarithms: the query side is one softmax.

With a_ir = log φ_r(q_i), b_jr = log ψ_r(k_j) and, per feature, Z_r = Σ_j e^{b_jr}, means M_r = Σ_j e^{b_jr} v_j / Z_r:

    out_i = Σ_r φ_r(q_i) Σ_j ψ_r(k_j) v_j / Σ_r φ_r(q_i) Z_r = softmax_r(a_ir + log Z_r) · M

Every feature has a scale of its own, the largest of its keys: a key is lost beside others only where it weighs nothing.
One scale for all features, or features of queries and keys that are rounded before they meet, lose rows from twice the
norms of BERT on. There is no maximum, no division and no denominator on the query side. Features may have signs σ_r
(quadratures): then out_i = Σ_r σ_r p_ir M_r / Σ_r σ_r p_ir with p the softmax.

Shapes: q (B, H, L, d), k (B, G, N, d), v (B, G, N, D) -> (B, H, L, D), H a multiple of G; M (B, G, m, D), log Z
(B, G, m). Everything in at least fp32, also under autocast. Time O((L + N) m (d + D)) per head.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from snnk_peft.functional.backend import dispatched
from snnk_peft.functional.blocks import BlockMemory, block_tokens, joined, split_tokens, takes_blocks
from snnk_peft.functional.exponential_blocks import AttentionInBlocks
from snnk_peft.functional.log_linear import ABSENT, LogLinear, both_offsets, key_logarithms, query_logarithms
from snnk_peft.functional.precision import full_precision


class KeyMeans(NamedTuple):
    """The state of attention over past keys and values; its size does not depend on their number.

    Attributes:
        values: M (B, G, m, D) in at least fp32: per feature the mean of the values.
        log_weight: log Z (B, G, m); about ABSENT where no key counted so far.
    """

    values: Tensor
    log_weight: Tensor

    @property
    def seen(self) -> Tensor:
        """(B, G) bool, True where any key counted."""
        return self.log_weight.detach().amax(-1) > ABSENT / 2


def means_of(logs: Tensor, v: Tensor) -> KeyMeans:
    """M and log Z of keys (B, G, N, m) and values (B, G, N, D); the logarithms are overwritten."""
    top = logs.detach().amax(-2, keepdim=True)
    weights = logs.sub_(top).exp_()
    total = weights.sum(-2)
    return KeyMeans(weights.mT @ v / total.unsqueeze(-1), total.log() + top.squeeze(-2))


def together(first: KeyMeans | None, second: KeyMeans) -> KeyMeans:
    """Combine the means of two sets of keys."""
    if first is None:
        return second
    top = torch.maximum(first.log_weight, second.log_weight).detach()
    log_weight = top + ((first.log_weight - top).exp() + (second.log_weight - top).exp()).log()
    shares = ((part.log_weight - log_weight).exp().unsqueeze(-1) for part in (first, second))
    return KeyMeans(first.values * next(shares) + second.values * next(shares), log_weight)


@dispatched
def key_means(
    k: Tensor,
    v: Tensor,
    features: LogLinear,
    mask: Tensor | None = None,
    state: KeyMeans | None = None,
    memory: BlockMemory | None = None,
) -> KeyMeans:
    """M and log Z of these keys, and of those in `state`; block by block of tokens on a CPU.

    Args:
        k: keys, (B, G, N, d).
        v: values, (B, G, N, D).
        features: of the keys; their offset is left to the queries.
        mask: (B, N) bool, True where a key counts.
        state: of other keys.
        memory: for the logarithms; None for memory of its own.
    """
    rows, memory = features.rows, memory or BlockMemory(features.rows)
    size, (batch, groups, _, _), m = block_tokens(k, rows.shape[-2]), k.shape, rows.shape[-2]
    with full_precision(v):
        for keys, values, counts in split_tokens(size, k, v, mask):
            keys, out = keys.to(rows.dtype), memory.of(batch, groups, keys.shape[-2], m)
            logs = key_logarithms(keys, rows, features.square, counts, out)
            state = together(state, means_of(logs, values.to(logs.dtype)))
        assert state is not None
        return state


@dispatched
def exponential_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    queries: LogLinear,
    keys: LogLinear,
    mask: Tensor | None = None,
    state: KeyMeans | None = None,
) -> tuple[Tensor, KeyMeans]:
    """Every query attends to every key: (B, H, L, D) in the dtype of v, 0 where no key counts, and M, log Z.

    Args:
        q: queries, (B, H, L, d).
        k: keys, (B, G, N, d).
        v: values, (B, G, N, D).
        queries: their features.
        keys: theirs, with the same signs.
        mask: (B, N) bool, True where a key counts.
        state: of other keys, which every query sees too.
    """
    offset, signs = both_offsets(queries, keys), keys.signs

    def plain(*tensors: Tensor) -> tuple[Tensor, ...]:
        q, k, v, rows, offset, key_rows = tensors
        memory = BlockMemory(rows)
        means = key_means(k, v, keys._replace(rows=key_rows), mask, state, memory)
        return attend_means(q, means, LogLinear(rows, offset, 0.0, signs), memory), *means

    given = (q, k, v, queries.rows, offset, keys.rows)
    in_blocks = signs is None and state is None and takes_blocks(q)
    out, *kept = AttentionInBlocks.apply(*given, keys.square, mask, plain) if in_blocks else plain(*given)
    means = KeyMeans(*kept)
    return (out if mask is None else out.masked_fill(~_per_query_head(means.seen, q), 0.0)).to(v.dtype), means


def attend_means(q: Tensor, means: KeyMeans, features: LogLinear, memory: BlockMemory | None = None) -> Tensor:
    """Every query attends to all keys in `means`, in at least fp32.

    Args:
        q: queries, (B, H, L, d).
        means: of the keys.
        features: of the queries, with the offset of both sides and the signs.
        memory: for the logarithms; None for memory of its own.
    """
    rows, signs = features.rows, features.signs
    offset = features.offset if features.offset.dim() == 1 else features.offset[..., None, None, :]
    size, length = block_tokens(q, rows.shape[-2]), q.shape[-2]
    groups, m, columns = means.values.shape[1:]
    first, second = memory or BlockMemory(rows), BlockMemory(rows)
    bias, values = means.log_weight[:, :, None, None] + offset, means.values.unsqueeze(2)

    def blocks() -> Iterator[Tensor]:
        for (queries,) in split_tokens(size, q):
            shape = q.shape[0], groups, q.shape[1] // groups, queries.shape[-2]
            logs = query_logarithms(queries.to(rows.dtype), rows, groups, first.of(*shape, m)).add_(bias)
            weights = torch.softmax(logs, -1, out=second.of(*shape, m))
            if signs is not None:
                weights = weights * signs
            out = torch.matmul(weights, values, out=first.of(*shape, columns))
            yield (out if signs is None else out / weights.sum(-1, keepdim=True)).flatten(1, 2)

    with full_precision(q):
        return joined(blocks(), size, length)


def log_weights(q: Tensor, means: KeyMeans, features: LogLinear) -> Tensor:
    """Compute log Σ_r φ_r(q) Z_r, (B, H, L), the denominator of `attend_means` without |q|²_Q and signs.

    Args:
        q: queries, (B, H, L, d).
        means: of the keys.
        features: of the queries, with the offset of both sides.
    """
    offset = features.offset if features.offset.dim() == 1 else features.offset[..., None, None, :]
    logs = query_logarithms(q.to(features.rows.dtype), features.rows, means.values.shape[1])
    return (logs + (means.log_weight[:, :, None, None] + offset)).logsumexp(-1).flatten(1, 2)


def _per_query_head(seen: Tensor, q: Tensor) -> Tensor:
    """(B, G) -> (B, H, 1, 1)."""
    return seen.repeat_interleave(q.shape[1] // seen.shape[1], 1)[..., None, None]
