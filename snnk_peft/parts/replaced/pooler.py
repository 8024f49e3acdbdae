"""The pooler: dense layer and activation on the first token become Φ(x) Aᵀ + b (SNNK paper, 4.3.1, App. E and J.1).

Inputs and pretrained weights are both scaled by dim^-¼, so that their inner products are those of vectors of length
about one per coordinate pair. If a model calls the activation as a function (RoBERTa, DistilBERT), it cannot be
removed: then only the dense layer is replaced, and the target is its linear output.

Image classifiers have none: their head reads one vector x per image, [CLS] or a mean. They get a new one (J.1.2):

    W_c x + b_c   becomes   W_c (Φ(x) Aᵀ + b) + b_c    and folds to   (W_c A) Φ(x) + (W_c b + b_c), classes × features.

There is no pretrained dense layer to start from. A and b are initialised to the best readout of x itself for Gaussian x
(Nyström), so that the head, pretrained or new, still receives x, through num_features directions; `calibrate` fits them
to real x. Φ sees x without the mean and scale of the LayerNorm before it or, if there is none (means of patches,
DINOv2's pair of vectors), each vector normalised, and scaled by dim^-½ for unit pre-activations. The dim^-¼ above is
for pretrained weights; here no readout of x would be left at width 768, because E[x cos(ω·x)] decays like e^(-√dim /
2).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import nn

from snnk_peft.errors import ConfigError, UnsupportedError
from snnk_peft.families.base import as_linear, module_at, plain_modules
from snnk_peft.functional.random_numbers import normal_numbers
from snnk_peft.layers.slots import Base, FitOptions, FitPlace, Fitter, FoldPlace, Slot, no_folded_form
from snnk_peft.layers.snnk_linear import SNNKLinear
from snnk_peft.options import documented, option
from snnk_peft.parts import PARTS
from snnk_peft.parts.base import Part, Patch, PatchContext
from snnk_peft.parts.replaced.fit import ReplacedFitter
from snnk_peft.parts.replaced.slots import Bypass, Replace, ReplacingPart


@PARTS.register("pooler")
@documented
@dataclass
class PoolerPart(ReplacingPart):
    """The pooler's dense layer and activation become Φ(x) Aᵀ + b (SNNK paper, 4.3.1 and J.1).

    Inputs and pretrained weights are both scaled by dim^-¼. `layers` has no effect. An image classifier has no pooler
    and gets a new one before its classifier: Φ(x) Aᵀ + b, initially as close to x as num_features allow.
    """

    component: str = option("cos", "the function f in the features f(Wx), a name in `COMPONENTS`.", checked=False)
    num_features: int = option(32, "rows of W, >= 1.", checked=False)

    holds_head: ClassVar[bool] = True

    @classmethod
    def candidates(cls, model: nn.Module, length: int) -> list[Part]:
        return [cls(num_features=32), cls(num_features=64)]

    @classmethod
    def probes(cls) -> dict[str, Part]:
        return {"pooler": cls("relu", "orf", 16)}

    def faults(self, part: str) -> list[str]:
        faults = [fault for fault in super().faults(part) if not fault.startswith(f"{part}.layers")]
        if self.layers != "all":
            faults.append(f"{part}.layers is {self.layers!r}; a model has one pooler, leave it out")
        return faults

    def plan(self, context: PatchContext) -> list[Patch]:
        family, model = context.family, context.model
        present = {path for path, _ in plain_modules(model)}
        path = None if family.pooler is None else family.path(model, family.pooler)
        if path is None or (family.pooled_heads and path not in present):
            heads = [head for head in family.pooled_heads if head in present]
            if not heads:
                raise UnsupportedError(
                    f"{context.where}: {type(model).__name__} (family {family.name!r}) has no pooler to replace, and "
                    "no classifier of images to put a new one before; leave this part out"
                )
            return [self._new(context, head, alone=len(heads) == 1) for head in heads]
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

    def _new(self, context: PatchContext, path: str, alone: bool) -> Patch:
        if hasattr(context.model.get_submodule(path), "original_module"):  # PEFT's modules_to_save
            raise ConfigError(
                f"{context.where}: another adapter saves {path!r} in full, and a new pooler wraps a head of "
                "its own; expected a head that no adapter trains. Load the adapters into separate copies of the model"
            )
        head = context.linear(path, f"{context.where}: the head that reads the image's vector")
        if self.needs_layer:
            raise ConfigError(
                f"{context.where}.projection is {self.projection!r}, which takes rows from a pretrained pooler, and "
                f"{type(context.model).__name__} has none; expected a drawn or learned projection such as 'orf'"
            )
        return Patch(path, partial(_insert, context, self, path, head.in_features, alone), around_head=True)


class ReplacePooler(Replace):
    """Replacement of a pooler whose output the task head reads."""

    def read_by(self, place: FoldPlace, reader: FoldPlace) -> None:
        reader.reads_features(place)


class NewPooler(Replace):
    """A pooler for a model that has none, in front of the Linear that reads the image's vector: head(Φ(x) Aᵀ + b).

    Args:
        layer: the pooler, dim to dim.
        head: path of that Linear, which the slot wraps.
        alone: whether no other head has a pooler.
    """

    replaces = lets_pass = False

    def __init__(self, layer: SNNKLinear, head: str, alone: bool):
        super().__init__(layer, following=head)
        self.alone_in_model = alone

    def forward(self, base: Base, x: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
        """x (..., dim) -> (..., classes)."""
        return base(self.layer(x))

    def fitter(self, place: FitPlace, options: FitOptions) -> Fitter:
        """Return the fitter: ridge regression of x itself on its features, with errors measured after the head."""
        return NewPoolerFitter(self.layer, self.activation, self.following, place, options)

    def fold(self, place: FoldPlace) -> None:
        head = as_linear(place.module)
        if not isinstance(head, nn.Linear):
            raise no_folded_form(place, self)
        place.put(nn.Sequential(*self.layer.fold(following=head)))
        if self.alone_in_model:
            place.reads_features(place)
        else:
            place.remark(f"{place.path}: one of several heads, each with features of its own; no closed form fits them")


class NewPoolerFitter(ReplacedFitter):
    """Fitter of a pooler that the original does not have: its target is its input."""

    def target(self, x: torch.Tensor) -> torch.Tensor:
        """Return x itself, which the head would read."""
        return x


def _input_statistics(context: PatchContext, dim: int) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Return mean and standard deviation of the pooler's inputs; None, for 0 and 1, if no norm determines them."""
    family, model = context.family, context.model
    if family.last_norm is None:
        return None, None
    what = "the LayerNorm before the pooler"
    if not family.last_norm.startswith("{base}."):
        return context.input_statistics(f"{family.layer_paths(model)[-1]}.{family.last_norm}", what)
    path = family.path(model, family.last_norm)
    norm = dict(plain_modules(model)).get(path)
    if not isinstance(norm, nn.LayerNorm) or norm.normalized_shape != (dim,):
        return None, None
    return context.input_statistics(path, what)


def _insert(context: PatchContext, part: PoolerPart, path: str, dim: int, alone: bool) -> Slot:
    site = "pooler" if alone else f"pooler.{path}"
    generator = context.generator(site)
    mean, std = _input_statistics(context, dim)
    whitening: dict[str, Any] = {} if mean is None or std is None else {"shift": mean, "inverse_std": 1 / std}
    stage = context.stage(part, dim, site, scale=dim**-0.5, **whitening)
    dense = nn.Linear(dim, dim, bias=False, device="meta")  # x itself; the paper's init needs a W, here a random one
    start = normal_numbers(dim, dim, generator=generator) * dim**-0.5 if part.init == "paper" else torch.eye(dim)
    dense.weight = nn.Parameter(start, requires_grad=False)
    layer = SNNKLinear.from_linear(
        dense, nn.Identity(), stage, init=part.init, generator=generator, input_mean=mean, input_std=std
    )
    stage.normalize = not whitening  # the readout was fitted to standard normal inputs
    return NewPooler(layer, path, alone)


def _replace(context: PatchContext, part: PoolerPart, dense: nn.Linear, activation: nn.Module) -> Slot:
    family, dim = context.family, dense.in_features
    mean, std = _input_statistics(context, dim)
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
