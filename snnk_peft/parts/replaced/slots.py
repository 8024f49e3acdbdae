"""Replacement of a Linear and its activation: the slots of FFN and pooler, and how they fold.

    f(W x + b)            is replaced by   Φ(x) Aᵀ + a
    W₂ f(W x + b)         folds to         (W₂ A) Φ(x) + ...      where a Linear W₂ reads the output

Fitting is in fit.py.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from torch import nn

from snnk_peft.components import COMPONENTS
from snnk_peft.families.base import as_linear
from snnk_peft.layers.slots import Base, FitOptions, FitPlace, Fitter, FoldPlace, Slot, check_passing
from snnk_peft.layers.snnk_linear import SNNKLinear
from snnk_peft.options import option
from snnk_peft.parts.base import FeaturePart
from snnk_peft.parts.replaced.fit import ReplacedFitter


@dataclass
class ReplacingPart(FeaturePart):
    """Base class of the parts that replace a Linear and its activation."""

    init: str = option(
        "nystrom",
        'how A starts: "nystrom" (closed form for Gaussian inputs, no data), "paper" (A = Φ(W)) or "random".',
        choices=("nystrom", "paper", "random"),
    )

    def faults(self, part: str) -> list[str]:
        faults = super().faults(part)
        elementwise = [name for name in COMPONENTS if COMPONENTS[name].elementwise()]
        if self.component in COMPONENTS and self.init == "nystrom" and self.component not in elementwise:
            faults.append(
                f"{part}.init is 'nystrom', a closed form for elementwise features, and {self.component!r} is none "
                f"(these are: {', '.join(elementwise)}); use init='random' and calibrate"
            )
        return faults

    def undrawn(self) -> ReplacingPart:
        return dataclasses.replace(self, init="random")


class Replace(Slot):
    """Slot that computes layer(x) instead of the original module and the activation after it.

    Args:
        layer: the replacement.
        activation: path in the model of the activation that the replacement contains, or None.
        following: path in the model of the Linear that reads the output, or None; calibration measures errors after it,
            bundling folds into it.
    """

    replaces = lets_pass = True

    def __init__(self, layer: SNNKLinear, activation: str | None = None, following: str | None = None):
        super().__init__()
        self.layer, self.activation, self.following = layer, activation, following

    def forward(self, base: Base, x: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
        """x (..., dim) -> (..., out)."""
        return self.layer(x)

    def fitter(self, place: FitPlace, options: FitOptions) -> Fitter:
        """Return the fitter: ridge regression of the original's output on the features."""
        return ReplacedFitter(self.layer, self.activation, self.following, place, options)

    def changes(self, path: str) -> tuple[str, ...]:
        return tuple(each for each in (path, self.activation, self.following) if each is not None)

    def fold(self, place: FoldPlace) -> None:
        """Fold to the features and a Linear: the readout multiplied into the following Linear, or its own."""
        between = (place.path,) if self.activation is None else (place.path, self.activation)
        check_passing(place.at(path) for path in between)
        reader = None if self.following is None else place.at(self.following)
        taken = reader is not None and any(slot.replaces for slot in reader.slots)
        following = None if reader is None or taken else as_linear(reader.module)
        if reader is not None and isinstance(following, nn.Linear):
            stage, linear = self.layer.fold(following=following)
            place.put(stage)
            reader.put(linear)
            self.read_by(place, reader)
            return
        place.put(nn.Sequential(*self.layer.fold()))
        reason = "no Linear reads its output"
        if taken:
            reason = "another part replaces the Linear that reads its output"
        elif self.activation is None:
            reason = "the activation after it is called inside the model's forward()"
        place.remark(f"{place.path}: its readout stays a Linear of its own, because {reason}")

    def read_by(self, place: FoldPlace, reader: FoldPlace) -> None:
        """Record that the readout was multiplied into `reader`."""


class Bypass(Slot):
    """Slot that returns x instead of the original module, an activation that a replacement already contains."""

    replaces = lets_pass = True

    def forward(self, base: Base, x: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
        return x

    def fold(self, place: FoldPlace) -> None:
        place.put(nn.Identity())
