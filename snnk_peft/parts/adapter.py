"""Adapters: Houlsby (after attention and FFN), Pfeiffer (after the FFN), parallel (next to the FFN), query_value.

after         x + scaling · v ⊙ (Φ(x) Aᵀ)         folds to  x + Φ(x) Mᵀ
parallel      W₂ h + scaling · v ⊙ (Φ(x) Aᵀ)      folds to  [W₂, M] [h, Φ(x)]
query_value   W x + scaling · v ⊙ (Φ(x) Aᵀ)       folds to  [M, W] [Φ(x), x]
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
from torch import nn

from snnk_peft.errors import ConfigError, UnsupportedError
from snnk_peft.families.base import as_linear, module_at
from snnk_peft.layers.adapter import GatedReadout, SNNKAdapter
from snnk_peft.layers.feature_stage import FeatureStage
from snnk_peft.layers.folded import Beside, FoldedAdapter, Leading, beside, leading
from snnk_peft.layers.slots import Base, FoldPlace, Slot, check_passing, no_folded_form
from snnk_peft.layers.snnk_linear import plain_linear
from snnk_peft.options import documented, option
from snnk_peft.parts import PARTS
from snnk_peft.parts.base import FeaturePart, Part, Patch, PatchContext, resolve_layers


@PARTS.register("adapter")
@documented
@dataclass
class AdapterPart(FeaturePart):
    """Non-linear adapters y = x + scaling · v ⊙ (Φ(x) Aᵀ) (SNNK paper, Eq. 22, App. D)."""

    calls_only: ClassVar[bool] = True

    placement: str = option(
        "houlsby",
        '"houlsby" (after attention and after the FFN), "pfeiffer" (after the FFN only), "parallel" (beside the FFN: '
        'reads the FFN\'s input, adds to its output; folds completely when bundled) or "query_value" (beside the query '
        "and value projections, LoRA's place; each becomes one Linear of [Φ(x), x] when bundled; the bias of a new "
        "task head should start at the labels' mean or frequencies, as in recipes/finetune.py).",
        choices=("houlsby", "pfeiffer", "parallel", "query_value"),
    )
    init: str = option(
        "default",
        '"default" works best on GLUE: normalised inputs, A = 0, no gate. "paper" is the paper\'s form: raw inputs, '
        'A = Φ(W₀) for a random W₀, gate v = 0. "random" is A ~ N(0, 1/feature_dim) with a gate.',
        choices=("default", "paper", "random"),
    )
    gate: bool | None = option(None, "whether there is a trainable vector v; None follows `init`.")
    normalize: bool | None = option(
        None,
        "whether Φ sees (x − mean) / std of each token, and each feature is centred; None follows `init`.",
    )
    scaling: float | None = option(
        None,
        "factor on the residual branch, not 0; raising it acts like a higher learning rate of A alone. None means 8 "
        'for init="default" and 1 otherwise.',
    )

    def faults(self, part: str) -> list[str]:
        faults = super().faults(part)
        if self.needs_layer:
            faults.append(
                f"{part}.projection is {self.projection!r}; an adapter replaces no pretrained weight to take rows from"
            )
        if self.scaling == 0:
            faults.append(f"{part}.scaling is {self.scaling!r}; expected a number other than 0")
        if self.gate is False and self.init == "random":
            faults.append(f"{part}.gate is False with init='random': the model would start broken; use gate=True")
        if self.gate is False and self.init == "paper":
            faults.append(f"{part}.gate is False with init='paper': the paper's form has a gate; use init='default'")
        if self.gate is True and self.init == "default":
            faults.append(
                f"{part}.gate is True with init='default': A and v would both start at zero and get no gradient; "
                "use init='random' or init='paper'"
            )
        return faults

    @classmethod
    def probes(cls) -> dict[str, Part]:
        return {place: cls(placement=place) for place in ("houlsby", "pfeiffer", "parallel", "query_value")}

    @property
    def uses_gate(self) -> bool:
        """Return whether v exists, with `gate=None` resolved."""
        return self.init != "default" if self.gate is None else self.gate

    @property
    def effective_scaling(self) -> float:
        """The scaling factor, with `scaling=None` resolved."""
        if self.scaling is None:
            return 8.0 if self.init == "default" else 1.0
        return self.scaling

    @property
    def uses_normalize(self) -> bool:
        """Return whether inputs are normalised, with `normalize=None` resolved."""
        return self.init != "paper" if self.normalize is None else self.normalize

    def undrawn(self) -> AdapterPart:
        return dataclasses.replace(self, init="default", gate=None)

    def plan(self, context: PatchContext) -> list[Patch]:
        family = context.family
        layers = family.layer_paths(context.model)
        chosen, faults = resolve_layers(f"{context.where}.layers", self.layers, len(layers))
        if faults:
            raise ConfigError(faults)
        parallel = self.placement == "parallel"
        if parallel:
            context.require_plain_ffn(f"{context.where}.placement 'parallel': use 'houlsby' or 'pfeiffer'")
        patches: list[Patch] = []
        for index in chosen:
            if self.placement == "query_value":
                patches += _query_value(context, self, layers[index], f"layer.{index}.adapter")
                continue
            ffn_out = context.linear(f"{layers[index]}.{family.ffn_out}", "the FFN contraction", called=True)
            site = f"layer.{index}.adapter"
            if parallel:
                ffn_in = context.linear(f"{layers[index]}.{family.ffn_in}", "the FFN expansion", called=True)
                patches += _parallel(context, self, layers[index], ffn_in, site)
                continue
            places = {"ffn": family.ffn_adapter}
            if self.placement == "houlsby":
                places = {"attention": family.attention_adapter, **places}
            for name, relative in places.items():
                path = f"{layers[index]}.{relative}"
                module_at(context.model, path, f"the end of the {name} block")
                patches.append(Patch(path, partial(_after, context, self, ffn_out.out_features, f"{site}.{name}")))
        return patches


def _stage(context: PatchContext, part: AdapterPart, dim: int, site: str) -> FeatureStage:
    normalize = part.uses_normalize
    # Normalised inputs have length √dim; this gives unit pre-activations. Raw inputs are not scaled.
    scale = dim**-0.5 if normalize else 1.0
    stage = context.stage(part, dim, site, normalize=normalize, center=normalize, scale=scale)
    # Learned rows absorb the factor: otherwise an optimizer step would move them by √dim less than LoRA's.
    if stage.feature_map.projection.absorb(scale):
        stage.scale = 1.0
        if not normalize and part.init == "default":
            # As small as nn.Linear's initial rows, U(±dim^-½): raw inputs are so long that a GELU would act as a ReLU.
            stage.feature_map.projection.absorb((3 * dim) ** -0.5)
    return stage


def _readout(
    context: PatchContext, part: AdapterPart, stage: FeatureStage, site: str, out_dim: int | None = None
) -> GatedReadout:
    return GatedReadout(
        stage,
        init=part.init,
        gate=part.uses_gate,
        scaling=part.effective_scaling,
        out_dim=out_dim,
        generator=context.generator(site),
    )


def _after(context: PatchContext, part: AdapterPart, dim: int, site: str) -> Slot:
    stage = _stage(context, part, dim, site)
    return Behind(SNNKAdapter(stage, _readout(context, part, stage, site)))


def _query_value(context: PatchContext, part: AdapterPart, layer: str, site: str) -> list[Patch]:
    patches = []
    for name, relative in (("query", context.family.query), ("value", context.family.value)):
        if relative is None:
            raise UnsupportedError(
                f"{context.where}.placement 'query_value': {type(context.model).__name__} (family "
                f"{context.family.name!r}) has no Linear that makes the {name} alone; use 'houlsby', 'pfeiffer' or "
                "'parallel', or describe the architecture with ModelFamily(query=..., value=...) and register_family"
            )
        path = f"{layer}.{relative}"
        linear = context.linear(path, f"the {name} projection", called=True)
        patches.append(Patch(path, partial(_beside, context, part, linear, f"{site}.{name}")))
    return patches


def _beside(context: PatchContext, part: AdapterPart, linear: nn.Linear, site: str) -> Slot:
    stage = _stage(context, part, linear.in_features, site)
    return BesideLinear(stage, _readout(context, part, stage, site, linear.out_features))


def _parallel(context: PatchContext, part: AdapterPart, layer: str, ffn_in: nn.Linear, site: str) -> list[Patch]:
    family = context.family
    module_at(context.model, f"{layer}.{family.activation}", "the FFN activation")
    behind = (f"{layer}.{family.activation}", f"{layer}.{family.ffn_out}")
    # One draw for both: init="paper" reads it at the contraction, where only A and v are kept.
    stage = functools.cache(partial(_stage, context, part, ffn_in.in_features, site))

    return [
        Patch(f"{layer}.{family.ffn_in}", lambda: BesideExpansion(stage(), behind)),
        Patch(behind[0], lambda: OnHiddenUnits(stage().out_dim, f"{layer}.{family.ffn_in}")),
        Patch(behind[1], lambda: BesideContraction(_readout(context, part, stage(), site))),
    ]


class Behind(Slot):
    """The sequential placement, adapter(original(x))."""

    alone = False
    by_row = True

    def __init__(self, adapter: SNNKAdapter):
        super().__init__()
        self.adapter = adapter

    def forward(self, base: Base, x: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
        """(..., dim) -> (..., dim)."""
        return self.adapter(base(x, *args, **kwargs))

    def reads_out(self, slots_at: Callable[[str], Sequence[Slot]]) -> tuple[FeatureStage, GatedReadout]:
        return self.adapter.stage, self.adapter.readout

    def fold(self, place: FoldPlace) -> None:
        """Fold x + scaling · v ⊙ (Φ(x) Aᵀ) to x + Φ(x) Mᵀ, after the module."""
        matrix = plain_linear(self.adapter.readout.matrix(), None)
        place.put(followed_by(place, FoldedAdapter(self.adapter.stage.simplified(), matrix)))


class BesideLinear(Slot, SNNKAdapter):
    """Adapter in parallel with one Linear, like LoRA's two matrices: it reads x and adds to linear(x)."""

    by_row = True

    def forward(self, base: Base, x: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:  # type: ignore[override]
        """x (..., dim) -> (..., out_dim)."""
        return SNNKAdapter.forward(self, x, base(x, *args, **kwargs))

    def reads_out(self, slots_at: Callable[[str], Sequence[Slot]]) -> tuple[FeatureStage, GatedReadout]:
        return self.stage, self.readout

    def fold(self, place: FoldPlace) -> None:
        """Fold W x + scaling · v ⊙ (Φ(x) Aᵀ) to [M, W] [Φ(x), x]."""
        linear = place.module
        if not isinstance(linear, nn.Linear):
            raise no_folded_form(place, self)
        matrix = self.readout.matrix().to(linear.weight.dtype)
        joint = plain_linear(torch.cat((matrix, linear.weight), 1), linear.bias)
        place.put(nn.Sequential(self.stage.simplified().with_input(), joint))


class BesideExpansion(Slot):
    """The FFN's expansion extended by the features of a parallel adapter, [expansion(x), Φ(x)].

    The FFN is three modules, so the adapter is three slots: the activation passes the features through, the contraction
    reads them out.
    """

    lets_pass = True
    by_row = True

    def __init__(self, stage: FeatureStage, behind: tuple[str, ...] = ()):
        super().__init__()
        self.stage, self.behind = stage, behind

    def forward(self, base: Base, x: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
        """x (..., dim) -> (..., hidden + feature_dim)."""
        return beside(base, self.stage, x, *args, **kwargs)

    def reads_out(self, slots_at: Callable[[str], Sequence[Slot]]) -> tuple[FeatureStage, GatedReadout]:
        return self.stage, next(
            slot.readout for slot in slots_at(self.behind[1]) if isinstance(slot, BesideContraction)
        )

    def changes(self, path: str) -> tuple[str, ...]:
        return (path, *self.behind)

    def fold(self, place: FoldPlace) -> None:
        check_passing(place.at(path) for path in (place.path, *self.behind[:1]))
        place.put(Beside(place.module, self.stage.simplified()))


class OnHiddenUnits(Slot):
    """The FFN's activation on the hidden units only, [activation(h), Φ(x)]; another part may keep fewer of them."""

    lets_pass = True
    by_row = True

    def __init__(self, features: int, expansion: str):
        super().__init__()
        self.features, self.expansion = features, expansion

    def forward(self, base: Base, x: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
        """(..., units + feature_dim) -> the same shape."""
        return leading(base, x.shape[-1] - self.features, x, *args, **kwargs)

    def fold(self, place: FoldPlace) -> None:
        """Wrap the activation in a `Leading`; do nothing if the expansion's replacement contains it."""
        if isinstance(place.module, nn.Identity):
            return
        expansion = place.at(self.expansion).module
        linear = as_linear(expansion.module if isinstance(expansion, Beside) else expansion)
        if not isinstance(linear, nn.Linear):
            raise no_folded_form(place, self)
        place.put(Leading(place.module, linear.out_features))


class BesideContraction(Slot):
    """The FFN's contraction with the adapter's readout, contraction(h) + scaling · v ⊙ (Φ(x) Aᵀ)."""

    by_row = True

    def __init__(self, readout: GatedReadout):
        super().__init__()
        self.readout = readout

    def forward(self, base: Base, x: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
        """(..., width + feature_dim) -> (..., dim)."""
        features = self.readout.A.shape[1]
        return self.readout(x[..., -features:], base(x[..., :-features], *args, **kwargs))

    def fold(self, place: FoldPlace) -> None:
        """Fold W₂ h + scaling · v ⊙ (Φ(x) Aᵀ) to [W₂, M] [h, Φ(x)]."""
        linear = as_linear(place.module)
        if not isinstance(linear, nn.Linear):
            raise no_folded_form(place, self)
        matrix = self.readout.matrix().to(linear.weight.dtype)
        place.put(plain_linear(torch.cat((linear.weight, matrix), 1), linear.bias))


def followed_by(place: FoldPlace, module: nn.Module) -> nn.Sequential:
    """Return the module at a place followed by `module`."""
    first = [place.module] if place.original or not isinstance(place.module, nn.Sequential) else place.module
    return nn.Sequential(*first, module)
