"""The attention function "snnk_peft" of transformers' AttentionInterface, and the mask function that goes with it.

A model that is switched to it calls this function in every layer. Layers that hold a KernelAttention use it; all
others, and all of them while adapters are disabled, compute softmax attention as before. The mask function keeps the
padding mask (batch, keys) as it is, because linear attention cannot honour more than that; softmax layers get their own
mask, built from it here.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from snnk_peft.errors import UnsupportedError
from snnk_peft.layers.kernel_attention import KernelAttention

NAME = "snnk_peft"
CACHE_LAYER = "snnk_cache_layer"  # attribute of keys: the cache layer that they went through (attention/cache.py)


def padding_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    mask_function: Any = None,
    attention_mask: torch.Tensor | None = None,
    **kwargs: Any,
) -> torch.Tensor | None:
    """The padding mask (batch, keys) of bool, or None where nothing is padded.

    Raises:
        UnsupportedError: a mask of another shape, which linear attention cannot honour.
    """
    if attention_mask is None:
        return None
    if attention_mask.dim() != 2:
        raise UnsupportedError(
            f"attention_mask has shape {tuple(attention_mask.shape)}; linear attention needs a padding mask (batch, "
            "keys), True or 1 where a key counts. A mask per pair of tokens needs softmax attention"
        )
    mask = attention_mask[:, :kv_length].bool()
    if mask.shape[1] < kv_length:  # keys that the mask does not speak of count
        mask = nn.functional.pad(mask, (0, kv_length - mask.shape[1]), value=True)
    return mask


def kernel_attention_forward(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """What a layer calls: q (B, H, L, d), k and v (B, G, N, d) -> (B, L, H, D) and no weights.

    Attention dropout (on weights that are never formed) does not exist for linear attention and is ignored there.

    Args:
        module: the attention module; says whether it is causal and which KernelAttention is in use.
        query: queries.
        key: keys; from a RecurrentCache they are those of the new tokens, and carry the layer of the cache.
        value: values.
        attention_mask: (B, N) bool from `padding_mask`, or None.
        dropout: for softmax layers.
        scaling: factor on q·k.
        is_causal: overrides what the module says.
        **kwargs: for softmax layers.

    Raises:
        UnsupportedError: a mask or a bias that linear attention cannot honour.
    """
    causal = bool(getattr(module, "is_causal", False)) if is_causal is None else is_causal
    if attention_mask is not None and attention_mask.dim() != 2:
        raise UnsupportedError(
            f"{type(module).__name__} received an attention mask of shape {tuple(attention_mask.shape)}; expected the "
            "padding mask (batch, keys). Masks and biases per pair of tokens need softmax attention"
        )
    kernel = active_kernel(module)
    recurrent = getattr(key, CACHE_LAYER, None)
    if recurrent is not None:  # the keys come from a RecurrentCache, which holds sums over those before them
        out = recurrent.attend(kernel, query, key, value, attention_mask, causal=causal, scaling=scaling)
        return out.transpose(1, 2).contiguous(), None
    if kernel is None:
        mask = pairwise_mask(attention_mask, query, key, causal)
        return sdpa_attention_forward(module, query, key, value, mask, dropout, scaling, is_causal=False, **kwargs)
    out = kernel(query, key, value, attention_mask, causal=causal, scaling=scaling)
    return out.transpose(1, 2).contiguous(), None


def active_kernel(module: nn.Module) -> KernelAttention | None:
    """The KernelAttention in use for an attention module, or None for softmax."""
    bundled = getattr(module, "snnk_kernel", None)
    if bundled is not None:
        return bundled
    owner = getattr(module, "snnk_owner", None)
    return None if owner is None else owner()


def pairwise_mask(
    mask: torch.Tensor | None, query: torch.Tensor, key: torch.Tensor, causal: bool
) -> torch.Tensor | None:
    """The (B, 1, L, N) mask of softmax attention from a padding mask; rows without a key see all (and mean nothing)."""
    length, keys = query.shape[2], key.shape[2]
    pairs = None
    if causal:
        pairs = torch.ones(length, keys, dtype=torch.bool, device=query.device).tril(keys - length)[None, None]
    if mask is not None:
        padded = mask[:, None, None, :]
        pairs = padded if pairs is None else pairs & padded
    if pairs is None:
        return None
    pairs = pairs.expand(query.shape[0], 1, length, keys)
    return pairs | ~pairs.any(-1, keepdim=True)


AttentionInterface.register(NAME, kernel_attention_forward)
AttentionMaskInterface.register(NAME, padding_mask)
