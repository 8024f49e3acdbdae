"""FFN blocks: expansion and activation become Φ(x) Aᵀ + b, the contraction stays (SNNK paper, 4.4)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from torch import nn

from snnk_peft.errors import ConfigError, UnsupportedError
from snnk_peft.families import family_of
from snnk_peft.families.base import as_linear, module_at
from snnk_peft.functional.at_hand import at_hand, wide_on_cpu
from snnk_peft.layers.slots import Slot
from snnk_peft.layers.snnk_linear import SNNKLinear
from snnk_peft.options import documented, option
from snnk_peft.parts import PARTS
from snnk_peft.parts.base import Part, Patch, PatchContext, resolve_layers, shares_of
from snnk_peft.parts.replaced.slots import Bypass, Replace, ReplacingPart

TRIED = (1 / 48, 1 / 16, 1 / 6, 1 / 3)  # shares of the hidden units that `plan` tries


@PARTS.register("ffn")
@documented
@dataclass
class FFNPart(ReplacingPart):
    """Expansion and activation of the feed-forward block become Φ(x) Aᵀ + b; the contraction stays (4.4, J.4).

    `calibrate` replaces the initial A by a fit to real activations.
    """

    component: str = option("gelu", "the function f in the features f(Wx), a name in `COMPONENTS`.", checked=False)
    projection: str = option("landmark", "the matrix W, a name in `PROJECTIONS`.", checked=False)
    num_features: int = option(64, "rows of W, >= 1.", checked=False)
    linear_path: bool = option(
        False,
        "append the input itself to the features, so that the readout has an exact affine part. Costs dim² "
        "MACs per token after bundling, and helps most with few features.",
    )
    train_contraction: bool = option(
        False, "also train the contraction (the block's second matrix) of the converted layers."
    )

    @classmethod
    def candidates(cls, model: nn.Module, length: int) -> list[Part]:
        family = family_of(model)
        expansion = f"{family.layer_paths(model)[0]}.{family.ffn_in}"
        units = as_linear(module_at(model, expansion, "the FFN expansion"))
        return [cls(num_features=size) for size in shares_of(getattr(units, "out_features", 0), TRIED)]

    @classmethod
    def probes(cls) -> dict[str, Part]:
        return {"ffn": cls("relu", "orf", 16)}

    def plan(self, context: PatchContext) -> list[Patch]:
        """Plan the layers; more landmarks than hidden units are a fault."""
        narrower = "; NarrowFFNPart makes gated FFNs narrower" if context.family.gated else ""
        context.require_plain_ffn(f"{context.where}: leave this part out, or use adapters{narrower}")
        family = context.family
        layers = family.layer_paths(context.model)
        chosen, faults = resolve_layers(f"{context.where}.layers", self.layers, len(layers))
        patches: list[Patch] = []
        for index in chosen:
            layer = layers[index]
            ffn_in = context.linear(f"{layer}.{family.ffn_in}", "the FFN expansion")
            activation = module_at(context.model, f"{layer}.{family.activation}", "the FFN activation")
            ffn_out = context.linear(f"{layer}.{family.ffn_out}", "the FFN contraction")
            if self.needs_layer and self.num_features > ffn_in.out_features:
                faults.append(
                    f"{context.where}.num_features is {self.num_features} with projection {self.projection!r}; "
                    f"layer {index} has only {ffn_in.out_features} hidden units to choose from"
                )
                continue
            build = partial(_replace, context, self, index, layer, ffn_in, activation, ffn_out)
            patches += [
                Patch(f"{layer}.{family.ffn_in}", build, replaces=True),
                Patch(f"{layer}.{family.activation}", Bypass, replaces=True),
            ]
            if self.train_contraction:
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
    site = f"layer.{index}.ffn"
    if context.family.ffn_norm is None:
        raise UnsupportedError(
            f"the family {context.family.name!r} has no ffn_norm, the LayerNorm whose output its FFNs read, from which "
            "features take the mean and variance of their inputs; name it, if there is one, or use NarrowFFNPart"
        )
    mean, std = context.input_statistics(f"{layer}.{context.family.ffn_norm}", "the LayerNorm before the FFN")
    options: dict[str, object] = {"append_input": part.linear_path}
    importance = None
    if part.needs_layer:
        # Without data, a unit's importance is its variation times the norm of its column in the contraction.
        with at_hand(ffn_in), at_hand(ffn_out):
            spread = (wide_on_cpu(ffn_in.weight) * std).norm(dim=1)
            importance = spread.to(ffn_in.weight.device) * ffn_out.weight.detach().float().norm(dim=0)
    else:
        # Whitened inputs have length √dim; the scale gives unit pre-activations.
        options.update(shift=mean, inverse_std=1 / std, scale=ffn_in.in_features**-0.5)
    stage = context.stage(part, ffn_in.in_features, site, ffn_in, importance, **options)
    stand_in = SNNKLinear.from_linear(
        ffn_in,
        activation,
        stage,
        init=part.init,
        generator=context.generator(site),
        input_mean=mean,
        input_std=std,
    )
    return Replace(stand_in, f"{layer}.{context.family.activation}", f"{layer}.{context.family.ffn_out}")
