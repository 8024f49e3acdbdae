"""FFN blocks: expansion and activation become Φ(x) Aᵀ + b, the contraction stays (SNNK paper, 4.4)."""

from __future__ import annotations

from functools import partial

from torch import nn

from snnk_peft.config import FFNPart, resolve_layers
from snnk_peft.errors import ConfigError
from snnk_peft.families.base import module_at
from snnk_peft.functional.at_hand import at_hand
from snnk_peft.layers.slots import Bypass, Replace, Slot
from snnk_peft.layers.snnk_linear import SNNKLinear
from snnk_peft.patchers import PATCHERS
from snnk_peft.patchers.base import Patch, PatchContext


@PATCHERS.register("ffn")
def plan_ffn(context: PatchContext, part: FFNPart) -> list[Patch]:
    """The patches of `part`; ConfigError for layers that the model lacks or more landmarks than rows."""
    context.require_plain_ffn("ffn: leave this part out, or use adapters")
    family = context.family
    layers = family.layer_paths(context.model)
    chosen, faults = resolve_layers("ffn.layers", part.layers, len(layers))
    patches: list[Patch] = []
    for index in chosen:
        layer = layers[index]
        ffn_in = context.linear(f"{layer}.{family.ffn_in}", "the FFN expansion")
        activation = module_at(context.model, f"{layer}.{family.activation}", "the FFN activation")
        ffn_out = context.linear(f"{layer}.{family.ffn_out}", "the FFN contraction")
        if part.feature_map_spec().needs_layer and part.num_features > ffn_in.out_features:
            faults.append(
                f"ffn.num_features is {part.num_features} with projection {part.projection!r}; layer {index} has only "
                f"{ffn_in.out_features} hidden units to choose from"
            )
            continue
        build = partial(_replace, context, part, index, layer, ffn_in, activation, ffn_out)
        patches += [Patch(f"{layer}.{family.ffn_in}", build), Patch(f"{layer}.{family.activation}", Bypass)]
        if part.train_contraction:
            patches.append(Patch(f"{layer}.{family.ffn_out}", None, train=True))
    if faults:
        raise ConfigError(faults)
    return patches


def _replace(
    context: PatchContext,
    part: FFNPart,
    index: int,
    layer: str,
    ffn_in: nn.Linear,
    activation: nn.Module,
    ffn_out: nn.Linear,
) -> Slot:
    slot = f"layer.{index}.ffn"
    mean, std = context.input_statistics(f"{layer}.{context.family.ffn_norm}", "the LayerNorm before the FFN")
    options: dict[str, object] = {"append_input": part.linear_path}
    importance = None
    if part.feature_map_spec().needs_layer:
        # Without data, a unit matters by how much it varies times how much of it the contraction passes on.
        with at_hand(ffn_in), at_hand(ffn_out):
            spread = (ffn_in.weight.detach().float().cpu() * std).norm(dim=1)
            importance = spread.to(ffn_in.weight.device) * ffn_out.weight.detach().float().norm(dim=0)
    else:
        # Whitened inputs have length √dim; the scale gives unit pre-activations.
        options.update(shift=mean, inverse_std=1 / std, scale=ffn_in.in_features**-0.5)
    stage = context.stage(part, ffn_in.in_features, slot, ffn_in, importance, **options)
    stand_in = SNNKLinear.from_linear(
        ffn_in,
        activation,
        stage,
        init=part.init,
        generator=context.generator(slot),
        input_mean=mean,
        input_std=std,
    )
    return Replace(stand_in, f"{layer}.{context.family.activation}", f"{layer}.{context.family.ffn_out}")
