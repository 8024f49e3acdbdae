"""Attention: softmax becomes linear attention over feature maps, in all layers or some."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

from snnk_peft.config import AttentionPart, resolve_layers
from snnk_peft.errors import ConfigError, UnsupportedError
from snnk_peft.families.base import module_at
from snnk_peft.layers.attention_term import AttentionTerm
from snnk_peft.layers.kernel_attention import KernelAttention
from snnk_peft.layers.slots import Attend, Slot
from snnk_peft.patchers import PATCHERS
from snnk_peft.patchers.base import Patch, PatchContext
from snnk_peft.projections import PROJECTIONS


@PATCHERS.register("attention")
def plan_attention(context: PatchContext, part: AttentionPart) -> list[Patch]:
    """The patches of `part`; UnsupportedError for a model whose attention cannot be exchanged."""
    model, family = context.model, context.family
    if not getattr(model, "_supports_attention_backend", False):
        raise UnsupportedError(
            f"{type(model).__name__} does not call its attention through transformers' AttentionInterface, so it would "
            "ignore the exchange; supported: bert, roberta, distilbert, electra, vit, deit, gpt2, llama"
        )
    layers = family.layer_paths(model)
    chosen, faults = resolve_layers("attention.layers", part.layers, len(layers))
    if faults:
        raise ConfigError(faults)
    config: Any = model.config
    heads = config.num_attention_heads
    key_heads = getattr(config, "num_key_value_heads", None) or heads
    dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    patches = []
    for index in chosen:
        path = f"{layers[index]}.{family.attention}"
        module_at(model, path, "the attention")
        patches.append(Patch(path, partial(_attend, context, part, index, dim, heads, key_heads)))
    return patches


def _attend(context: PatchContext, part: AttentionPart, index: int, dim: int, heads: int, key_heads: int) -> Slot:
    terms = []
    for number, own in enumerate(part.terms()):
        slot = f"layer.{index}.attention" + (f".term.{number}" if number else "")
        names = [f"{slot}.{head}" for head in range(key_heads)] if own.per_head else [slot]
        sized = dataclasses.replace(own, num_features=_rows(own, dim))
        # Keys of their own start as the same draw, and what is redrawn stays the same for both: same slot names.
        queries, keys = (context.feature_maps(sized, dim, names) for _ in range(2))
        terms.append(AttentionTerm(queries, keys if own.separate_maps else None))
    return Attend(KernelAttention(terms, heads, near_field=part.near_field))


def _rows(part: AttentionPart, dim: int) -> int:
    """num_features; where it was left at the default, the nearest number that the projection can have."""
    if part.num_features != AttentionPart.num_features:
        return part.num_features
    return PROJECTIONS[part.projection].nearest_size(dim, part.num_features, **part.projection_params)
