"""The attention function "snnk_peft" of transformers' AttentionInterface, and the mask function that goes with it.

A model that is switched to it calls this function in every layer. Layers with a KernelAttention use that; all others,
and all of them while adapters are disabled, compute softmax attention as before. The mask function reduces a mask to
what linear attention supports: one entry per key, which marks it as real or gives its document in a packed row. Softmax
layers get their own mask, built from it here.

Masks cover all tokens from the first to the last query, in every cache. Keys beyond these are slots of a static cache
that are still empty; if there are fewer keys, a layer with a sliding window has dropped the first ones.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.utils import output_capturing

from snnk_peft.errors import UnsupportedError
from snnk_peft.functional.blocks import takes_blocks
from snnk_peft.functional.pairwise import pairwise_mask
from snnk_peft.layers.kernel_attention import KernelAttention
from snnk_peft.parts.attention.masks import (
    NUMBERS,
    attend_per_document,
    band_width,
    packed_documents,
    read_mask_function,
    refuse_narrow_band,
    refuse_restarts,
)
from snnk_peft.parts.attention.softmax import softmax_attention

__all__ = ["NAME", "kernel_attention_forward", "padding_mask", "pairwise_mask"]

# A bundle's code file contains this module too, and must not replace the functions that the package registered.
NAME = "snnk_peft" if __name__.startswith("snnk_peft.") else __name__
CACHE_LAYER = "snnk_cache_layer"  # attribute of keys: the cache layer that they went through (cache.py)


def padding_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | torch.Tensor = 0,
    kv_offset: int = 0,
    mask_function: Any = None,
    attention_mask: torch.Tensor | None = None,
    device: torch.device | str | None = None,
    **kwargs: Any,
) -> torch.Tensor | None:
    """Reduce a mask to one entry per key, or None if there is no padding.

    Returns:
        (batch, tokens), bool, True for real tokens; or int32, the numbers of packed documents. The tokens are all from
        the first to the last query.

    Raises:
        UnsupportedError: a mask of another shape or pattern, which linear attention does not support.
    """
    # Only causal masks can be packed; other masks come with a permission to skip them.
    bidirectional = mask_function is None or "allow_is_bidirectional_skip" in kwargs
    alike = kv_length == q_length and kv_offset == 0
    alone = attention_mask is None and kv_length == q_length
    pattern = read_mask_function(mask_function, may_be_packed=alone and not bidirectional)
    if pattern.documents is not None:
        return pattern.documents.expand(batch_size, -1).to(NUMBERS).contiguous()
    end = kv_offset + kv_length
    if pattern.causal and kv_length != q_length:  # reading the offset of a static cache waits for the accelerator
        end = min(end, int(q_offset) + q_length)
    if attention_mask is None:
        if end == kv_length and kv_offset == 0:
            return None
        return torch.ones(batch_size, end, dtype=torch.bool, device=device)
    if attention_mask.dim() != 2:
        raise UnsupportedError(
            f"attention_mask has shape {tuple(attention_mask.shape)}; linear attention needs a padding mask (batch, "
            "keys), True or 1 where a key counts. A mask per pair of tokens needs softmax attention"
        )
    mask = attention_mask[:, :end].bool()
    if mask.shape[1] < end:  # keys that the mask does not cover count
        mask = nn.functional.pad(mask, (0, end - mask.shape[1]), value=True)
    # Checking is free on a CPU, masking is not; an accelerator would synchronise, and a graph would bake in the result.
    return None if bidirectional and alike and takes_blocks(mask) and bool(mask.all()) else mask


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
    """Compute attention for a layer: q (B, H, L, d), k and v (B, G, N, d) -> (B, L, H, D), and weights (B, H, L, N).

    Attention dropout (on weights that are never formed) does not exist for linear attention and is ignored there.

    Args:
        module: the attention module; determines whether it is causal and which KernelAttention is in use.
        query: queries.
        key: keys; from a RecurrentCache they are those of the new tokens, and carry the layer of the cache.
        value: values.
        attention_mask: from `padding_mask`, or None.
        dropout: for softmax layers.
        scaling: factor on q·k.
        is_causal: overrides the module's setting.
        **kwargs: `output_attentions` requests the weights; `sliding_window` restricts a softmax layer to a band;
            `cu_seq_lens_q` and `cu_seq_lens_k` give the ends of packed documents.

    Raises:
        UnsupportedError: a mask, a band or a bias that linear attention does not support, or weights for too long an
            input.
    """
    causal = bool(getattr(module, "is_causal", False)) if is_causal is None else is_causal
    if attention_mask is not None and (attention_mask.dim() != 2 or attention_mask.dtype not in (torch.bool, NUMBERS)):
        raise UnsupportedError(
            f"{type(module).__name__} received an attention mask of shape {tuple(attention_mask.shape)} and "
            f"{attention_mask.dtype}; expected the padding mask (batch, keys) of bool. Masks and biases per pair of "
            "tokens need softmax attention"
        )
    refuse_biases(module, kwargs)
    weights_wanted = wants_weights(kwargs)
    kernel = active_kernel(module)
    recurrent = getattr(key, CACHE_LAYER, None)
    seen = key.shape[2] if recurrent is None else recurrent.get_seq_length()
    seen = seen if attention_mask is None else attention_mask.shape[1]
    window = band_width(module, kwargs, seen)
    documents = packed_documents(attention_mask, query, key, kwargs)
    # Only a joint near field reads them, and recorders, which stand in for one.
    unread = kernel is None or (isinstance(kernel, KernelAttention) and kernel.joint is None)
    positions = None if unread else token_positions(kwargs.get("position_ids"), query, seen)
    if kernel is not None:
        refuse_narrow_band(module, kernel.near_field, window, seen)
        if causal and attention_mask is None and documents is None:
            refuse_restarts(kwargs.get("position_ids"))
        if causal and documents is None and isinstance(kernel, KernelAttention):  # recorders compute softmax
            kernel.check_length(seen, attention_mask)
    if documents is not None and (weights_wanted or recurrent is not None):
        raise UnsupportedError(
            "attention weights (output_attentions=True) and a RecurrentCache speak of one document per row, and these "
            "rows are packed (position_ids restart, or cu_seq_lens_q is given). Give one document per row, padded, or "
            "leave output_attentions and past_key_values out"
        )
    if recurrent is not None:  # the keys come from a RecurrentCache, which holds sums over those before them
        if weights_wanted:
            raise UnsupportedError(
                "attention weights were asked for (output_attentions=True) while generating with a RecurrentCache, "
                "which keeps no keys that they could belong to; pass "
                "past_key_values=transformers.DynamicCache(config=model.config), or leave output_attentions out"
            )
        out = recurrent.attend(
            kernel, query, key, value, attention_mask, causal=causal, scaling=scaling, positions=positions
        )
        return out.transpose(1, 2).contiguous(), None
    attend: Any
    if kernel is None:
        attend = partial(softmax_attention, module, dropout=dropout, scaling=scaling, causal=causal, window=window)
    else:
        attend = partial(kernel_attention, kernel, scaling=scaling, causal=causal)
    if documents is not None:
        return attend_per_document(lambda *tensors: attend(*tensors)[0], documents, query, key, value), None
    key, value, mask = fitted_to_mask(key, value, attention_mask, all_needed=kernel is not None)
    if kernel is not None:
        attend = partial(attend, positions=positions)
    return attend(query, key, value, mask, weights_wanted=weights_wanted)


def token_positions(position_ids: torch.Tensor | None, query: torch.Tensor, seen: int) -> torch.Tensor:
    """Return the model's positions of the queries' tokens, the last ones of those seen, (B or 1, L)."""
    length = query.shape[2]
    if position_ids is not None and position_ids.dim() == 2 and position_ids.shape[1] == length:
        return position_ids
    return torch.arange(seen - length, seen, device=query.device)[None]


def kernel_attention(
    kernel: KernelAttention,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    *,
    scaling: float | None,
    causal: bool,
    weights_wanted: bool = False,
    positions: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Compute (B, L, H, D), and the weights (B, H, L, N) or None; arguments as for `softmax_attention`."""
    options: dict[str, Any] = {"causal": causal, "scaling": scaling, "positions": positions}
    out = kernel(query, key, value, mask, **options)
    weights = kernel.weights(query, key, mask, **options) if weights_wanted else None
    return out.transpose(1, 2).contiguous(), weights


def fitted_to_mask(
    key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, *, all_needed: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Return keys, values and mask of the same tokens, the last of which are the queries'.

    Args:
        key: (B, G, N, d), including empty slots of a static cache, or without the tokens that a layer with a sliding
            window has dropped.
        value: (B, G, N, D).
        mask: (B, tokens) from `padding_mask`, or None for N tokens.
        all_needed: whether no key may be missing.

    Raises:
        UnsupportedError: a needed key is missing.
    """
    if mask is None or mask.shape[1] == key.shape[2]:
        return key, value, mask
    tokens, slots = mask.shape[1], key.shape[2]
    if slots > tokens:
        return key[:, :, :tokens], value[:, :, :tokens], mask
    if all_needed:
        raise UnsupportedError(
            f"the cache keeps {slots} of {tokens} keys, as in layers with a sliding window, and this layer has linear "
            "attention, which sees all of them. Pass past_key_values=RecurrentCache(model), or a "
            "transformers.DynamicCache() made without a config, which keeps all keys"
        )
    return key, value, mask[:, tokens - slots :]


def active_kernel(module: nn.Module) -> KernelAttention | None:
    """Return the KernelAttention in use for an attention module, or None for softmax."""
    bundled = getattr(module, "snnk_kernel", None)
    if bundled is not None:
        return bundled
    owner = getattr(module, "snnk_owner", None)
    return None if owner is None else owner()


def is_linear(implementation: str | None) -> bool:
    """Return whether an attention implementation is this one, or its copy in a bundle's code file."""
    function = AttentionInterface().get(implementation)
    return getattr(function, "__name__", None) == kernel_attention_forward.__name__


def wants_weights(options: dict[str, Any]) -> bool:
    """Return whether the caller asked for attention weights.

    Some models do not pass `output_attentions` to their attention functions (GPT-2), or read it from their config. The
    outputs that transformers is about to collect show it in all cases.
    """
    collected = output_capturing._active_collector.get()
    return bool(options.get("output_attentions")) or "attentions" in (collected or ())


def refuse_biases(module: nn.Module, options: dict[str, Any]) -> None:
    """Raise UnsupportedError if the model adds a bias to q·k, or to the sum of the weights."""
    given = [name for name in ("position_bias", "softcap", "s_aux") if options.get(name) is not None]
    if given:
        raise UnsupportedError(
            f"{type(module).__name__} passes {', '.join(given)} to its attention function; linear attention needs "
            "weights that depend on query and key alone. Leave `attention` out for this model"
        )


AttentionInterface.register(NAME, kernel_attention_forward)
AttentionMaskInterface.register(NAME, padding_mask)
