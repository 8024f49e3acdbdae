"""The modules that bundling leaves in a model; part of the code file of every bundle.

    FoldedAdapter   r + Φ(x) Mᵀ           r = x after a module, a parallel one's output (SNNK paper, Eq. 22 and App. D)
    Beside          [module(x), Φ(x)]     features of an adapter parallel to the FFN, emitted by its first module
    Leading         [module(h), z]        for x = [h, z]: a module that acts on the first entries only
    resize_heads    an attention module of transformers that splits into heads of another size
    mean_first      h'₁ = Σ_t m_t h_t / Σ_t m_t, h'_t = h_t for t > 1, m = 0 at padding: the mean over the tokens in the
                    first one's place, where poolers and heads expect the vector of a text

In training, slots pass the module to `beside`, `leading` and `mean_first` with each call. Shapes: x (..., dim), h of
`mean_first` (B, L, width).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from snnk_peft.errors import UnsupportedError
from snnk_peft.functional.precision import wide
from snnk_peft.layers.feature_stage import FeatureStage


class FoldedAdapter(nn.Module):
    """The adapter r + Φ(x) Mᵀ, with a residual r, and M as one Linear without bias."""

    def __init__(self, stage: FeatureStage, linear: nn.Linear):
        super().__init__()
        self.stage, self.linear = stage, linear

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """(..., dim) -> (..., out_dim), in the dtype of r; r defaults to x."""
        residual = x if residual is None else residual
        # Call the Linear instead of multiplying by its weight: it may be offloaded, adapted or replaced by now.
        added: Tensor = self.linear(self.stage(x))
        return residual + added.to(residual.dtype)


def beside(module: Callable[..., Tensor], stage: FeatureStage, x: Tensor, *args: object, **kwargs: object) -> Tensor:
    """Compute [module(x), Φ(x)]: (..., dim) -> (..., out + feature_dim), in the dtype of the module's output."""
    out = module(x, *args, **kwargs)
    features = stage(x.to(stage.feature_map.projection.dtype))
    return torch.cat((out, features.to(out.dtype)), -1)


def leading(module: Callable[..., Tensor], width: int, x: Tensor, *args: object, **kwargs: object) -> Tensor:
    """Compute [module(h), z] for x = [h, z] with h of length `width`: (..., width + rest) -> the same shape."""
    return torch.cat((module(x[..., :width], *args, **kwargs), x[..., width:]), -1)


class Beside(nn.Module):
    """Module form of `beside`, which holds the wrapped module."""

    def __init__(self, module: nn.Module, stage: FeatureStage):
        super().__init__()
        self.module, self.stage = module, stage

    def forward(self, x: Tensor) -> Tensor:
        """(..., dim) -> (..., out + feature_dim)."""
        return beside(self.module, self.stage, x)


class Leading(nn.Module):
    """Module form of `leading`, which holds the wrapped module."""

    def __init__(self, module: nn.Module, width: int):
        super().__init__()
        self.module, self.width = module, width

    def forward(self, x: Tensor) -> Tensor:
        """(..., width + rest) -> the same shape."""
        return leading(self.module, self.width, x)


HEAD_SIZES = ("attention_head_size", "head_dim")  # names of the attribute


def head_size(attention: nn.Module) -> int | None:
    """Return the head dimension of an attention module, or None if the module does not expose it."""
    sizes = [getattr(attention, name) for name in HEAD_SIZES if hasattr(attention, name)]
    return int(sizes[0]) if sizes else None


def resize_heads(attention: nn.Module, size: int) -> nn.Module:
    """Make an attention module split into heads of `size`, in place, and return it.

    Raises:
        ValueError: it has no such attribute.
    """
    names = [name for name in HEAD_SIZES if hasattr(attention, name)]
    if not names:
        raise ValueError(
            f"{type(attention).__name__} has none of {', '.join(HEAD_SIZES)}, by which attention modules of "
            "transformers split into heads; use the classes and the transformers version that the bundle was made with"
        )
    for name in names:
        setattr(attention, name, size)
    return attention


def token_mean(hidden: Tensor, counted: Tensor) -> Tensor:
    """Compute the mean (B, width) of (B, L, width) over the tokens in the mask `counted` (B, L); 0 if there are
    none."""
    return (hidden * counted.unsqueeze(-1)).sum(1) / counted.sum(1, keepdim=True).clamp_min(1)


def counted_tokens(hidden: Tensor, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor:
    """Return the mask of real tokens, (B, L) or (1, L) bool, from a Transformer layer's output and further arguments.

    Raises:
        UnsupportedError: no mask among them, or one that does not identify padding.
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
    # Keys that no query sees are padding. Additive masks are 0 or very negative, others nonzero at real tokens.
    seen = mask > torch.finfo(mask.dtype).min / 2 if mask.is_floating_point() and mask.ndim > 2 else mask != 0
    return seen.flatten(1, -2).any(1) if mask.ndim > 2 else seen


def mean_first(output: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Put the mean in the first token's place of a Transformer layer's output, (B, L, width) or a tuple that begins
    with it."""
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
