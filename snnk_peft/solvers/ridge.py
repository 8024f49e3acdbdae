"""Streaming ridge regression: the readout A minimising Σ_t ‖y_t − A φ_t − a‖² + λ‖A‖² over tokens t.

Only the moments of (φ, y) are kept (solvers/moments.py), so memory is O(m² + m l) for any number of tokens, and any
number of λ share one eigendecomposition. With S = Σ (φ−φ̄)(φ−φ̄)ᵀ and C = Σ (y−ȳ)(φ−φ̄)ᵀ,

    A = C (S + λI)^{-1},     a = ȳ − A φ̄

(without intercept, the uncentred moments). λ = 0 gives least squares, of minimum norm if S is singular. The same
moments taken on other tokens score any readout without reading a token again:
Σ‖W₂(y − Aφ − a)‖² = Σ‖W₂(y−ȳ)‖² − 2 tr(W₂ A Cᵀ W₂ᵀ) + tr(W₂ A S Aᵀ W₂ᵀ) + n‖W₂(ȳ − Aφ̄ − a)‖².

A fully bundled head is linear in its features, and this is its optimum for the squared error (SNNK paper, section 3.3
and App. J.3); for one-hot targets, a least-squares classifier, whose outputs are scores, not log-probabilities.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from snnk_peft.errors import ConfigError
from snnk_peft.solvers.moments import Moments
from snnk_peft.solvers.reduce import relative_error

DEFAULT_RIDGES = (1e-1, 1e-2, 1e-3, 1e-4, 1e-5, 1e-6, 1e-7, 1e-8)


class Readout(NamedTuple):
    """A linear map on features and its error.

    Attributes:
        weight: A (l, m).
        bias: a (l,) or None.
        relative_error: squared error divided by the variance of the targets (0 perfect, 1 no better than the mean).
    """

    weight: Tensor
    bias: Tensor | None
    relative_error: float


class RidgeFit(NamedTuple):
    """A readout whose regularisation was chosen on held-out tokens.

    Attributes:
        weight: A (l, m).
        bias: a (l,) or None.
        ridge: the chosen λ as a fraction of the mean diagonal of S.
        error: relative error on the held-out tokens.
    """

    weight: Tensor
    bias: Tensor | None
    ridge: float
    error: float


def solve_symmetric(gram: Tensor, cross: Tensor, ridge: float) -> Tensor:
    """Return X = cross (gram + ridge·I)^{-1}, (l, m), for gram (m, m) >= 0.

    X has minimum norm if gram is singular and ridge is 0.
    """
    shifted = gram + ridge * torch.eye(len(gram), dtype=gram.dtype, device=gram.device)
    factor, failed = torch.linalg.cholesky_ex(shifted)
    pivots = factor.diagonal()
    rounding = len(gram) * torch.finfo(gram.dtype).eps
    # A pivot at rounding level means a direction determined by noise alone: Cholesky would amplify it.
    if not failed and bool((pivots.square() > 10 * rounding * shifted.diagonal()).all()):
        return torch.cholesky_solve(cross.T, factor).T
    values, vectors = torch.linalg.eigh(gram)
    return _spectral_solve(values, vectors, cross @ vectors, ridge)


def _spectral_solve(values: Tensor, vectors: Tensor, rotated: Tensor, ridge: float) -> Tensor:
    """Return the solution from gram = V diag(values) Vᵀ and rotated = cross V; directions at rounding level get 0."""
    cutoff = len(values) * torch.finfo(values.dtype).eps * values[-1].clamp_min(0)
    kept = values > cutoff
    inverse = torch.where(kept, 1 / torch.where(kept, values + ridge, 1.0), 0.0)
    return (rotated * inverse) @ vectors.T


class GramAccumulator(Moments):
    """Collect the moments of features and targets over any number of batches, then solve for readouts.

    Args:
        feature_dim: m, length of a feature vector.
        out_dim: l, length of a target vector.
        intercept: fit a bias as well.
        dtype: of the moments; float64 unless the device does not support it.
        output_weight: W₂ (o, l), optional. Errors are then measured after this matrix: of W₂(Aφ + a) against W₂ y,
            which is what a network sees if y feeds a Linear. Only needed on the accumulator that measures.

    Example:
        >>> gram = GramAccumulator(2, 1)
        >>> gram.update(torch.tensor([[0.0, 1.0], [1.0, 0.0], [1.0, 1.0]]), torch.tensor([[3.0], [2.0], [4.0]]))
        >>> gram.solve(ridge=0.0).weight.round(decimals=6)
        tensor([[1., 2.]], dtype=torch.float64)
    """

    def _readout(self, weight: Tensor) -> Readout:
        bias = self._target_mean - weight @ self._feature_mean if self.intercept else None
        return Readout(weight, bias, self.held_out_error(weight, bias))

    def solve(self, ridge: float = 0.0) -> Readout:
        """Return the readout for one absolute ridge λ >= 0; `relative_error` is on the accumulated tokens."""
        _check_ridges([ridge])
        gram, cross = self.normal_equations()
        return self._readout(solve_symmetric(gram, cross, ridge))

    def eigen(self) -> tuple[Tensor, Tensor]:
        """Return eigenvalues (m,), ascending, and eigenvectors (m, m) of the Gram matrix; m³ operations."""
        values, vectors = torch.linalg.eigh(self.normal_equations()[0])
        return values, vectors

    def solve_path(self, ridges: Iterable[float], eigen: tuple[Tensor, Tensor] | None = None) -> list[Readout]:
        """Solve for several absolute ridges at the cost of one eigendecomposition, `eigen()` if known."""
        ridges = list(ridges)
        _check_ridges(ridges)
        values, vectors = self.eigen() if eigen is None else eigen
        rotated = self.normal_equations()[1] @ vectors
        return [self._readout(_spectral_solve(values, vectors, rotated, ridge)) for ridge in ridges]

    def held_out_error(self, weight: Tensor, bias: Tensor | None = None) -> float:
        """Return the relative error of a readout A (l, m), a (l,) on the tokens of this accumulator.

        Σ‖W₂(y − Aφ − a)‖² / Σ‖W₂(y − ȳ)‖², with W₂ the `output_weight` (identity if none). For constant targets,
        relative to Σ‖W₂ y‖² (`relative_error`).
        """
        residual, spread = float(self.residuals(weight, bias).sum()), float(self._spread.sum())
        mean = (
            self._target_mean if self.output_weight is None else self.output_weight.to(self._gram) @ self._target_mean
        )
        return relative_error(residual, spread, spread + self.count * float(mean.square().sum()))

    def residuals(self, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return Σ (W₂(y − Aφ − a))² of each output over the tokens of this accumulator, (o,); arguments as above."""
        self._require_tokens()
        weight = weight.to(self._gram)
        offset = self._target_mean - weight @ self._feature_mean - (0 if bias is None else bias.to(self._gram))
        cross = self._cross
        if self.output_weight is not None:
            output_weight = self.output_weight.to(self._gram)
            weight, offset, cross = output_weight @ weight, output_weight @ offset, output_weight @ cross
        explained = (weight * (2 * cross - weight @ self._gram)).sum(1)
        # For a perfect fit, rounding may give either sign.
        return (self._spread - explained + self.count * offset.square()).clamp_min(0)


def _check_ridges(ridges: Sequence[float]) -> None:
    if not ridges or not all(math.isfinite(ridge) and ridge >= 0 for ridge in ridges):
        raise ConfigError(f"ridges are {list(ridges)}; expected at least one finite number >= 0")


def fit_ridge(
    train: GramAccumulator,
    held_out: GramAccumulator,
    ridges: Sequence[float] = DEFAULT_RIDGES,
    *,
    refit: bool = False,
) -> RidgeFit:
    """Fit on one accumulator, choose the ridge on another; ties go to the larger ridge.

    Args:
        train: moments of the tokens to fit.
        held_out: moments of other tokens; its `output_weight`, if any, decides which error is minimised.
        ridges: candidates, as fractions of the mean diagonal of the training Gram matrix (so that they mean the same
            for any number of tokens and any feature scale). A single candidate is only scored.
        refit: finally fit to all tokens, which `train` then holds; the error remains the one measured before.
    """
    ordered = sorted(ridges, reverse=True)
    _check_ridges(ordered)
    scale = train.ridge_scale
    best: RidgeFit | None = None
    for ridge, readout in zip(ordered, train.solve_path([ridge * scale for ridge in ordered]), strict=True):
        error = held_out.held_out_error(readout.weight, readout.bias)
        if best is None or error < best.error:
            best = RidgeFit(readout.weight, readout.bias, ridge, error)
    assert best is not None
    if refit:
        train.merge(held_out)
        final = train.solve(best.ridge * train.ridge_scale)
        best = best._replace(weight=final.weight, bias=final.bias)
    return best


def one_hot_targets(labels: Tensor, num_classes: int) -> Tensor:
    """Return class indices (n,) as regression targets (n, num_classes) in fp64; ConfigError for anything else."""
    if labels.is_floating_point() or labels.ndim != 1:
        raise ConfigError(f"labels are {tuple(labels.shape)} {labels.dtype}; expected integer class indices (n,)")
    if labels.numel() and not 0 <= int(labels.min()) <= int(labels.max()) < num_classes:
        raise ConfigError(
            f"labels run from {int(labels.min())} to {int(labels.max())}; expected 0 to {num_classes - 1} "
            f"(num_classes={num_classes})"
        )
    return torch.nn.functional.one_hot(labels.long(), num_classes).double()
