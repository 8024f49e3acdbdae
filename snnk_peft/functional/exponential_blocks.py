"""Exponential attention on a CPU, forward and backward block by block of tokens: features never leave the cache.

With g the gradient of out = p M, p = softmax(a + log Z), and w_jr = e^{b_jr} / Z_r the weights of the keys in M and Z:

    ∂a = p ∘ (g Mᵀ − rowsum(p ∘ g Mᵀ))      ∂M = pᵀ g      ∂log Z = colsum(∂a)
    ∂b = w ∘ (v ∂Mᵀ − diag(M ∂Mᵀ) + ∂log Z)      ∂v = w ∂M

p and w are recomputed, which is faster than writing them to memory and reading them back. Every exponential is at
most 1. Shapes as in `exponential_attention.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from snnk_peft.functional.blocks import block_tokens, joined, split_tokens
from snnk_peft.functional.log_linear import key_logarithms, query_logarithms
from snnk_peft.functional.precision import full_precision


class AttentionInBlocks(torch.autograd.Function):
    """out, M and log Z from q, k, v, the rows of the queries, the offset of both sides and the rows of the keys.

    The last three arguments: Q of the keys' norms, without gradient; the mask or None; and the same in plain torch,
    which is used where the gradient is itself to be differentiated.
    """

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
        """Everything in the dtype of the rows."""
        *given, square, mask, plain = arguments
        with torch.no_grad():
            out, means, log_weight = plain(*given)
        ctx.save_for_backward(*given, means, log_weight)
        ctx.square, ctx.mask, ctx.plain = square, mask, plain
        return out, means, log_weight

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of the six tensors."""
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
    """Q x for a symmetric Q."""
    return x @ square if isinstance(square, Tensor) and square.shape[-2] > 1 else x * square
