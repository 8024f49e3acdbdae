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
from transformers.utils import output_capturing

from snnk_peft.attention.softmax import pairwise_mask, softmax_attention
from snnk_peft.errors import UnsupportedError
from snnk_peft.layers.kernel_attention import KernelAttention

__all__ = ["NAME", "kernel_attention_forward", "padding_mask", "pairwise_mask"]

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
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """What a layer calls: q (B, H, L, d), k and v (B, G, N, d) -> (B, L, H, D), and (B, H, L, N) weights if asked for.

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
        **kwargs: `output_attentions` asks for the weights; `sliding_window` restricts a softmax layer to a band.

    Raises:
        UnsupportedError: a mask or a bias that linear attention cannot honour, or weights of too long an input.
    """
    causal = bool(getattr(module, "is_causal", False)) if is_causal is None else is_causal
    if attention_mask is not None and attention_mask.dim() != 2:
        raise UnsupportedError(
            f"{type(module).__name__} received an attention mask of shape {tuple(attention_mask.shape)}; expected the "
            "padding mask (batch, keys). Masks and biases per pair of tokens need softmax attention"
        )
    refuse_biases(module, kwargs)
    weights_wanted = wants_weights(kwargs)
    kernel = active_kernel(module)
    recurrent = getattr(key, CACHE_LAYER, None)
    if recurrent is not None:  # the keys come from a RecurrentCache, which holds sums over those before them
        if weights_wanted:
            raise UnsupportedError(
                "attention weights were asked for (output_attentions=True) while generating with a RecurrentCache, "
                "which keeps no keys that they could belong to; pass "
                "past_key_values=transformers.DynamicCache(config=model.config), or leave output_attentions out"
            )
        out = recurrent.attend(kernel, query, key, value, attention_mask, causal=causal, scaling=scaling)
        return out.transpose(1, 2).contiguous(), None
    if kernel is None:
        return softmax_attention(
            module,
            query,
            key,
            value,
            attention_mask,
            dropout=dropout,
            scaling=scaling,
            causal=causal,
            window=kwargs.get("sliding_window"),
            weights_wanted=weights_wanted,
        )
    out = kernel(query, key, value, attention_mask, causal=causal, scaling=scaling)
    weights = None
    if weights_wanted:
        weights = kernel.weights(query, key, attention_mask, causal=causal, scaling=scaling)
    return out.transpose(1, 2).contiguous(), weights


def active_kernel(module: nn.Module) -> KernelAttention | None:
    """The KernelAttention in use for an attention module, or None for softmax."""
    bundled = getattr(module, "snnk_kernel", None)
    if bundled is not None:
        return bundled
    owner = getattr(module, "snnk_owner", None)
    return None if owner is None else owner()


def wants_weights(options: dict[str, Any]) -> bool:
    """Whether the caller asked for attention weights.

    Some models keep `output_attentions` from their attention functions (GPT-2), or find it in their config. What
    transformers is about to collect tells in all cases.
    """
    collected = output_capturing._active_collector.get()
    return bool(options.get("output_attentions")) or "attentions" in (collected or ())


def refuse_biases(module: nn.Module, options: dict[str, Any]) -> None:
    """UnsupportedError if the model adds something to q·k, or to the sum of the weights."""
    given = [name for name in ("position_bias", "softcap", "s_aux") if options.get(name) is not None]
    if given:
        raise UnsupportedError(
            f"{type(module).__name__} passes {', '.join(given)} to its attention function; linear attention needs "
            "weights that depend on query and key alone. Leave `attention` out for this model"
        )


AttentionInterface.register(NAME, kernel_attention_forward)
AttentionMaskInterface.register(NAME, padding_mask)
