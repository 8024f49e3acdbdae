"""The slot of the low-rank part: what it computes, how it is fitted to real inputs, and what it folds to."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from snnk_peft.calibration.landmarks import SecondMoments
from snnk_peft.calibration.low_rank_fit import principal_factors, separable_factors
from snnk_peft.families.base import as_linear
from snnk_peft.functional.at_hand import at_hand
from snnk_peft.layers.low_rank import LowRankConv, LowRankLinear
from snnk_peft.layers.slots import (
    Base,
    Fit,
    FitOptions,
    FitPlace,
    Fitter,
    FoldPlace,
    Slot,
    Tokens,
    no_folded_form,
    real_tokens,
)


class LowRankSlot(Slot):
    """U (Vᵀ x) + b instead of the original.

    Args:
        layer: the factors.
        frobenius_decay: strength that the part asks for.
    """

    replaces = True

    def __init__(self, layer: LowRankLinear | LowRankConv, frobenius_decay: float = 0.0):
        super().__init__()
        self.layer, self.frobenius_decay = layer, frobenius_decay

    def forward(self, base: Base, x: Tensor, *args: object, **kwargs: object) -> Tensor:
        """As the original."""
        return self.layer(x)

    def fitter(self, place: FitPlace, options: FitOptions) -> Fitter:
        """The best factors for the second moment of the inputs."""
        return LowRankFitter(self.layer, place.original, options)

    def fold(self, place: FoldPlace) -> None:
        """Two plain modules where they are cheaper, else one."""
        if not place.original:
            raise no_folded_form(place, self)
        place.put(self.layer.fold())


class LowRankFitter(Fitter):
    """Factors and bias for the real inputs; a convolution's inputs are its patches.

    Args:
        layer: what is fitted.
        original: the dense module.
        options: of `calibrate`; `refit` alone has a meaning here.
    """

    reduces = True

    def __init__(self, layer: LowRankLinear | LowRankConv, original: nn.Module, options: FitOptions):
        self.layer, self.options = layer, options
        dense: Any = as_linear(original)
        with at_hand(dense):
            self.weight = dense.weight.detach().flatten(1).double()
            self.bias = None if dense.bias is None else dense.bias.detach().double()

    def rows(self, x: Tensor, mask: Any) -> Tensor:
        """(n, columns)."""
        return self.layer.patches(x) if isinstance(self.layer, LowRankConv) else real_tokens(x, mask)

    def fit(self, data: Tokens) -> Fit:
        """See `Fitter.fit`."""
        train, test = (SecondMoments(self.weight.shape[1]) for _ in range(2))
        for is_test, rows in data:
            (test if is_test else train).update(rows)
        train.reduce()
        test.reduce()
        before, tokens, held_out = self._error(test), train.count, test.count
        self._solve(train)
        after = self._error(test)
        if self.options.refit:
            train.merge(test)
            self._solve(train)
        return Fit(self.layer.rank, tokens, held_out, None, before, after)

    def _product(self, U: Tensor, V: Tensor) -> Tensor:
        return self.layer.kernel_from(U @ V.T).flatten(1)

    def _solve(self, moments: SecondMoments) -> None:
        covariance, mean = moments.covariance(), moments.mean
        weight = self.weight.to(covariance.device)
        moment = covariance if self.bias is not None else covariance + torch.outer(mean, mean)
        if len(self.layer.U) == len(weight):
            U, V = principal_factors(weight, moment, self.layer.rank)
        else:
            start = self.layer.U.detach().to(moment), self.layer.V.detach().to(moment)
            U, V = separable_factors(weight, moment, start, self._product)
        bias = None if self.bias is None else self.bias.to(mean) + (weight - self._product(U, V)) @ mean
        self.layer.set_factors(U, V, bias)

    def _error(self, moments: SecondMoments) -> float:
        """Squared error relative to the variance of the target."""
        covariance, mean, layer = moments.covariance(), moments.mean, self.layer
        weight = self.weight.to(covariance.device)
        difference = self._product(layer.U.to(mean), layer.V.to(mean)) - weight
        offset = difference @ mean
        if self.bias is not None and layer.bias is not None:
            offset = offset + layer.bias.to(mean) - self.bias.to(mean)
        error = ((difference @ covariance) * difference).sum() + offset.square().sum()
        return float(error / ((weight @ covariance) * weight).sum().clamp_min(1e-300))
