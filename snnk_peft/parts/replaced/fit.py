"""Fit the replacement of a Linear and its activation, in one pass over the data.

Fitted front to back: inputs come from the stack as converted so far, targets from the original on those very inputs, so
a later layer repairs what an earlier one got wrong. The pass keeps, in fp64 and whatever the number of tokens,

    landmarks that are hidden units     second moments of all units: of these the choice and the readout follow
    landmarks under another function    the same for the choice, and a random sample of tokens for the readout
    rows that are drawn or learned      moments of features and targets

With `steps`, the sample is kept in any case: gradient descent moves the rows, and the readout is solved for again. Rows
that are drawn stay as they were drawn, steps or not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from snnk_peft.families.base import as_linear
from snnk_peft.functional.at_hand import at_hand
from snnk_peft.layers.slots import Fit, FitOptions, FitPlace, Fitter, Tokens
from snnk_peft.layers.snnk_linear import SNNKLinear
from snnk_peft.projections.base import Projection
from snnk_peft.projections.base_drawn import site_generator
from snnk_peft.solvers.descent import descend
from snnk_peft.solvers.landmarks import SecondMoments, choose_landmarks, fit_landmarks
from snnk_peft.solvers.reduce import ErrorMeter, TokenSample, same_everywhere
from snnk_peft.solvers.ridge import GramAccumulator, RidgeFit, fit_ridge

TOKENS = 16_384  # of a sample; of held-out ones a quarter
ROWS = 512  # that are looked at together


class ReplacedFitter(Fitter):
    """Fits the readout of a replacement, and its rows, where they are the layer's or learned.

    Args:
        layer: the replacement.
        activation: path in the model of the activation that it contains, or None.
        following: path in the model of the Linear that reads the output, or None; errors are measured after it.
        place: where it stands.
        options: of `calibrate`.
    """

    reduces = True

    def __init__(
        self,
        layer: SNNKLinear,
        activation: str | None,
        following: str | None,
        place: FitPlace,
        options: FitOptions,
    ):
        self.layer, self.original, self.options = layer, place.original, options
        self.activation = nn.Identity() if activation is None else place.original_at(activation)
        reader = None if following is None else as_linear(place.active_at(following))
        self.output_weight: torch.Tensor | None = None
        if isinstance(reader, nn.Linear):
            with at_hand(reader):
                self.output_weight = reader.weight.detach()
        self.together = () if activation is None else (activation,)
        projection = layer.stage.feature_map.projection
        self.generator = site_generator(projection.seed, f"{projection.site}.fit")  # the same in every fit

    def target(self, x: torch.Tensor) -> torch.Tensor:
        """Compute the original's outputs for x (n, dim)."""
        return self.activation(self.original(x))

    @property
    def landmarks(self) -> Projection | None:
        """The projection, if its rows are units of the layer and can be chosen by their effect on the output."""
        projection = self.layer.stage.feature_map.projection
        return projection if projection.selects_rows and self.output_weight is not None else None

    @property
    def moved(self) -> list[str]:
        """Tensors of the stage that descent may move."""
        if not self.options.steps:
            return []
        stage = self.layer.stage
        if stage.feature_map.projection.selects_rows:
            return ["feature_map.projection.weight", "feature_map.projection.bias"]
        return [name for name, _ in stage.named_parameters()]

    def features_are_hidden_units(self) -> bool:
        """True if a landmark's feature equals a hidden unit: the component is the original activation."""
        z = torch.linspace(-6, 6, 97, device=self.layer.A.device)
        component = self.layer.stage.feature_map.component
        if not component.elementwise():
            return False
        return torch.allclose(component.function(z), self.activation(z), rtol=1e-5, atol=1e-6)

    @property
    def given(self) -> int:
        """Number of inputs that the readout sees beside hidden units."""
        stage = self.layer.stage
        return stage.dim if stage.append_input and self.features_are_hidden_units() else 0

    def fit(self, data: Tokens) -> Fit:
        before = ErrorMeter(self.output_weight)
        train, test = self._moments(), self._moments()
        samples = self._samples()
        for is_test, tokens in data:
            for x in tokens.split(ROWS):
                target = self.target(x)
                self._add(test if is_test else train, x, target)
                if is_test and samples is None:
                    before.update(target, self.layer(x))
            if samples is not None:
                samples[is_test].update(tokens)
        train.reduce()
        test.reduce()
        if samples is None:
            before.reduce()
            fit = self._closed_form(train, test)
        else:
            kept = [each.reduced() for each in samples]
            for x in kept[1].split(ROWS):
                before.update(self.target(x), self.layer(x))
            fit = self._closed_form(train, test, *kept)
            if self.moved:
                fit = self._descend(fit, *kept)
        size, unknowns = self.layer.stage.feature_map.num_features, self.layer.stage.out_dim + 1
        return Fit(size, train.count, before.count, fit.ridge, before.value(), fit.error, unknowns=unknowns)

    def fit_sizes(self, others: Sequence[Fitter], data: Tokens) -> list[float] | None:
        """Fit several sizes from one pass: the second moments of all hidden units do not depend on the size."""
        alike = [self, *(other for other in others if isinstance(other, ReplacedFitter))]
        if len(alike) <= len(others) or not all(fitter.chooses_units for fitter in alike):
            return None
        train, test = self._moments(), self._moments()
        for is_test, tokens in data:
            for x in tokens.split(ROWS):
                self._add(test if is_test else train, x, self.target(x))
        return [fitter._closed_form(train, test).error for fitter in alike]

    @property
    def chooses_units(self) -> bool:
        """True if the features are hidden units, none of them moved."""
        units = self.landmarks is not None and self.features_are_hidden_units()
        return units and not self.given and not self.moved

    def _moments(self) -> Any:
        """An accumulator for hidden units, and inputs that the readout sees beside them; else for features."""
        if self.landmarks is not None:
            return SecondMoments(self.layer.out_features + self.given)
        return GramAccumulator(self.layer.stage.out_dim, self.layer.out_features, output_weight=self.output_weight)

    def _samples(self) -> tuple[TokenSample, TokenSample] | None:
        if not self.moved and (self.landmarks is None or self.features_are_hidden_units()):
            return None
        return TokenSample(TOKENS, self.generator), TokenSample(TOKENS // 4, self.generator)

    def _add(self, moments: Any, x: torch.Tensor, target: torch.Tensor) -> None:
        if self.landmarks is None:
            moments.update(self._features(x), target)
        else:
            moments.update(torch.cat((target, x), -1) if self.given else target)

    def _features(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer.stage(x.to(self.layer.A.dtype))

    def _closed_form(self, train: Any, test: Any, *samples: torch.Tensor) -> RidgeFit:
        if self.landmarks is None:
            return self._take(fit_ridge(train, test, self.options.ridges, refit=self.options.refit))
        chosen = self._select_rows(train).to(train.mean.device)
        if not self.features_are_hidden_units():
            same_everywhere(self.layer)
            return self._refit(*samples)
        assert self.output_weight is not None
        options, rows = self.options, self.layer.stage.feature_map.num_features
        fit = fit_landmarks(
            train, test, chosen, self.output_weight, given=self.given, ridges=options.ridges, refit=options.refit
        )
        fit.weight[:, :rows] *= rows**0.5  # the feature map divides by √m
        return self._take(fit)

    def _select_rows(self, moments: SecondMoments) -> torch.Tensor:
        """Choose the landmarks and copy their rows; returns their indices."""
        projection = self.landmarks
        assert projection is not None
        assert self.output_weight is not None
        chosen = choose_landmarks(
            moments, self.output_weight, projection.num_features, rule=self.options.landmarks, given=self.given
        )
        importance = torch.zeros(self.layer.out_features, device=chosen.device).index_fill_(0, chosen, 1.0)
        linear = as_linear(self.original)
        assert isinstance(linear, nn.Linear)
        with at_hand(linear):
            return projection.select(linear.weight, linear.bias, importance.to(linear.weight.device))

    def _refit(self, fitted: torch.Tensor, held_out: torch.Tensor) -> RidgeFit:
        """Put in the best readout for the rows as they are now."""
        train, test = (
            GramAccumulator(self.layer.stage.out_dim, self.layer.out_features, output_weight=self.output_weight)
            for _ in range(2)
        )
        for moments, tokens in ((train, fitted), (test, held_out)):
            for x in tokens.split(ROWS):
                moments.update(self._features(x), self.target(x))
        return self._take(fit_ridge(train, test, self.options.ridges, refit=self.options.refit))

    def _take(self, fit: RidgeFit) -> RidgeFit:
        self.layer.A.copy_(fit.weight)
        self.layer.bias.copy_(fit.bias)  # type: ignore[union-attr, arg-type]
        return fit

    def _descend(self, start: RidgeFit, fitted: torch.Tensor, held_out: torch.Tensor) -> RidgeFit:
        """Move the rows and solve for the readout again; undone unless the error falls."""
        layer = self.layer
        old = {name: value.clone() for name, value in layer.state_dict().items()}
        # All of it after the contraction: fewer values than hidden units, and the error that counts.
        readout = self._behind(layer.A.T).T, self._behind(layer.bias)
        targets = torch.cat([self._behind(self.target(x)) for x in fitted.split(ROWS)])
        descend(layer.stage, self.moved, readout, fitted, targets, self.options.steps, self.generator)
        same_everywhere(layer)
        fit = self._refit(fitted, held_out)
        if fit.error < start.error:
            return fit
        layer.load_state_dict(old)
        return start

    def _behind(self, hidden: Any) -> torch.Tensor:
        """Apply the following Linear, without its bias, to (..., out)."""
        hidden = hidden.detach().float()
        return hidden if self.output_weight is None else hidden @ self.output_weight.to(hidden).T
