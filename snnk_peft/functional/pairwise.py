"""Softmax attention over all keys: its mask, and the exact attention of key heads that keep it.

Shapes: q (B, H, L, d), the last L positions; k (B, G, N, d) and v (B, G, N, D), H a multiple of G -> (B, H, L, D).
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers.integrations.sdpa_attention import repeat_kv


def pairwise_mask(
    mask: torch.Tensor | None,
    query: torch.Tensor,
    key: torch.Tensor,
    causal: bool,
    window: int | None = None,
) -> torch.Tensor | None:
    """Return the (B, 1, L, N) mask of softmax attention; rows without a key see all (and mean nothing).

    Args:
        mask: (B, N) bool, True where a key counts, or None.
        query: (B, H, L, d), the last L positions.
        key: (B, G, N, d).
        causal: whether a query sees only keys at or before it.
        window: a query sees keys at a distance below this, or None for all.
    """
    length, keys = query.shape[2], key.shape[2]
    pairs = None
    if causal or window is not None:
        positions = torch.arange(keys, device=query.device)
        distance = positions[keys - length :, None] - positions  # how far back a key lies
        pairs = distance >= 0 if causal else torch.ones_like(distance, dtype=torch.bool)
        if window is not None:
            pairs = pairs & (distance.abs() < window)
        pairs = pairs[None, None]
    if mask is not None:
        padded = mask[:, None, None, :]
        pairs = padded if pairs is None else pairs & padded
    if pairs is None:
        return None
    pairs = pairs.expand(query.shape[0], 1, length, keys)
    return pairs | ~pairs.any(-1, keepdim=True)


def causal_softmax_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scaling: float) -> Tensor:
    """Compute causal attention of the last L positions to all earlier keys; mask (B, N) is True where a key counts."""
    repeats, length = q.shape[1] // k.shape[1], q.shape[2]
    attend = torch.nn.functional.scaled_dot_product_attention
    if length == 1:  # query heads of a group as queries of one head: a long cache is not copied for each of them
        pairs = None if mask is None else (mask | ~mask.any(-1, keepdim=True))[:, None, None]
        return attend(
            q.unflatten(1, (k.shape[1], repeats)).flatten(2, 3), k, v, attn_mask=pairs, scale=scaling
        ).reshape(*q.shape[:3], v.shape[-1])
    keys, values = repeat_kv(k, repeats), repeat_kv(v, repeats)
    if mask is None and length == k.shape[2]:
        return attend(q, keys, values, is_causal=True, scale=scaling)
    return attend(q, keys, values, attn_mask=pairwise_mask(mask, q, k, causal=True), scale=scaling)
