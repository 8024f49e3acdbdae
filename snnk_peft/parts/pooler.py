"""The pooler: dense + activation on the first token become Φ(x) Aᵀ + b (SNNK paper, 4.3.1, App. E and J.1).

Inputs and pretrained weights are both scaled by dim^-¼, so that their inner products are those of vectors of length
about one per coordinate pair. Where a model calls the activation as a function (RoBERTa, DistilBERT), it cannot be
taken out: then only the dense layer is replaced, and the target is its linear output.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from torch import nn

from snnk_peft.errors import ConfigError, UnsupportedError
from snnk_peft.families.base import module_at
from snnk_peft.layers.slots import FoldPlace, Slot
from snnk_peft.layers.snnk_linear import SNNKLinear
from snnk_peft.options import documented, option
from snnk_peft.parts import PARTS
from snnk_peft.parts.base import Patch, PatchContext
from snnk_peft.parts.base_replaced import Bypass, Replace, ReplacingPart


@PARTS.register("pooler")
@documented
@dataclass
class PoolerPart(ReplacingPart):
    """The pooler's dense layer and activation become Φ(x) Aᵀ + b (SNNK paper, 4.3.1 and J.1).

    Inputs and pretrained weights are both scaled by dim^-¼. `layers` has no meaning here.
    """

    component: str = option("cos", "the function f of the features f(Wx), a name of `COMPONENTS`.", checked=False)
    num_features: int = option(32, "rows of W, >= 1.", checked=False)

    holds_head: ClassVar[bool] = True

    def faults(self, part: str) -> list[str]:
        """See `Part.faults`."""
        found = [fault for fault in super().faults(part) if not fault.startswith(f"{part}.layers")]
        if self.layers != "all":
            found.append(f"{part}.layers is {self.layers!r}; a model has one pooler, leave it out")
        return found

    def plan(self, context: PatchContext) -> list[Patch]:
        """See `Part.plan`."""
        family, model = context.family, context.model
        if family.pooler is None:
            raise UnsupportedError(
                f"{context.where}: {type(model).__name__} (family {family.name!r}) has no pooler to replace; leave "
                "this part out"
            )
        path = family.path(model, family.pooler)
        dense = context.linear(path, f"{context.where}: its dense layer")
        if self.needs_layer and self.num_features > dense.out_features:
            raise ConfigError(
                f"{context.where}.num_features is {self.num_features} with projection {self.projection!r}; the pooler "
                f"has only {dense.out_features} rows"
            )
        patches = []
        activation: nn.Module = nn.Identity()
        if family.pooler_activation is not None:
            activation_path = family.path(model, family.pooler_activation)
            activation = module_at(model, activation_path, f"{context.where}: its activation")
            patches.append(Patch(activation_path, Bypass, replaces=True))
        return [Patch(path, partial(_replace, context, self, dense, activation), replaces=True), *patches]


class ReplacePooler(Replace):
    """The stand-in for a pooler: what reads it is the head."""

    def read_by(self, place: FoldPlace, reader: FoldPlace) -> None:
        """The head reads the features themselves."""
        reader.reads_features(place)


def _replace(context: PatchContext, part: PoolerPart, dense: nn.Linear, activation: nn.Module) -> Slot:
    family, dim = context.family, dense.in_features
    mean = std = None
    if family.last_norm is not None:
        last = family.layer_paths(context.model)[-1]
        mean, std = context.input_statistics(f"{last}.{family.last_norm}", "the LayerNorm before the pooler")
    scale = 1.0 if part.needs_layer else dim**-0.25
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
    return ReplacePooler(
        stand_in,
        None if family.pooler_activation is None else family.path(context.model, family.pooler_activation),
        reader if present else None,
    )
