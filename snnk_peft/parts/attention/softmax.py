"""Softmax attention of the layers in a patched model that keep it.

The model's masks are padding masks (see interface.py), so the masks of softmax layers are built here: the causal
triangle and the band of a local layer; the weights are computed on request. A band in a model without padding of
queries is computed in blocks, O(L·w), so that a patched model with local layers is linear in length as a whole.
"""

from __future__ import annotations

import torch
from torch import nn
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward

from snnk_peft.functional.backend import exporting
from snnk_peft.functional.near_field import banded_softmax_attention
from snnk_peft.functional.pairwise import pairwise_mask
from snnk_peft.functional.precision import full_precision, wide


def softmax_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    *,
    dropout: float = 0.0,
    scaling: float | None = None,
    causal: bool = False,
    window: int | None = None,
    weights_wanted: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Compute softmax attention of q (B, H, L, d), k, v (B, G, N, d) -> (B, L, H, D), and weights (B, H, L, N) or None.

    Args:
        module: the attention module.
        query: queries.
        key: keys.
        value: values.
        mask: (B, N) bool, True at keys to attend to, or None.
        dropout: dropout rate of the weights.
        scaling: factor on q·k; None for d^-½.
        causal: whether a query sees only keys at or before it.
        window: a query sees keys at a distance below this, or None for all.
        weights_wanted: return the weights as well, which costs O(L·N) memory.
    """
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    if weights_wanted:
        pairs = pairwise_mask(mask, query, key, causal, window)
        weights = softmax_weights(query, key, pairs, scaling)
        dropped = nn.functional.dropout(weights, dropout, training=dropout > 0)
        out = torch.matmul(dropped, repeat_kv(value, query.shape[1] // value.shape[1]))
        return out.transpose(1, 2).contiguous(), weights
    if window is not None and dropout == 0 and query.shape[2] == key.shape[2] and _in_blocks(query.shape[2], window):
        out = banded_softmax_attention(query, key, value, window, mask, causal=causal, scaling=scaling)
        return out.transpose(1, 2).contiguous(), None
    pairs = pairwise_mask(mask, query, key, causal, window)
    return sdpa_attention_forward(module, query, key, value, pairs, dropout, scaling, is_causal=False)


def _in_blocks(length: int, window: int) -> bool:
    """Return whether to compute a band in blocks; for short inputs one fused attention with a mask is faster."""
    return exporting() or length > 8 * window


def softmax_weights(query: torch.Tensor, key: torch.Tensor, pairs: torch.Tensor | None, scaling: float) -> torch.Tensor:
    """Compute weights (B, H, L, N) from queries (B, H, L, d), keys (B, G, N, d) and a mask of pairs (B, 1, L, N)."""
    with full_precision(query):
        key = repeat_kv(key, query.shape[1] // key.shape[1])
        scores = torch.matmul(wide(query), wide(key).transpose(-1, -2)) * scaling
        if pairs is not None:
            scores = scores.masked_fill(~pairs, float("-inf"))
        return scores.softmax(-1).to(query.dtype)
