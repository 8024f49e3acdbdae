"""Linear attention over positive exponential features, from their logarithms: the query side is one softmax.

With a_ir = log φ_r(q_i), b_jr = log ψ_r(k_j) and, per feature, Z_r = Σ_j e^{b_jr}, means M_r = Σ_j e^{b_jr} v_j / Z_r:

    out_i = Σ_r φ_r(q_i) Σ_j ψ_r(k_j) v_j / Σ_r φ_r(q_i) Z_r = softmax_r(a_ir + log Z_r) · M

Every feature has its own scale, the largest of its keys, so a key is only lost next to others if its weight is nil.
A single scale for all features, or features of queries and keys that are rounded before they are multiplied, lose rows
from twice the norms of BERT on. There is no maximum, division or denominator on the query side. Features may have signs
σ_r (quadratures): then out_i = Σ_r σ_r p_ir M_r / Σ_r σ_r p_ir with p the softmax.

On a CPU, features never leave the cache: forward and backward passes process tokens in blocks. With g the gradient of
out = p M, p = softmax(a + log Z), and w_jr = e^{b_jr} / Z_r the weights of the keys in M and Z,

    ∂a = p ∘ (g Mᵀ − rowsum(p ∘ g Mᵀ))      ∂M = pᵀ g      ∂log Z = colsum(∂a)
    ∂b = w ∘ (v ∂Mᵀ − diag(M ∂Mᵀ) + ∂log Z)      ∂v = w ∂M

Both p and w are recomputed, which is faster than writing them to memory and reading them back.

Shapes: q (B, H, L, d), k (B, G, N, d), v (B, G, N, D) -> (B, H, L, D), H a multiple of G; M (B, G, m, D), log Z
(B, G, m). Everything in at least fp32, also under autocast. Time O((L + N) m (d + D)) per head.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from snnk_peft.functional.backend import dispatched
from snnk_peft.functional.blocks import BlockMemory, block_tokens, joined, split_tokens, takes_blocks
from snnk_peft.functional.log_linear import ABSENT, LogLinear, both_offsets, key_logarithms, query_logarithms
from snnk_peft.functional.precision import full_precision


class AttentionInBlocks(torch.autograd.Function):
    """Compute out, M and log Z from q, k, v, the queries' rows, the offset of both sides and the keys' rows.

    The last three arguments: Q of the keys' norms, without gradient; the mask or None; and the same in plain torch,
    which is used if the gradient is to be differentiated itself.
    """

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
        *given, square, mask, plain = arguments
        with torch.no_grad():
            out, means, log_weight = plain(*given)
        ctx.save_for_backward(*given, means, log_weight)
        ctx.square, ctx.mask, ctx.plain = square, mask, plain
        return out, means, log_weight

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        *given, means, log_weight = ctx.saved_tensors
        with full_precision(given[0]):
            if torch.is_grad_enabled():
                found = _differentiable(ctx, given, gradients)
            else:
                found = _gradients(ctx, given, means, log_weight, gradients)
        return (*found, None, None, None)


def _differentiable(ctx: Any, given: list[Tensor], gradients: tuple[Tensor, ...]) -> list[Tensor | None]:
    wanted = [tensor for tensor, needed in zip(given, ctx.needs_input_grad, strict=False) if needed]
    found = iter(torch.autograd.grad(ctx.plain(*given), wanted, gradients, create_graph=True))
    return [next(found) if needed else None for needed in ctx.needs_input_grad[: len(given)]]


def _gradients(
    ctx: Any, given: list[Tensor], means: Tensor, log_weight: Tensor, gradients: tuple[Tensor, ...]
) -> list[Tensor | None]:
    q, k, v, query_rows, offset, key_rows = given
    g_out, g_means, g_weight = gradients
    needs, dtype, groups = ctx.needs_input_grad, query_rows.dtype, k.shape[1]
    size = block_tokens(q, query_rows.shape[-2])
    bias = log_weight[:, :, None, None] + (offset if offset.dim() == 1 else offset[..., None, None, :])
    g_query_rows = g_key_rows = None
    back, of_means = query_rows if query_rows.dim() == 2 else query_rows.unsqueeze(-3), means.unsqueeze(2)
    g_bias = torch.zeros_like(log_weight)
    g_means, g_weight = g_means.to(dtype), g_weight.to(dtype)

    def of_queries() -> Iterator[Tensor]:
        nonlocal g_query_rows, g_means, g_bias
        for queries, g in split_tokens(size, q, g_out):
            queries, g = queries.to(dtype), g.to(dtype).unflatten(1, (groups, -1))
            p = query_logarithms(queries, query_rows, groups).add_(bias).softmax(-1)
            g_means = g_means + (p.mT @ g).sum(2)
            g_logs = torch._softmax_backward_data(g @ of_means.mT, p, -1, dtype)
            g_bias += g_logs.sum((2, 3))
            if needs[3]:
                part = (g_logs.mT @ queries.unflatten(1, (groups, -1))).sum(2)
                g_query_rows = part if g_query_rows is None else g_query_rows + part
            yield (g_logs @ back).flatten(1, 2).to(q.dtype)

    g_q = joined(of_queries(), size, q.shape[-2])
    g_weight = g_weight + g_bias
    common = g_weight - (means * g_means).sum(-1)
    g_k, g_v = torch.empty_like(k), torch.empty_like(v)
    for place, (keys, values, counts) in _places(split_tokens(size, k, v, ctx.mask)):
        keys, values = keys.to(dtype), values.to(dtype)
        w = key_logarithms(keys, key_rows, ctx.square, counts).sub_(log_weight.unsqueeze(-2)).exp_()
        g_v[:, :, place] = w @ g_means
        g_logs = (values @ g_means.mT).add_(common.unsqueeze(-2)).mul_(w)
        if needs[5]:
            part = g_logs.mT @ keys
            g_key_rows = part if g_key_rows is None else g_key_rows + part
        lengths = g_logs.sum(-1, keepdim=True).mul_(-2)
        g_k[:, :, place] = torch.addcmul(g_logs @ key_rows, lengths, _weighted(keys, ctx.square))
    return [
        g_q,
        g_k,
        g_v,
        None if g_query_rows is None else g_query_rows.sum_to_size(query_rows.shape),
        g_bias.sum_to_size(offset.shape) if needs[4] else None,
        None if g_key_rows is None else g_key_rows.sum_to_size(key_rows.shape),
    ]


def _places(pieces: Iterator[tuple[Any, ...]]) -> Iterator[tuple[slice, tuple[Any, ...]]]:
    start = 0
    for piece in pieces:
        yield slice(start, start + piece[0].shape[-2]), piece
        start += piece[0].shape[-2]


def _weighted(x: Tensor, square: float | Tensor) -> Tensor:
    return x @ square if isinstance(square, Tensor) and square.shape[-2] > 1 else x * square


class KeyMeans(NamedTuple):
    """The state of attention over past keys and values; its size does not depend on their number.

    Attributes:
        values: M (B, G, m, D) in at least fp32: the mean of the values, per feature.
        log_weight: log Z (B, G, m); about ABSENT if no key has counted so far.
    """

    values: Tensor
    log_weight: Tensor

    @property
    def seen(self) -> Tensor:
        """Return (B, G) bool, True where any key counted."""
        return self.log_weight.detach().amax(-1) > ABSENT / 2


def means_of(logs: Tensor, v: Tensor) -> KeyMeans:
    """Compute M and log Z of keys (B, G, N, m) and values (B, G, N, D); the logarithms are overwritten."""
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
    """Compute M and log Z of these keys and those in `state`; in blocks of tokens on a CPU.

    Args:
        k: keys, (B, G, N, d).
        v: values, (B, G, N, D).
        features: feature map of the keys; their offset is left to the queries.
        mask: (B, N) bool, True where a key counts.
        state: state of other keys.
        memory: memory for the logarithms; None to allocate it.
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
    """Compute (B, H, L, D) in the dtype of v, 0 where no key counts, and M, log Z; every query sees every key.

    Args:
        q: (B, H, L, d), with the features `queries`.
        k: (B, G, N, d), with the features `keys`, of the same signs.
        v: (B, G, N, D).
        queries: feature map of q.
        keys: feature map of k.
        mask: (B, N) bool, True where a key counts.
        state: state of other keys, which every query sees too.
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
    """Let every query (B, H, L, d) attend to all keys in `means`, in at least fp32.

    `features` are those of the queries, with the offset of both sides and the signs; `memory` holds the logarithms.
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
    """Compute log Σ_r φ_r(q) Z_r, (B, H, L): `attend_means`' denominator without |q|²_Q and signs; same arguments."""
    offset = features.offset if features.offset.dim() == 1 else features.offset[..., None, None, :]
    logs = query_logarithms(q.to(features.rows.dtype), features.rows, means.values.shape[1])
    return (logs + (means.log_weight[:, :, None, None] + offset)).logsumexp(-1).flatten(1, 2)


def _per_query_head(seen: Tensor, q: Tensor) -> Tensor:
    return seen.repeat_interleave(q.shape[1] // seen.shape[1], 1)[..., None, None]
