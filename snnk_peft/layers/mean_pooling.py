"""The mean over the tokens in the place of the first one, where poolers and heads look for the vector of a text.

    h'₁ = Σ_t m_t h_t / Σ_t m_t        h'_t = h_t  for t > 1        m is 0 at padding

A checkpoint that was trained on means (sentence embeddings) keeps nothing of use in [CLS]. Whatever reads the first
token of the last layer reads the mean then, without knowing.

Shapes: h (B, L, width). Part of the code file of bundles.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from snnk_peft.errors import UnsupportedError
from snnk_peft.functional.precision import wide


def token_mean(hidden: Tensor, counted: Tensor) -> Tensor:
    """(B, width), the mean of (B, L, width) over the tokens that (B, L) counts; 0 where it counts none."""
    return (hidden * counted.unsqueeze(-1)).sum(1) / counted.sum(1, keepdim=True).clamp_min(1)


def counted_tokens(hidden: Tensor, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor:
    """Return the tokens that are not padding, (B, L) or (1, L) bool, from a Transformer layer's arguments.

    Args:
        hidden: (B, L, width), what the layer gives.
        args: positional arguments of the layer after the hidden states; the first is its attention mask.
        kwargs: named arguments.

    Raises:
        UnsupportedError: no mask among them, or one that does not say which tokens are padding.
    """
    mask = args[0] if args else kwargs.get("attention_mask", args)
    if mask is None:  # no padding at all: transformers leaves the mask out
        return hidden.new_ones(hidden.shape[:2], dtype=torch.bool)
    if not isinstance(mask, Tensor) or mask.ndim < 2 or mask.shape[-1] != hidden.shape[1]:
        given = tuple(mask.shape) if isinstance(mask, Tensor) else "missing" if mask is args else type(mask).__name__
        raise UnsupportedError(
            f"mean pooling: the attention mask of the last layer is {given} for hidden states {tuple(hidden.shape)}; "
            "expected a tensor (examples, ..., tokens), or None, as the attention implementations 'sdpa' and 'eager' "
            "have it: choose one with set_attn_implementation"
        )
    # What no query sees is padding. Added masks are 0 or very negative, others count.
    seen = mask > torch.finfo(mask.dtype).min / 2 if mask.is_floating_point() and mask.ndim > 2 else mask != 0
    return seen.flatten(1, -2).any(1) if mask.ndim > 2 else seen


def mean_first(output: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """The output of a Transformer layer with the mean in the first token's place.

    Args:
        output: (B, L, width), or a tuple that begins with it.
        args: see `counted_tokens`.
        kwargs: likewise.
    """
    if isinstance(output, tuple):
        return mean_first(output[0], args, kwargs), *output[1:]
    mean = token_mean(wide(output), counted_tokens(output, args, kwargs)).to(output.dtype)
    return torch.cat((mean.unsqueeze(1), output[:, 1:]), 1)


def _hook(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
    return mean_first(output, args[1:], kwargs)


def put_mean_first(layer: nn.Module) -> nn.Module:
    """Make the Transformer layer return the mean in the first token's place."""
    layer.register_forward_hook(_hook, with_kwargs=True)
    return layer
