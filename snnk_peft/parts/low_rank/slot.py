"""The slot of the low-rank part: its forward, its fit to real inputs, its folded form."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from snnk_peft.families.base import as_linear
from snnk_peft.functional.at_hand import at_hand
from snnk_peft.functional.nonlinearity import nonlinearity
from snnk_peft.layers.low_rank import LowRankLinear
from snnk_peft.layers.low_rank_conv import LowRankConv
from snnk_peft.layers.slots import (
    Base,
    Fit,
    FitOptions,
    FitPlace,
    Fitter,
    FoldPlace,
    Slot,
    Tokens,
    as_given,
    no_folded_form,
    real_tokens,
)
from snnk_peft.low_rank import InputMoments, factorize
from snnk_peft.low_rank.rearranged import rearranged_factors
from snnk_peft.solvers.corrected import Solver, Target, error_of, fit_corrected, merged, moved
from snnk_peft.solvers.landmarks import SecondMoments
from snnk_peft.solvers.narrow import principal_factors
from snnk_peft.solvers.reduce import ErrorMeter, relative_error

Activation = str | Callable[[Tensor], Tensor]
Solution = tuple[Tensor, Tensor, Tensor | None]  # U, V, bias; fp64
FLOOR = 1e-6  # relative to the mean variance


class LowRankSlot(Slot):
    """Slot that computes U (Vᵀ x) + b instead of the original."""

    replaces = True

    def __init__(self, layer: LowRankLinear | LowRankConv, activation: Activation = "identity"):
        super().__init__()
        self.layer, self.activation = layer, activation

    def forward(self, base: Base, x: Tensor, *args: object, **kwargs: object) -> Tensor:
        return self.layer(x)

    def fitter(self, place: FitPlace, options: FitOptions) -> Fitter:
        """Return the fitter of the best factors for the moments of the inputs."""
        return LowRankFitter(self.layer, place, self.activation, options)

    def fold(self, place: FoldPlace) -> None:
        """Fold to two plain modules if they are cheaper, else to one; to one if an adapter is multiplied into it."""
        if not place.original:
            raise no_folded_form(place, self)
        # A sequential adapter fits after any module and may occur here several times; the others need a matrix.
        if any(slot.alone for slot in place.slots if slot is not self):
            place.put(self.layer.dense())
            place.remark(f"{place.path}: its factors are multiplied out, because an adapter is added to the product")
        else:
            place.put(self.layer.fold())


class LowRankFitter(Fitter):
    """Fits factors and bias to the mean and covariance of real inputs (patches for a convolution).

    The best linear layer for these moments has a closed form, except for kernels split into k × 1 and 1 × k. If an
    activation follows, the layer that is best after it for Gaussian inputs of these moments is tried as well, and
    held-out inputs decide. With a metric R of the layer's output, the best layer under that metric is U Vᵀ = R⁻¹ Q Qᵀ R
    B with B the full matrix for the target and Q the leading eigenvectors of R B S Bᵀ Rᵀ.
    """

    reduces = True

    def __init__(
        self, layer: LowRankLinear | LowRankConv, place: FitPlace, activation: Activation, options: FitOptions
    ):
        self.layer, self.activation, self.options = layer, activation, options
        dense: Any = as_linear(place.original)
        with at_hand(dense):
            self.weight = dense.weight.detach().flatten(1).double()
            self.bias = None if dense.bias is None else dense.bias.detach().double()
        self.whole = len(layer.U) == len(self.weight)  # rows of U Vᵀ are whole outputs
        if self.whole and isinstance(layer, LowRankLinear):
            self.counted = place.path

    @property
    def reads(self) -> int:  # type: ignore[override]
        return 1 if self.activation == "identity" or self.metric is not None else 2

    def rows(self, x: Tensor, mask: Any) -> Tensor:
        """Return the inputs of the matrix, (n, columns)."""
        return self.layer.patches(x) if isinstance(self.layer, LowRankConv) else real_tokens(x, mask)

    def fit(self, data: Tokens) -> Fit:
        if self.metric is not None:
            return self._fit_judged(data, self.metric)
        train, test = (SecondMoments(self.weight.shape[1]) for _ in range(2))
        present = self._present()
        meters = [ErrorMeter()]
        for is_test, rows in data:
            (test if is_test else train).update(rows)
            if is_test and self.reads == 2:
                self._measure(meters, [present], rows)
        train.reduce()
        test.reduce()
        tokens, held_out, solve = train.count, test.count, self._linear
        factors = solve(train)
        if self.reads == 1:
            before, after = self._error(present, test), self._error(factors, test)
        else:
            ways = [self._linear, self._behind_activation]
            candidates = [factors, self._behind_activation(train)]
            meters += [ErrorMeter() for _ in candidates]
            for is_test, rows in data:
                if is_test:
                    self._measure(meters[1:], candidates, rows)
            for meter in meters:
                meter.reduce()
            before, *errors = (meter.value() for meter in meters)
            after = min(errors)
            factors, solve = candidates[errors.index(after)], ways[errors.index(after)]
        if self.options.refit:
            train.merge(test)
            factors = solve(train)
        self.layer.set_factors(*factors)
        # Fewer inputs do not span the leading directions of the output.
        return Fit(self.layer.rank, tokens, held_out, None, before, after, unknowns=self.layer.rank + 1)

    def _fit_judged(self, data: Tokens, metric: Tensor) -> Fit:
        """Fit to the moments of the inputs and of the missing part of the stream after the layer."""
        out, columns = self.weight.shape
        train, test = SecondMoments(columns + out), SecondMoments(columns + out)
        for is_test, read in data:
            given = as_given(read)
            missing = given.target(given.inputs.new_zeros(len(given.inputs), out))
            (test if is_test else train).update(torch.cat((given.inputs, missing), -1), given.weight)
        train.reduce()
        test.reduce()
        device = train.mean.device
        features, intercept = torch.arange(columns, device=device), self.bias is not None
        weight, metric = self.weight.to(device), metric.to(device)
        target = Target(nn.functional.pad(weight, (0, out)), slice(columns, columns + out))
        U, V, bias = self._present()
        own = None if bias is None or self.bias is None else (bias - self.bias).to(device)
        before = error_of(test, features, target, metric, self.layer.product(U, V).to(device), own)
        full = fit_corrected(
            train, test, features, moved(target, features, weight), metric, self.options.ridges, intercept=intercept
        )

        def reduced(moments: SecondMoments, whole: Tensor) -> Solution:
            second = moments.covariance()[:columns, :columns]
            if not intercept:
                second = second + torch.outer(moments.mean[:columns], moments.mean[:columns])
            U, V = principal_factors(metric @ whole, second, self.layer.rank)
            U = torch.linalg.solve(metric, U)
            if not intercept:
                return U, V, None
            return U, V, target.at(full.strength) @ moments.mean - U @ (V.T @ moments.mean[:columns])

        U, V, bias = reduced(train, weight + full.weight)
        after = error_of(test, features, target, metric, U @ V.T, bias)
        if self.options.refit:
            both = merged(train, test)
            rest = moved(target, features, weight).at(full.strength)
            U, V, bias = reduced(both, weight + Solver(both, features, intercept)(rest, full.ridge)[0])
        own_bias = None if bias is None or self.bias is None else bias + self.bias.to(bias)
        self.layer.set_factors(U, V, own_bias)
        return Fit(self.layer.rank, train.count, test.count, full.ridge, before, after, unknowns=self.layer.rank + 1)

    def _present(self) -> Solution:
        layer = self.layer
        bias = None if layer.bias is None else layer.bias.detach().double()
        return layer.U.detach().double(), layer.V.detach().double(), bias

    def _linear(self, moments: SecondMoments) -> Solution:
        """Minimise the squared error before the activation."""
        covariance, mean = moments.covariance(), moments.mean
        weight = self.weight.to(covariance.device)
        moment = covariance if self.bias is not None else covariance + torch.outer(mean, mean)
        if not self.whole:
            return self._rearranged(moments, "identity")
        U, V = principal_factors(weight, moment, self.layer.rank)
        bias = None if self.bias is None else self.bias.to(mean) + (weight - U @ V.T) @ mean
        return U, V, bias

    def _rearranged(self, moments: SecondMoments, activation: Activation) -> Solution:
        inputs, start = InputMoments(moments.mean, moments.covariance()), self._present()[:2]
        weight, product = self.weight.to(moments.mean.device), self.layer.product
        return rearranged_factors(weight, start, product, activation=activation, bias=self.bias, inputs=inputs)

    def _behind_activation(self, moments: SecondMoments) -> Solution:
        """Minimise the squared error after the activation for Gaussian inputs of these moments."""
        if not self.whole:
            return self._rearranged(moments, self.activation)
        covariance = moments.covariance()
        # Rare directions get a small weight, so that factors stay small in them.
        covariance = covariance + covariance.diagonal().mean() * FLOOR * torch.eye(len(covariance)).to(covariance)
        inputs, weight = InputMoments(moments.mean, covariance), self.weight.to(covariance.device)
        bias = None if self.bias is None else self.bias.to(weight)
        factors = factorize(weight, self.layer.rank, "data", activation=self.activation, bias=bias, inputs=inputs)
        return factors.U, factors.V, factors.bias

    def _measure(self, meters: list[ErrorMeter], solutions: list[Solution], rows: Tensor) -> None:
        """Add the errors after the activation."""
        f, rows = nonlinearity(self.activation).function, rows.to(self.weight)
        wanted = f(nn.functional.linear(rows, self.weight, self.bias))
        for meter, (U, V, bias) in zip(meters, solutions, strict=True):
            meter.update(wanted, f(nn.functional.linear(rows, self.layer.product(U, V), bias)))

    def _error(self, solution: Solution, moments: SecondMoments) -> float:
        """Return the squared error relative to the variance of the target, before any activation."""
        U, V, bias = solution
        covariance, mean = moments.covariance(), moments.mean
        weight = self.weight.to(covariance.device)
        difference = self.layer.product(U.to(mean), V.to(mean)) - weight
        offset = difference @ mean
        if self.bias is not None and bias is not None:
            offset = offset + bias.to(mean) - self.bias.to(mean)
        error = ((difference @ covariance) * difference).sum() + offset.square().sum()
        spread, centre = ((weight @ covariance) * weight).sum(), weight @ mean
        return relative_error(float(error), float(spread), float(spread + centre.square().sum()))
