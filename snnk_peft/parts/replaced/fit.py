"""Fit the replacement of a Linear and its activation, in one pass over the data.

Fitted front to back: inputs come from the stack as converted so far, targets from the original on the same inputs. If a
Linear W₂ reads the output and there is a metric at its output, the target is W₂ h plus the missing part of the
original's stream there, and the readout A is the minimum-norm one with that W₂ A. The pass keeps, in fp64 and
independent of the number of tokens,

    landmarks that are hidden units     second moments of all units, which determine the choice and the readout
    landmarks under another function    the same for the choice, and a random sample of tokens for the readout
    rows that are drawn or learned      moments of features and targets

With `steps`, the sample is always kept: gradient descent trains the rows, and the readout is solved for again. Random
rows are never trained.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from snnk_peft.families.base import as_linear
from snnk_peft.functional.at_hand import at_hand
from snnk_peft.layers.slots import Fit, FitOptions, FitPlace, Fitter, Given, Tokens, as_given
from snnk_peft.layers.snnk_linear import SNNKLinear
from snnk_peft.projections.base import Projection
from snnk_peft.projections.base_drawn import site_generator
from snnk_peft.solvers.corrected import CorrectedFit, Solver, Target, fit_corrected, merged
from snnk_peft.solvers.descent import descend
from snnk_peft.solvers.landmarks import SecondMoments, choose_landmarks
from snnk_peft.solvers.reduce import ErrorMeter, TokenSample, same_everywhere
from snnk_peft.solvers.ridge import GramAccumulator, RidgeFit, fit_ridge

TOKENS = 16_384  # in a sample; a quarter as many are held out
ROWS = 512  # processed at a time
SINGULAR = 1e-12  # relative to the contraction's squared size; weaker directions do not pass through it


class ReplacedFitter(Fitter):
    """Fitter of a replacement's readout, and of its rows if they are the layer's or learned.

    Args:
        layer: the replacement.
        activation: path in the model of the activation that it contains, or None.
        following: path in the model of the Linear that reads the output, or None; errors are measured after it.
        place: the module it replaces.
        options: options of `calibrate`.
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
            self.counted = following
        self.together = () if activation is None else (activation,)
        projection = layer.stage.feature_map.projection
        self.generator = site_generator(projection.seed, f"{projection.site}.fit")  # the same in every fit

    def target(self, x: torch.Tensor) -> torch.Tensor:
        """Compute the original's outputs for x (n, dim)."""
        return self.activation(self.original(x))

    @property
    def landmarks(self) -> Projection | None:
        """The projection, if its rows are units of the layer that can be chosen by their effect on the output."""
        projection = self.layer.stage.feature_map.projection
        return projection if projection.selects_rows and self.output_weight is not None else None

    @property
    def moved(self) -> list[str]:
        """Names of the stage's tensors that gradient descent may train."""
        if not self.options.steps:
            return []
        stage = self.layer.stage
        if stage.feature_map.projection.selects_rows:
            return ["feature_map.projection.weight", "feature_map.projection.bias"]
        return [name for name, _ in stage.named_parameters()]

    def features_are_hidden_units(self) -> bool:
        """Return whether a landmark's feature equals a hidden unit: the component is the original activation."""
        z = torch.linspace(-6, 6, 97, device=self.layer.A.device)
        component = self.layer.stage.feature_map.component
        if not component.elementwise():
            return False
        return torch.allclose(component.function(z), self.activation(z), rtol=1e-5, atol=1e-6)

    @property
    def given(self) -> int:
        """Number of inputs that the readout sees in addition to hidden units."""
        stage = self.layer.stage
        return stage.dim if stage.append_input and self.features_are_hidden_units() else 0

    def fit(self, data: Tokens) -> Fit:
        before = ErrorMeter(self.output_weight if self.metric is None else self.metric)
        train, test = self._moments(), self._moments()
        samples = self._samples()
        for is_test, read in data:
            given = as_given(read)
            for part in given.split(ROWS):
                hidden = self.target(part.inputs)
                self._add(test if is_test else train, part, hidden)
                if is_test and samples is None:
                    self._measure(before, part, hidden)
            if samples is not None:
                samples[is_test].update(_packed(given, self._width))
        train.reduce()
        test.reduce()
        if samples is None:
            before.reduce()
            fit = self._closed_form(train, test)
        else:
            kept = [_unpacked(each.reduced(), self.layer.stage.dim, self._width) for each in samples]
            for part in kept[1].split(ROWS):
                self._measure(before, part, self.target(part.inputs))
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
        for is_test, read in data:
            for part in as_given(read).split(ROWS):
                self._add(test if is_test else train, part, self.target(part.inputs))
        largest = max(alike, key=lambda fitter: fitter.layer.stage.feature_map.num_features)
        order = largest._chosen(train)
        return [fitter._closed_form(train, test, order=order).error for fitter in alike]

    @property
    def chooses_units(self) -> bool:
        """Whether the features are hidden units, none of them trained."""
        units = self.landmarks is not None and self.features_are_hidden_units()
        return units and not self.given and not self.moved

    @property
    def _width(self) -> int:
        """Width of the missing part after the contraction; 0 without a metric."""
        return 0 if self.metric is None else len(self.metric)

    def _moments(self) -> Any:
        """Create an accumulator for hidden units, the readout's further inputs and the missing part; else for features
        and targets."""
        if self.landmarks is not None:
            return SecondMoments(self.layer.out_features + self.given + self._width)
        return self._feature_moments()

    def _feature_moments(self) -> Any:
        if self.metric is not None:
            return SecondMoments(self.layer.stage.out_dim + self.layer.out_features + self._width)
        return GramAccumulator(self.layer.stage.out_dim, self.layer.out_features, output_weight=self.output_weight)

    def _samples(self) -> tuple[TokenSample, TokenSample] | None:
        if not self.moved and (self.landmarks is None or self.features_are_hidden_units()):
            return None
        return TokenSample(TOKENS, self.generator), TokenSample(TOKENS // 4, self.generator)

    def _add(self, moments: Any, given: Given, hidden: torch.Tensor) -> None:
        if self.landmarks is None:
            self._add_features(moments, given, hidden)
        else:
            inputs = [given.inputs] if self.given else []
            moments.update(torch.cat((hidden, *inputs, *self._missing(given)), -1), given.weight)

    def _add_features(self, moments: Any, given: Given, hidden: torch.Tensor) -> None:
        features = self._features(given.inputs)
        if self.metric is None:
            moments.update(features, hidden)
        else:
            moments.update(torch.cat((features, hidden.to(features), *self._missing(given)), -1), given.weight)

    def _missing(self, given: Given) -> list[torch.Tensor]:
        if self.metric is None:
            return []
        if given.missing is None:
            return [given.inputs.new_zeros(len(given.inputs), self._width)]
        return [given.missing.to(given.inputs)]

    def _measure(self, meter: ErrorMeter, given: Given, hidden: torch.Tensor) -> None:
        """Add the error of the current layer."""
        if self.metric is None:
            meter.update(hidden, self.layer(given.inputs))
        else:
            target = given.target(self._behind(hidden))
            meter.update(target, self._behind(self.layer(given.inputs)), given.weight)

    def _features(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer.stage(x.to(self.layer.A.dtype))

    def _closed_form(
        self, train: Any, test: Any, *samples: Given, order: torch.Tensor | None = None
    ) -> RidgeFit | CorrectedFit:
        if self.landmarks is None:
            return self._of_features(train, test)
        chosen = self._select_rows(self._chosen(train) if order is None else order).to(train.mean.device)
        if not self.features_are_hidden_units():
            same_everywhere(self.layer)
            return self._refit(*samples)
        rows, given = self.layer.stage.feature_map.num_features, torch.arange(self.given) + self.layer.out_features
        fit = self._judged_fit(train, test, torch.cat((chosen, given.to(chosen))), 0)
        fit.weight[:, :rows] *= rows**0.5  # the feature map divides by √m
        return self._take(fit)

    def _judged_fit(
        self, train: SecondMoments, test: SecondMoments, features: torch.Tensor, start: int
    ) -> CorrectedFit:
        """Fit the readout of some coordinates of vectors that hold the hidden units from `start` on."""
        options, units, target = self.options, self.layer.out_features, self._target(start, len(train.mean))
        metric = torch.eye(len(target.weight)) if self.metric is None else self.metric
        fit = fit_corrected(train, test, features, target, metric, options.ridges)
        solver = Solver(merged(train, test) if options.refit else train, features)
        wanted, offset = solver(target.at(fit.strength), fit.ridge)
        # The best estimate of the hidden units, plus a correction for the error that remains after the contraction.
        guess = nn.functional.pad(torch.eye(units), (start, len(train.mean) - start - units)).to(train.mean)
        weight, bias = solver(guess, fit.ridge)
        assert offset is not None
        assert bias is not None
        contraction = target.weight[:, start : start + units].to(weight)
        weight = weight + self._before(wanted - contraction @ weight)
        bias = bias + self._before((offset - contraction @ bias)[:, None]).squeeze(1)
        return fit._replace(weight=weight, bias=bias)

    def _target(self, start: int, width: int) -> Target:
        """Return W₂ h plus the missing part as a target, for vectors with h from `start` on and the missing part
        last."""
        assert self.output_weight is not None
        behind = start + self.layer.out_features
        weight = nn.functional.pad(self.output_weight.double(), (start, width - behind))
        return Target(weight, slice(width - self._width, width) if self._width else None)

    def _before(self, behind: torch.Tensor) -> torch.Tensor:
        """Return the minimum-norm hidden units (l, n) that the contraction maps to `behind` (o, n)."""
        assert self.output_weight is not None
        weight = self.output_weight.to(behind)
        square = weight @ weight.T
        square.diagonal().add_(SINGULAR * float(square.diagonal().max()) or 1.0)
        return weight.T @ torch.linalg.solve(square, behind)

    def _of_features(self, train: Any, test: Any) -> RidgeFit | CorrectedFit:
        options = self.options
        if self.metric is None:
            return self._take(fit_ridge(train, test, options.ridges, refit=options.refit))
        count = self.layer.stage.out_dim
        return self._take(self._judged_fit(train, test, torch.arange(count, device=train.mean.device), count))

    def _chosen(self, moments: SecondMoments) -> torch.Tensor:
        """Choose the landmarks, the most valuable first."""
        projection = self.landmarks
        assert projection is not None
        weight = self._target(0, len(moments.mean)).at(1.0)
        if self.metric is not None:
            weight = self.metric.to(weight) @ weight
        units, rule = self.layer.out_features, self.options.landmarks
        return choose_landmarks(moments, weight, projection.num_features, rule=rule, given=self.given, units=units)

    def _select_rows(self, order: torch.Tensor) -> torch.Tensor:
        """Copy the rows of the first landmarks; return their indices, ascending."""
        projection = self.landmarks
        assert projection is not None
        chosen = order[: projection.num_features]
        importance = torch.zeros(self.layer.out_features, device=chosen.device).index_fill_(0, chosen, 1.0)
        linear = as_linear(self.original)
        assert isinstance(linear, nn.Linear)
        with at_hand(linear):
            return projection.select(linear.weight, linear.bias, importance.to(linear.weight.device))

    def _refit(self, fitted: Given, held_out: Given) -> RidgeFit | CorrectedFit:
        """Install the best readout for the current rows."""
        train, test = self._feature_moments(), self._feature_moments()
        for moments, tokens in ((train, fitted), (test, held_out)):
            for part in tokens.split(ROWS):
                self._add_features(moments, part, self.target(part.inputs))
        return self._of_features(train, test)

    def _take(self, fit: Any) -> Any:
        self.layer.A.copy_(fit.weight)
        self.layer.bias.copy_(fit.bias)  # type: ignore[union-attr]
        return fit

    def _descend(self, start: Any, fitted: Given, held_out: Given) -> Any:
        """Train the rows and solve for the readout again; undo this unless the error falls."""
        layer = self.layer
        old = {name: value.clone() for name, value in layer.state_dict().items()}
        # Everything after the contraction: fewer values than hidden units, and the relevant error.
        readout = self._judged(self._behind(layer.A.T)).T, self._judged(self._behind(layer.bias))
        wanted = [part.target(self._behind(self.target(part.inputs))) for part in fitted.split(ROWS)]
        targets = self._judged(torch.cat(wanted))
        descend(layer.stage, self.moved, readout, fitted.inputs, targets, self.options.steps, self.generator)
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

    def _judged(self, behind: torch.Tensor) -> torch.Tensor:
        """Apply the metric, if there is one, to (..., o)."""
        return behind if self.metric is None else behind @ self.metric.to(behind).T


def _packed(given: Given, width: int) -> torch.Tensor:
    """Pack inputs, the missing part (n, width) and the weights into one tensor, for a sample of rows."""
    inputs = given.inputs
    missing = inputs.new_zeros(len(inputs), width) if given.missing is None else given.missing.to(inputs)
    weight = inputs.new_ones(len(inputs)) if given.weight is None else given.weight.to(inputs)
    return torch.cat((inputs, missing, weight[:, None]), -1) if width else inputs


def _unpacked(rows: torch.Tensor, dim: int, width: int) -> Given:
    return Given(rows[:, :dim], rows[:, -1], rows[:, dim:-1]) if width else Given(rows)
