"""Error estimates of a ridge regression from its own moments.

With centred features φ̃, S = Σ φ̃φ̃ᵀ over n examples and the ridge λ, predictions of the fitted targets are H y with

    H = 11ᵀ/n + Φ̃ (S + λI)⁻¹ Φ̃ᵀ,        h(φ) = 1/n + φ̃ᵀ (S + λI)⁻¹ φ̃ on its diagonal (the leverage)

which gives, without another fit:

    generalised cross-validation   n ‖y − Hy‖² / (n − tr H)²                         (Golub, Heath & Wahba 1979)
    leave-one-out errors           (y − Hy)ᵢ / (1 − hᵢ), exactly what a fit without example i would give
    predictive variance            σ² (1 + h(φ)),   σ² = ‖y − Hy‖² / (n − tr H), of Bayesian linear regression with
                                   the prior variance σ²/λ on each weight

Without an intercept, 1/n is 0 and features are not centred.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from snnk_peft.errors import ConfigError
from snnk_peft.solvers.ridge import DEFAULT_RIDGES, GramAccumulator, Readout, RidgeFit

LEFT = 0.25  # share of the degrees of freedom that generalised cross-validation needs


class RidgePosterior:
    """A readout with its uncertainty.

    Args:
        moments: of features and targets; later changes to them have no effect.
        ridge: λ > 0, absolute.
        eigen: `moments.eigen()`, if known.

    Attributes:
        readout: the solution; weight (l, m), bias (l,).
        degrees: tr H, the effective number of parameters of each output.
        noise: σ² of each output, (l,); infinity if no degree of freedom is left.

    Raises:
        ConfigError: λ is not above 0.
        ValueError: no examples.
    """

    def __init__(self, moments: GramAccumulator, ridge: float, eigen: tuple[Tensor, Tensor] | None = None):
        if not ridge > 0:
            raise ConfigError(f"ridge is {ridge}; expected a number above 0, without which variances are unbounded")
        values, vectors = eigen = moments.eigen() if eigen is None else eigen
        values = values.clamp_min(0)
        self._half = vectors * (values + ridge).rsqrt()  # (S + λI)⁻¹ = half halfᵀ
        self._mean = moments.feature_mean if moments.intercept else torch.zeros_like(moments.feature_mean)
        self._constant = 1 / moments.count if moments.intercept else 0.0
        self.readout = moments.solve_path([ridge], eigen)[0]
        self.degrees = self._constant * moments.count + float((values / (values + ridge)).sum())
        left = moments.count - self.degrees
        residual = moments.residuals(self.readout.weight, self.readout.bias)
        self.noise = residual / left if left > 0 else torch.full_like(residual, torch.inf)

    def leverage(self, features: Tensor) -> Tensor:
        """Return h(φ) for features (n, m): (n,)."""
        return self._constant + ((features.to(self._half) - self._mean) @ self._half).square().sum(-1)

    def variance(self, features: Tensor) -> Tensor:
        """Return the predictive variance of targets at these features (n, m): (n, l)."""
        return (1 + self.leverage(features)).unsqueeze(-1) * self.noise

    def leave_one_out(self, features: Tensor, targets: Tensor) -> Tensor:
        """Return errors y − ŷ (n, l) of fitted examples, (n, m) and (n, l), each from the fit without it."""
        predicted = features.to(self.readout.weight) @ self.readout.weight.T
        if self.readout.bias is not None:
            predicted = predicted + self.readout.bias
        return (targets.to(predicted) - predicted) / (1 - self.leverage(features)).unsqueeze(-1)


def cross_validated(
    moments: GramAccumulator,
    ridges: Sequence[float] = DEFAULT_RIDGES,
    eigen: tuple[Tensor, Tensor] | None = None,
) -> RidgeFit:
    """Return the readout whose ridge has the least generalised cross-validation error; ties go to the larger ridge.

    Ridges that leave less than a quarter of the degrees of freedom are used only if all do: with as many features as
    examples, the error is then a quotient of two numbers near 0, determined by repeated examples and rounding.

    Args:
        moments: of all examples.
        ridges: candidates above 0, as fractions of the mean diagonal of S.
        eigen: `moments.eigen()`, if known.

    Raises:
        ConfigError: no candidates, or some not above 0.
        ValueError: no examples.
    """
    ordered = sorted(ridges, reverse=True)
    if not ordered or not all(ridge > 0 for ridge in ordered):
        raise ConfigError(f"ridges are {list(ridges)}; expected at least one number above 0")
    scale, constant = moments.ridge_scale, float(moments.intercept)
    eigen = moments.eigen() if eigen is None else eigen
    values = eigen[0].clamp_min(0)
    best: tuple[float, float, Readout] | None = None
    for ridge, readout in zip(ordered, moments.solve_path([r * scale for r in ordered], eigen), strict=True):
        left = moments.count - constant - float((values / (values + ridge * scale)).sum())
        error = readout.relative_error * (moments.count / left) ** 2 if left > LEFT * moments.count else torch.inf
        if best is None or error < best[0]:
            best = error, ridge, readout
    assert best is not None
    error, ridge, readout = best
    return RidgeFit(readout.weight, readout.bias, ridge, error)
