"""A stand-in for a Linear and the activation behind it: the slots of FFN and pooler, how they fold and are fitted.

    f(W x + b)            is replaced by   Φ(x) Aᵀ + a
    W₂ f(W x + b)         folds to         (W₂ A) Φ(x) + ...      where a Linear W₂ reads the output

Fitted front to back: inputs come from the stack as converted so far, targets from the original on those very inputs, so
a later layer repairs what an earlier one got wrong. Moments in fp64; memory does not depend on the number of tokens.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from torch import nn

from snnk_peft.calibration.error_meter import ErrorMeter
from snnk_peft.calibration.landmarks import SecondMoments, choose_landmarks, fit_landmarks
from snnk_peft.calibration.reduce import same_everywhere
from snnk_peft.calibration.ridge import GramAccumulator, RidgeFit, fit_ridge
from snnk_peft.components import COMPONENTS
from snnk_peft.families.base import as_linear
from snnk_peft.functional.at_hand import at_hand
from snnk_peft.layers.slots import Base, Fit, FitOptions, FitPlace, Fitter, FoldPlace, Slot, Tokens, check_passing
from snnk_peft.layers.snnk_linear import SNNKLinear
from snnk_peft.options import option
from snnk_peft.parts.base import FeaturePart
from snnk_peft.projections.base import Projection


@dataclass
class ReplacingPart(FeaturePart):
    """A part of such stand-ins."""

    init: str = option(
        "nystrom",
        'how A starts: "nystrom" (closed form for Gaussian inputs, no data), "paper" (A = Φ(W)) or "random".',
        choices=("nystrom", "paper", "random"),
    )

    def faults(self, part: str) -> list[str]:
        """See `Part.faults`."""
        found = super().faults(part)
        elementwise = [name for name in COMPONENTS if COMPONENTS[name].elementwise()]
        if self.component in COMPONENTS and self.init == "nystrom" and self.component not in elementwise:
            found.append(
                f"{part}.init is 'nystrom', a closed form for elementwise features, and {self.component!r} is none "
                f"(these are: {', '.join(elementwise)}); use init='random' and calibrate"
            )
        return found

    def undrawn(self) -> ReplacingPart:
        """See `Part.undrawn`."""
        return dataclasses.replace(self, init="random")


class Replace(Slot):
    """layer(x) instead of the original module and the activation behind it.

    Args:
        layer: the stand-in.
        activation: path in the model of the activation that the stand-in contains, or None.
        following: path in the model of the Linear that reads the output, or None; calibration measures errors behind
            it, bundling multiplies it in.
    """

    replaces = lets_pass = True

    def __init__(self, layer: SNNKLinear, activation: str | None = None, following: str | None = None):
        super().__init__()
        self.layer, self.activation, self.following = layer, activation, following

    def forward(self, base: Base, x: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
        """x (..., dim) -> (..., out)."""
        return self.layer(x)

    def fitter(self, place: FitPlace, options: FitOptions) -> Fitter:
        """Ridge regression of the original's output on the features."""
        return ReplacedFitter(self, place, options)

    def changes(self, path: str) -> tuple[str, ...]:
        """The module, the activation, and the Linear that reads the output."""
        return tuple(each for each in (path, self.activation, self.following) if each is not None)

    def fold(self, place: FoldPlace) -> None:
        """The features, and the readout multiplied into the Linear behind, or a Linear of its own."""
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
            reason = "the activation behind it is called inside the model's forward()"
        place.remark(f"{place.path}: its readout stays a Linear of its own, because {reason}")

    def read_by(self, place: FoldPlace, reader: FoldPlace) -> None:
        """The readout was multiplied into `reader`."""


class Bypass(Slot):
    """x instead of the original module: an activation that a replacement already contains."""

    replaces = lets_pass = True

    def forward(self, base: Base, x: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
        """x unchanged."""
        return x

    def fold(self, place: FoldPlace) -> None:
        """Nothing stays."""
        place.put(nn.Identity())


class ReplacedFitter(Fitter):
    """Fits the readout of a stand-in, and chooses rows, where they are the layer's, by their effect on the output.

    Args:
        slot: what is fitted.
        place: where it stands.
        options: of `calibrate`.
    """

    reduces = True

    def __init__(self, slot: Replace, place: FitPlace, options: FitOptions):
        self.stand_in, self.original, self.options = slot.layer, place.original, options
        self.activation = nn.Identity() if slot.activation is None else place.original_at(slot.activation)
        following = None if slot.following is None else as_linear(place.active_at(slot.following))
        self.output_weight: torch.Tensor | None = None
        if isinstance(following, nn.Linear):
            with at_hand(following):
                self.output_weight = following.weight.detach()
        self.together = () if slot.activation is None else (slot.activation,)
        # Choosing rows is a pass of its own where features are not hidden units.
        self.reads = 2 if self.landmarks is not None and not self.features_are_hidden_units() else 1

    def fit(self, data: Tokens) -> Fit:
        """See `Fitter.fit`."""
        before = ErrorMeter(self.output_weight)
        if self.landmarks is not None and self.features_are_hidden_units():
            fit, tokens = self._fit_hidden_units(data, before)
        else:
            if self.landmarks is not None:
                self._select_rows(self._joint_moments(data)[0])
                same_everywhere(self.stand_in)
            fit, tokens = self._fit_features(data, before)
        before.reduce()
        self.stand_in.A.copy_(fit.weight)
        self.stand_in.bias.copy_(fit.bias)  # type: ignore[union-attr, arg-type]
        size = self.stand_in.stage.feature_map.num_features
        unknowns = self.stand_in.stage.out_dim + 1
        return Fit(size, tokens, before.count, fit.ridge, before.value(), fit.error, unknowns=unknowns)

    def hidden(self, x: torch.Tensor) -> torch.Tensor:
        """What the original makes of x (n, dim)."""
        return self.activation(self.original(x))

    @property
    def landmarks(self) -> Projection | None:
        """The projection, if its rows are units of the layer and can be chosen by their effect on the output."""
        projection = self.stand_in.stage.feature_map.projection
        return projection if projection.selects_rows and self.output_weight is not None else None

    def features_are_hidden_units(self) -> bool:
        """Whether a landmark feature equals a hidden unit: the component is the original activation."""
        z = torch.linspace(-6, 6, 97, device=self.stand_in.A.device)
        component = self.stand_in.stage.feature_map.component
        if not component.elementwise():
            return False
        return torch.allclose(component.function(z), self.activation(z), rtol=1e-5, atol=1e-6)

    def _joint_moments(self, data: Tokens, before: ErrorMeter | None = None) -> tuple[SecondMoments, SecondMoments]:
        """Moments of [hidden units, inputs if the readout sees them], of fitted and of held-out tokens."""
        stand_in = self.stand_in
        append = stand_in.stage.append_input
        train, test = (SecondMoments(stand_in.out_features + append * stand_in.stage.dim) for _ in range(2))
        for is_test, x in data:
            hidden = self.hidden(x)
            (test if is_test else train).update(torch.cat((hidden, x), -1) if append else hidden)
            if is_test and before is not None:
                before.update(hidden, stand_in(x))
        train.reduce()
        test.reduce()
        return train, test

    def _select_rows(self, moments: SecondMoments) -> torch.Tensor:
        """Choose the landmarks and copy their rows; returns their indices."""
        projection, stand_in = self.landmarks, self.stand_in
        assert projection is not None
        assert self.output_weight is not None
        given = len(moments.mean) - stand_in.out_features
        chosen = choose_landmarks(
            moments, self.output_weight, projection.num_features, rule=self.options.landmarks, given=given
        )
        importance = torch.zeros(stand_in.out_features, device=chosen.device).index_fill_(0, chosen, 1.0)
        linear = as_linear(self.original)
        assert isinstance(linear, nn.Linear)
        with at_hand(linear):
            return projection.select(linear.weight, linear.bias, importance.to(linear.weight.device))

    def _fit_hidden_units(self, data: Tokens, before: ErrorMeter) -> tuple[RidgeFit, int]:
        """Features are hidden units: their joint moments decide which to keep and the readout, in one pass."""
        train, test = self._joint_moments(data, before)
        stand_in = self.stand_in
        given, m = len(train.mean) - stand_in.out_features, stand_in.stage.feature_map.num_features
        chosen = self._select_rows(train).to(train.mean.device)
        assert self.output_weight is not None
        fit = fit_landmarks(
            train, test, chosen, self.output_weight, given=given, ridges=self.options.ridges, refit=self.options.refit
        )
        fit.weight[:, :m] *= m**0.5  # the feature map divides by √m
        return fit, train.count

    def _fit_features(self, data: Tokens, before: ErrorMeter) -> tuple[RidgeFit, int]:
        """Any features: ridge regression of the original's output on them."""
        stand_in = self.stand_in
        train, test = (
            GramAccumulator(stand_in.stage.out_dim, stand_in.out_features, output_weight=self.output_weight)
            for _ in range(2)
        )
        for is_test, x in data:
            hidden = self.hidden(x)
            if is_test:
                before.update(hidden, stand_in(x))
            (test if is_test else train).update(stand_in.stage(x.to(stand_in.A.dtype)), hidden)
        train.reduce()
        test.reduce()
        fit, fitted = fit_ridge(train, test, self.options.ridges), train.count
        if self.options.refit:
            train.merge(test)
            final = train.solve(fit.ridge * train.ridge_scale)
            fit = fit._replace(weight=final.weight, bias=final.bias)
        return fit, fitted
