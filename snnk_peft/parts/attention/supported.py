"""Checks that a model's attention and a near field's settings are supported, and the rotary positions of a model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from snnk_peft.components import COMPONENTS
from snnk_peft.errors import ConfigError, UnsupportedError
from snnk_peft.families import FAMILIES
from snnk_peft.families.base import ModelFamily
from snnk_peft.functional.rotary import Rotary
from snnk_peft.layers.joint_attention import may_be_joint
from snnk_peft.projections import PROJECTIONS

# Names of modules or parameters with which attention adds a bias to q·k, or to the sum of the weights.
ADDED_TO_WEIGHTS = {
    "relative_attention_bias": "a bias per pair of positions",
    "relative_position_bias": "a bias per pair of positions",
    "relative_position_bias_table": "a bias per pair of positions",
    "continuous_position_bias_mlp": "a bias per pair of positions",
    "rel_embeddings": "a bias per pair of positions",
    "sinks": "attention sinks, a term in the denominator that belongs to no key",
}


def check_attention(model: nn.Module) -> None:
    """Check that linear attention can replace this model's attention, from its declared properties.

    Raises:
        UnsupportedError: it cannot; lists every reason, and what to do.
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
    added = {what: name for name, what in reversed(ADDED_TO_WEIGHTS.items()) if name in names}
    yield from (f"has {what} ({name!r})" for what, name in added.items())
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
    # An encoder taken out of its model keeps the config, which describes a decoder.
    decodes = getattr(config, "is_encoder_decoder", False) and "decoder" in names
    if decodes or getattr(config, "add_cross_attention", False):
        yield "attends from a decoder to an encoder (cross attention)"
    if not getattr(model, "_can_set_attn_implementation", lambda: False)():
        yield "does not call its attention through AttentionInterface, so it would ignore the exchange"
    elif not (getattr(model, "_supports_attention_backend", False) or _declared(config)):
        yield "declares that it supports no attention functions from outside (_supports_attention_backend is False)"


def _declared(config: Any) -> bool:
    """Return whether the family declares that the model calls external attention functions."""
    model_type = str(getattr(config, "model_type", ""))
    return model_type in FAMILIES and FAMILIES[model_type].attention_backend


def near_field_faults(part: Any, where: str) -> list[str]:
    """List the faults of `near_field_normalisation` and `sinks`."""
    if not part.joint:
        if type(part.sinks) is not int or part.sinks <= 0:
            return []
        return [
            f"{where}.sinks is {part.sinks} with near_field_normalisation {part.near_field_normalisation!r}; exact "
            "tokens beside the band need one normalisation with it: near_field_normalisation='joint'"
        ]
    faults = []
    if part.near_field is None:
        faults.append(
            f"{where}.near_field_normalisation is 'joint' without near_field; expected the width of the exact band as "
            "well, such as near_field=64"
        )
    others = [entry if isinstance(entry, Mapping) else {} for entry in part.further]
    for place, entry in [(where, {}), *((f"{where}.sum_of[{i}]", entry) for i, entry in enumerate(others))]:
        params = {} if "component" in entry else part.component_params
        component = entry.get("component", part.component)
        projection = entry.get("projection", part.projection)
        if not _known(component, projection) or _fit(component, projection, entry.get("component_params", params)):
            continue
        fitting = [name for name in COMPONENTS if _fit(name, "orf", {})]
        faults.append(
            f"{place} has component {component!r} over {projection!r}, whose features are not known as positive "
            "numbers on the scale of e^(q·k), as near_field_normalisation='joint' needs them; expected one of "
            f"{', '.join(fitting)}, over rows of equal weights such as 'orf', or use 'blend'"
        )
    return faults


def _known(component: Any, projection: Any) -> bool:
    """Return False for unknown names, which the part reports itself."""
    return component in COMPONENTS and projection in PROJECTIONS


def _fit(component: str, projection: str, params: Mapping[str, Any]) -> bool:
    try:
        made = COMPONENTS[component](**params)
    except (ConfigError, TypeError):  # wrong arguments are a fault of their own
        return True
    return may_be_joint(made, PROJECTIONS[projection])


STRETCHED = ("dynamic", "longrope")  # whose angles change with the length of the text


def rotary_of(model: nn.Module, family: ModelFamily, distance: int, where: str) -> Rotary | None:
    """Return the inverse rotation; None for a model without rotary positions.

    Raises:
        UnsupportedError: the model's rotation of queries and keys is unknown, or depends on layer or length.
    """
    found: dict[str, torch.Tensor] = {
        name: tensor
        for name, tensor in model.named_buffers()
        if name.endswith("inv_freq") and not name.endswith("original_inv_freq")
    }
    if not found and not family.rotary:
        return None
    config: Any = family.config_of(model)
    told: Any = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    kind = told.get("rope_type", "default")
    first = next(iter(found.values()), None)
    alike = all(first is not None and each.shape == first.shape and _equal(each, first) for each in found.values())
    plain = [name for name in found if name.rpartition(".")[2] == "inv_freq"]
    if not family.rotary or first is None or not alike or len(plain) < len(found) or kind in STRETCHED:
        raise UnsupportedError(
            f"{where} is True; of {type(model).__name__} (family {family.name!r}, rope_type {kind!r}) it is not known "
            "by which angles queries and keys are turned, or these differ from layer to layer or with the length. "
            "Leave position_free out, or, if it turns halves of a head as Llama does, describe the family with "
            "rotary=True"
        )
    numbers = torch.zeros_like(first, device="cpu") if first.device.type == "meta" else first
    return Rotary(numbers.double().tolist(), distance)


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.device.type == "meta" or torch.equal(one, other.to(one.device))
