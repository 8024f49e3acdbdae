"""The pooler: dense + activation on the first token become Φ(x) Aᵀ + b (SNNK paper, 4.3.1, App. E and J.1).

Inputs and pretrained weights are both scaled by dim^-¼, so that their inner products are those of vectors of length
about one per coordinate pair. Where a model calls the activation as a function (RoBERTa, DistilBERT), it cannot be
taken out: then only the dense layer is replaced, and the target is its linear output.
"""

from __future__ import annotations

from functools import partial

from torch import nn

from snnk_peft.config import PoolerPart
from snnk_peft.errors import ConfigError, UnsupportedError
from snnk_peft.families.base import module_at
from snnk_peft.layers.slots import Bypass, Replace, Slot
from snnk_peft.layers.snnk_linear import SNNKLinear
from snnk_peft.patchers import PATCHERS
from snnk_peft.patchers.base import Patch, PatchContext


@PATCHERS.register("pooler")
def plan_pooler(context: PatchContext, part: PoolerPart) -> list[Patch]:
    """The patches of `part`; UnsupportedError if the model has no pooler."""
    family, model = context.family, context.model
    if family.pooler is None:
        raise UnsupportedError(
            f"pooler: {type(model).__name__} (family {family.name!r}) has no pooler to replace; leave `pooler` out"
        )
    path = family.path(model, family.pooler)
    dense = context.linear(path, "pooler: its dense layer")
    if part.feature_map_spec().needs_layer and part.num_features > dense.out_features:
        raise ConfigError(
            f"pooler.num_features is {part.num_features} with projection {part.projection!r}; the pooler has only "
            f"{dense.out_features} rows"
        )
    patches = []
    activation: nn.Module = nn.Identity()
    if family.pooler_activation is not None:
        activation_path = family.path(model, family.pooler_activation)
        activation = module_at(model, activation_path, "pooler: its activation")
        patches.append(Patch(activation_path, Bypass))
    return [Patch(path, partial(_replace, context, part, dense, activation)), *patches]


def _replace(context: PatchContext, part: PoolerPart, dense: nn.Linear, activation: nn.Module) -> Slot:
    family, dim = context.family, dense.in_features
    mean = std = None
    if family.last_norm is not None:
        last = family.layer_paths(context.model)[-1]
        mean, std = context.input_statistics(f"{last}.{family.last_norm}", "the LayerNorm before the pooler")
    scale = 1.0 if part.feature_map_spec().needs_layer else dim**-0.25
    stage = context.stage(part, dim, "pooler", dense, scale=scale)
    stand_in = SNNKLinear.from_linear(
        dense,
        activation,
        stage,
        init=part.init,
        generator=context.generator("pooler"),
        input_mean=mean,
        input_std=std,
    )
    reader = family.classifier_of_pooler
    present = reader is not None and any(name == reader for name, _ in context.model.named_modules())
    return Replace(
        stand_in,
        None if family.pooler_activation is None else family.path(context.model, family.pooler_activation),
        reader if present else None,
    )
