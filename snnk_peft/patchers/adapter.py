"""Adapters: Houlsby (behind attention and FFN), Pfeiffer (behind the FFN), parallel (beside the FFN), query_value."""

from __future__ import annotations

from functools import partial

from torch import nn

from snnk_peft.config import AdapterPart, resolve_layers
from snnk_peft.errors import ConfigError, UnsupportedError
from snnk_peft.families.base import module_at
from snnk_peft.layers.adapter import GatedReadout, SNNKAdapter
from snnk_peft.layers.feature_stage import FeatureStage
from snnk_peft.layers.slots import After, BesideLinear, ParallelActivation, ParallelFeatures, ParallelReadout, Slot
from snnk_peft.patchers import PATCHERS
from snnk_peft.patchers.base import Patch, PatchContext


@PATCHERS.register("adapter")
def plan_adapters(context: PatchContext, part: AdapterPart) -> list[Patch]:
    """The patches of `part`; ConfigError if it names layers that the model lacks."""
    family = context.family
    layers = family.layer_paths(context.model)
    chosen, faults = resolve_layers("adapter.layers", part.layers, len(layers))
    if faults:
        raise ConfigError(faults)
    parallel = part.placement == "parallel"
    if parallel:
        context.require_plain_ffn("adapter.placement 'parallel': use 'houlsby' or 'pfeiffer'")
    patches: list[Patch] = []
    for index in chosen:
        if part.placement == "query_value":
            patches += _query_value(context, part, layers[index], f"layer.{index}.adapter")
            continue
        ffn_out = context.linear(f"{layers[index]}.{family.ffn_out}", "the FFN contraction")
        slot = f"layer.{index}.adapter"
        if parallel:
            ffn_in = context.linear(f"{layers[index]}.{family.ffn_in}", "the FFN expansion")
            patches += _parallel(context, part, layers[index], ffn_in, slot)
            continue
        places = {"ffn": family.ffn_adapter}
        if part.placement == "houlsby":
            places = {"attention": family.attention_adapter, **places}
        for name, relative in places.items():
            path = f"{layers[index]}.{relative}"
            module_at(context.model, path, f"the end of the {name} block")
            patches.append(Patch(path, partial(_after, context, part, ffn_out.out_features, f"{slot}.{name}")))
    return patches


def _stage(context: PatchContext, part: AdapterPart, dim: int, slot: str) -> FeatureStage:
    normalize = part.uses_normalize
    # Normalised inputs have length √dim; this gives unit pre-activations. Raw inputs are taken as they are.
    scale = dim**-0.5 if normalize else 1.0
    stage = context.stage(part, dim, slot, normalize=normalize, center=normalize, scale=scale)
    # Learned rows take the factor themselves: else a step of the optimizer would move them by √dim less than LoRA's.
    if stage.feature_map.projection.absorb(scale):
        stage.scale = 1.0
    return stage


def _readout_options(context: PatchContext, part: AdapterPart, slot: str) -> dict[str, object]:
    return {
        "init": part.init,
        "gate": part.uses_gate,
        "scaling": part.effective_scaling,
        "generator": context.generator(slot),
    }


def _after(context: PatchContext, part: AdapterPart, dim: int, slot: str) -> Slot:
    return After(SNNKAdapter(_stage(context, part, dim, slot), **_readout_options(context, part, slot)))


def _query_value(context: PatchContext, part: AdapterPart, layer: str, slot: str) -> list[Patch]:
    patches = []
    for name, relative in (("query", context.family.query), ("value", context.family.value)):
        if relative is None:
            raise UnsupportedError(
                f"adapter.placement 'query_value': {type(context.model).__name__} (family {context.family.name!r}) has "
                f"no Linear that makes the {name} alone; use 'houlsby', 'pfeiffer' or 'parallel', or describe the "
                "architecture with ModelFamily(query=..., value=...) and register_family"
            )
        path = f"{layer}.{relative}"
        linear = context.linear(path, f"the {name} projection")
        patches.append(Patch(path, partial(_beside, context, part, linear, f"{slot}.{name}")))
    return patches


def _beside(context: PatchContext, part: AdapterPart, linear: nn.Linear, slot: str) -> Slot:
    stage = _stage(context, part, linear.in_features, slot)
    options = _readout_options(context, part, slot)
    return BesideLinear(stage, GatedReadout(stage, out_dim=linear.out_features, **options))  # type: ignore[arg-type]


def _parallel(context: PatchContext, part: AdapterPart, layer: str, ffn_in: nn.Linear, slot: str) -> list[Patch]:
    family, width = context.family, ffn_in.out_features
    module_at(context.model, f"{layer}.{family.activation}", "the FFN activation")

    def features() -> Slot:
        return ParallelFeatures(_stage(context, part, ffn_in.in_features, slot))

    def readout() -> Slot:
        # The same seed and slot draw the same W again, which init="paper" needs; only A and v are kept.
        stage = _stage(context, part, ffn_in.in_features, slot)
        return ParallelReadout(GatedReadout(stage, **_readout_options(context, part, slot)))  # type: ignore[arg-type]

    return [
        Patch(f"{layer}.{family.ffn_in}", features),
        Patch(f"{layer}.{family.activation}", lambda: ParallelActivation(width)),
        Patch(f"{layer}.{family.ffn_out}", readout),
    ]
