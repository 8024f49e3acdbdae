"""Attention: softmax becomes linear attention, in all layers or some.

Layers that attend to a band of neighbours only (ModernBERT's local layers, sliding windows) are linear in length
already. "all", "top-K" and "bottom-K" therefore count the layers that attend to everything, and local ones stay as they
are. A list of ints may name a local layer, with `near_field`: an exact band and, beyond it, linear attention.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from functools import partial
from typing import Any

from torch import nn

from snnk_peft.config import AttentionPart, resolve_layers
from snnk_peft.errors import ConfigError, UnsupportedError
from snnk_peft.families import FAMILIES
from snnk_peft.families.base import module_at
from snnk_peft.layers.attention_term import AttentionTerm
from snnk_peft.layers.kernel_attention import KernelAttention
from snnk_peft.layers.slots import Attend, Slot
from snnk_peft.parts import DEFAULT_ROWS
from snnk_peft.patchers import PATCHERS
from snnk_peft.patchers.base import Patch, PatchContext
from snnk_peft.projections import PROJECTIONS

# What a module or parameter is called where attention adds something to q·k, or to the sum of the weights.
ADDED_TO_WEIGHTS = {
    "relative_attention_bias": "a bias per pair of positions",
    "relative_position_bias": "a bias per pair of positions",
    "relative_position_bias_table": "a bias per pair of positions",
    "continuous_position_bias_mlp": "a bias per pair of positions",
    "rel_embeddings": "a bias per pair of positions",
    "sinks": "attention sinks, a term in the denominator that belongs to no key",
}


@PATCHERS.register("attention")
def plan_attention(context: PatchContext, part: AttentionPart) -> list[Patch]:
    """The patches of `part`; UnsupportedError for a model whose attention cannot be exchanged."""
    model, family = context.model, context.family
    check_attention(model)
    paths = [f"{layer}.{family.attention}" for layer in family.layer_paths(model)]
    chosen = choose_layers(part, [_window(module_at(model, path, "the attention")) for path in paths])
    config = family.config_of(model)
    heads = config.num_attention_heads
    key_heads = getattr(config, "num_key_value_heads", None) or heads
    dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    return [Patch(paths[index], partial(_attend, context, part, index, dim, heads, key_heads)) for index in chosen]


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
    """num_features; where nothing is said, the number nearest to the usual one that the projection can have."""
    if part.num_features is not None:
        return part.num_features
    return PROJECTIONS[part.projection].nearest_size(dim, DEFAULT_ROWS, **part.projection_params)


def _window(attention: nn.Module) -> int | None:
    """Width of the band that an attention module is restricted to, the diagonal included; None for all tokens."""
    return getattr(attention, "sliding_window", None)


def choose_layers(part: AttentionPart, windows: list[int | None]) -> list[int]:
    """Indices of the layers that `part` exchanges.

    Args:
        part: says which.
        windows: per layer of the model, the width of its band, or None if it attends to everything.

    Raises:
        ConfigError: layers that do not exist, or a local layer named without `near_field`.
        UnsupportedError: every layer is local.
    """
    everywhere = [index for index, window in enumerate(windows) if window is None]
    if isinstance(part.layers, str):
        if not everywhere:
            raise UnsupportedError(
                f"all {len(windows)} layers attend to a band of {windows[0]} tokens only, which is linear in length "
                "already; name layers as a list of ints, with near_field, to let them see beyond their band"
            )
        chosen, faults = resolve_layers("attention.layers", part.layers, len(everywhere))
        if faults and len(everywhere) < len(windows):
            faults = [f"{faults[0]} that attend to all tokens (the others, local ones, are not counted)"]
        chosen = [everywhere[index] for index in chosen]
    else:
        chosen, faults = resolve_layers("attention.layers", part.layers, len(windows))
        faults += [
            f"attention.layers names layer {index}, which attends to a band of {windows[index]} tokens on each side "
            f"only, itself included: that is linear in length already. Leave it out, or set near_field="
            f"{windows[index]} to keep the band and add linear attention beyond it"
            for index in chosen
            if windows[index] is not None and part.near_field is None
        ]
    if faults:
        raise ConfigError(faults)
    return chosen


def check_attention(model: nn.Module) -> None:
    """Whether linear attention can stand in for this model's attention, by what the model says about itself.

    Raises:
        UnsupportedError: it cannot; every reason, and what to do.
    """
    reasons = list(_reasons(model))
    if reasons:
        raise UnsupportedError(
            f"AttentionPart: {type(model).__name__} cannot take linear attention, because it {', and '.join(reasons)}. "
            "Linear attention needs weights that depend on query and key alone, called through transformers' "
            "AttentionInterface, as most families of snnk_peft have them; leave `attention` out for this model"
        )


def _reasons(model: nn.Module) -> Iterator[str]:
    config: Any = getattr(model, "config", None)
    names = [path.rpartition(".")[2] for path, _ in [*model.named_modules(), *model.named_parameters()]]
    found = {what: name for name, what in reversed(ADDED_TO_WEIGHTS.items()) if name in names}
    yield from (f"has {what} ({name!r})" for what, name in found.items())
    if any(
        hasattr(module, "build_alibi_tensor") or hasattr(module, "build_mpt_alibi_tensor") for module in model.modules()
    ):
        yield "uses ALiBi, a bias per pair of positions"
    elif getattr(config, "alibi", False):
        yield "uses ALiBi, a bias per pair of positions (config.alibi)"
    kind = getattr(config, "position_embedding_type", None)
    if isinstance(kind, str) and kind.startswith("relative"):
        yield f"adds relative positions to q·k (config.position_embedding_type is {kind!r})"
    if getattr(config, "attn_logit_softcapping", None) is not None:
        yield f"caps q·k softly (config.attn_logit_softcapping is {config.attn_logit_softcapping})"
    # An encoder taken out of its model keeps the config that speaks of a decoder.
    decodes = getattr(config, "is_encoder_decoder", False) and "decoder" in names
    if decodes or getattr(config, "add_cross_attention", False):
        yield "attends from a decoder to an encoder (cross attention)"
    if not getattr(model, "_can_set_attn_implementation", lambda: False)():
        yield "does not call its attention through AttentionInterface, so it would ignore the exchange"
    elif not (getattr(model, "_supports_attention_backend", False) or _declared(config)):
        yield "declares that it supports no attention functions from outside (_supports_attention_backend is False)"


def _declared(config: Any) -> bool:
    """Whether the family says for the model that it calls attention functions from outside."""
    model_type = str(getattr(config, "model_type", ""))
    return model_type in FAMILIES and FAMILIES[model_type].attention_backend
