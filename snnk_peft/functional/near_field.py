"""Exact softmax attention in a band around the diagonal, in O(L·k) time and memory (the near field of FMMformer).

Query i attends to keys j with |i − j| < width (causal: 0 <= i − j < width). Queries are cut into blocks of `width`; all
keys that a block can see lie in the block itself and its neighbours, so weights are formed for those only.

Shapes: q (B, H, L, d), k and v (B, G, L, d), H a multiple of G; mask (B, L) True where a key counts -> (B, H, L, D).
A query that sees no key gives 0.
"""

from __future__ import annotations

import torch
from torch import Tensor

from snnk_peft.errors import ConfigError
from snnk_peft.functional.blocks import block_count, exporting
from snnk_peft.functional.precision import full_precision, wide


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
    """Softmax attention restricted to a band.

    Args:
        q: queries (B, H, L, d).
        k: keys (B, G, L, d).
        v: values (B, G, L, D).
        width: reach of the band on each side, the diagonal included: 1 is the diagonal alone.
        mask: (B, L) bool, True where a key counts.
        causal: only keys at or before the query.
        scaling: factor on q·k.

    Raises:
        ConfigError: width < 1, or as many keys as queries are not given.
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
    size = width if exporting() else min(width, length)
    with full_precision(v):
        groups, blocks = k.shape[1], block_count(length, size)
        queries = wide(q).unflatten(1, (groups, -1)) * scaling
        keys, values = wide(k), wide(v)
        counts = torch.ones(1, length, dtype=torch.bool, device=q.device) if mask is None else mask
        queries = torch.nn.functional.pad(queries, (0, 0, 0, blocks * size - length)).unflatten(-2, (blocks, size))
        neighbours = 1 if causal else 2
        keys, values = (_windows(t, size, blocks, neighbours) for t in (keys, values))
        counts = _windows(counts.unsqueeze(-1), size, blocks, neighbours).squeeze(-1)
        position = torch.arange(size, device=q.device)[:, None]
        # Windows start one block before their queries.
        distance = position + size - torch.arange(keys.shape[-2], device=q.device)[None, :]
        seen = (distance < width) & (distance >= (0 if causal else 1 - width))
        seen = seen & counts[:, None, None, :, None, :]
        scores = torch.einsum("bghcid,bgcjd->bghcij", queries, keys)
        scores = scores.masked_fill(~seen, float("-inf"))
        top = scores.detach().amax(-1, keepdim=True)
        weights = (scores - torch.where(top.isfinite(), top, 0.0)).exp()
        total = weights.sum(-1, keepdim=True)
        weights = weights / torch.where(total > 0, total, 1.0)
        out = torch.einsum("bghcij,bgcjd->bghcid", weights, values)
        return out.flatten(-3, -2)[..., :length, :].flatten(1, 2).to(v.dtype)


def _windows(x: Tensor, size: int, blocks: int, neighbours: int) -> Tensor:
    """(..., L, d) -> (..., blocks, (1 + neighbours) · size, d): each block with the one before (and the one after)."""
    total = (blocks + neighbours) * size
    x = torch.nn.functional.pad(x, (0, 0, size, total - size - x.shape[-2])).unflatten(-2, (blocks + neighbours, size))
    return torch.cat([x.narrow(-3, start, blocks) for start in range(1 + neighbours)], -2)
