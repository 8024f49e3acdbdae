"""Exact softmax attention in a band around the diagonal, in O(L·k) time and memory: the near field.

Query i attends to keys j with |i − j| < width (causal: 0 <= i − j < width), and to sinks, if given: a few
keys outside the band, usually the first of a text. Queries are cut into blocks of `width`; all keys that a block can
see lie in the block itself and its neighbours, so weights are formed for those only. A summary of other keys, their
mean for each query and the logarithm of their weight relative to e^{q·k}, shares the same normalisation.

Shapes: q (B, H, L, d), k and v (B, G, L, d), H a multiple of G; mask (B, L) True where a key counts -> (B, H, L, D).
A query that sees no key gives 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from snnk_peft.errors import ConfigError
from snnk_peft.functional.backend import dispatched, exporting
from snnk_peft.functional.blocks import block_count
from snnk_peft.functional.log_linear import ABSENT
from snnk_peft.functional.precision import full_precision, wide


class Sinks(NamedTuple):
    """Keys (B, G, s, d) and values (B, G, s, D) that are seen at any distance.

    Attributes:
        known: (B, L or 1) integers, number of the first ones that a query sees.
    """

    keys: Tensor
    values: Tensor
    known: Tensor


def banded_softmax_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    width: int,
    mask: Tensor | None = None,
    *,
    causal: bool = False,
    scaling: float = 1.0,
) -> Tensor:
    """Compute `near_attention` without sinks and far keys.

    Raises:
        ConfigError: width < 1, or the numbers of keys and queries differ.
    """
    length = q.shape[-2]
    faults = []
    if isinstance(width, bool) or not isinstance(width, int) or width < 1:
        faults.append(f"near-field width is {width!r}; expected an integer >= 1")
    if k.shape[-2] != length:
        faults.append(
            f"near field: {length} queries and {k.shape[-2]} keys; a band needs the same positions on both sides"
        )
    if faults:
        raise ConfigError(faults)
    return near_attention(q, k, v, width, mask, causal=causal, scaling=scaling)


@dispatched
def near_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    width: int,
    mask: Tensor | None = None,
    *,
    causal: bool = False,
    scaling: float = 1.0,
    sinks: Sinks | None = None,
    far: tuple[tuple[Tensor, Tensor], ...] = (),
) -> Tensor:
    """Compute softmax over the band, the sinks and the summary of the other keys.

    Args:
        q: queries (B, H, L, d).
        k: keys (B, G, L, d), or (B, G, width + L, d) with those before the first query in front (causal only).
        v: values, likewise.
        width: reach of the band on each side.
        mask: bool, True where a key counts; (B, L) or (B, width + L).
        causal: only keys at or before the query.
        scaling: factor on q·k.
        sinks: keys outside the band, which the mask does not include.
        far: for other sets of keys, means (B, H, L, D) and logarithms of weights (B, H, L), in at least fp32; about
            ABSENT where a query sees none of a set.

    Returns:
        (B, H, L, D) in the dtype of v.
    """
    length, earlier = q.shape[-2], k.shape[-2] != q.shape[-2]
    size = width if exporting() else min(width, length)
    with full_precision(v):
        groups, blocks = k.shape[1], block_count(length, size)
        queries = wide(q).unflatten(1, (groups, -1)) * scaling
        keys, values = wide(k), wide(v)
        counts = torch.ones(1, k.shape[-2], dtype=torch.bool, device=q.device) if mask is None else mask
        queries = torch.nn.functional.pad(queries, (0, 0, 0, blocks * size - length)).unflatten(-2, (blocks, size))
        lead = width if earlier else size  # keys of a window before the first query of its block
        if earlier and size < width:  # one block, which sees all keys
            keys, values, counts = keys.unsqueeze(-3), values.unsqueeze(-3), counts.unsqueeze(-2)
        else:
            front, neighbours = 0 if earlier else size, 1 if causal else 2
            keys, values = (_windows(t, size, blocks, neighbours, front) for t in (keys, values))
            counts = _windows(counts.unsqueeze(-1), size, blocks, neighbours, front).squeeze(-1)
        position = torch.arange(size, device=q.device)[:, None]
        distance = position + lead - torch.arange(keys.shape[-2], device=q.device)[None, :]
        seen = (distance < width) & (distance >= (0 if causal else 1 - width))
        seen = seen & counts[:, None, None, :, None, :]
        scores = torch.einsum("bghcid,bgcjd->bghcij", queries, keys).masked_fill(~seen, float("-inf"))
        beside = 0
        if sinks is not None:
            beside = sinks.keys.shape[-2]
            more = torch.einsum("bghcid,bgjd->bghcij", queries, wide(sinks.keys))
            counts = torch.arange(beside, device=q.device) < sinks.known.unsqueeze(-1)
            counts = counts.expand(-1, length, -1)
            counts = torch.nn.functional.pad(counts, (0, 0, 0, blocks * size - length)).unflatten(-2, (blocks, size))
            scores = torch.cat((scores, more.masked_fill(~counts[:, None, None], float("-inf"))), -1)
        top = scores.detach().amax(-1, keepdim=True)
        top = torch.where(top.isfinite(), top, 0.0)
        weights = (scores - top).exp()
        total = weights.sum(-1, keepdim=True)
        weights = weights / torch.where(total > 0, total, 1.0)
        within, outside = weights.split((weights.shape[-1] - beside, beside), -1)
        out = torch.einsum("bghcij,bgcjd->bghcid", within, values)
        if sinks is not None:
            out = out + torch.einsum("bghcij,bgjd->bghcid", outside, wide(sinks.values))
        logarithm = torch.where(total > 0, torch.where(total > 0, total, 1.0).log() + top, ABSENT)
        out, logarithm = (t.flatten(-3, -2)[..., :length, :].flatten(1, 2) for t in (out, logarithm))
        return (mean_over_all(((out, logarithm.squeeze(-1)), *far)) if far else out).to(v.dtype)


def mean_over_all(fields: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """Combine means (B, H, L, D) over several sets of keys, each with the logarithm of its weight."""
    shares = torch.stack([weights for _, weights in fields], -1).softmax(-1).unsqueeze(-2).unbind(-1)
    first, *others = (share * out for share, (out, _) in zip(shares, fields, strict=True))
    return sum(others, first)


def _windows(x: Tensor, size: int, blocks: int, neighbours: int, front: int) -> Tensor:
    """Split (..., n, d) -> (..., blocks, (1 + neighbours) · size, d): each block, the previous one (and the next).

    `front` is `size` if x begins with the first block, 0 if with the previous one.
    """
    total = (blocks + neighbours) * size
    x = torch.nn.functional.pad(x, (0, 0, front, total - front - x.shape[-2]))
    x = x.unflatten(-2, (blocks + neighbours, size))
    return torch.cat([x.narrow(-3, start, blocks) for start in range(1 + neighbours)], -2)
