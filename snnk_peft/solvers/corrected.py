"""Readouts evaluated in the metric of the model's output, with targets that correct the errors of earlier layers.

A place of the model gives y = L v, linear in the vectors v whose moments are known. After it the original's stream is
ahead of the converted one's by m, which is part of v as well. Features φ are further parts of v. We want A φ + a

    minimising   E w ‖R (y + s m − A φ − a)‖² + λ ‖A‖²,      judged by   E w ‖R (y + m − A φ − a)‖² on held-out tokens

with token weights w in the moments, and RᵀR the metric: E g gᵀ of gradients of the answers (calibrating/sensitivity.py)
plus a little of the identity. Without a penalty the minimiser does not depend on R; R determines the ridge λ, the
strength s of the correction, and, in landmarks.py and narrow.py, which units stay.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from snnk_peft.solvers.landmarks import SecondMoments
from snnk_peft.solvers.reduce import relative_error

STRENGTHS = (1.0, 0.5, 0.0)  # s, in the order of preference at equal errors


class CorrectedFit(NamedTuple):
    """A readout and its settings, chosen on held-out tokens.

    Attributes:
        weight: A (o, m), fp64.
        bias: a (o,), or None.
        ridge: λ as a fraction of the mean second moment of the features.
        strength: s.
        error: error on held-out tokens, relative to the spread of R (y + m).
    """

    weight: Tensor
    bias: Tensor | None
    ridge: float
    strength: float
    error: float


class Target(NamedTuple):
    """The target of a readout, as a function of the vectors v.

    Args:
        weight: L (o, width of v).
        missing: coordinates of m in v, (o,); None for no correction.
    """

    weight: Tensor
    missing: slice | None = None

    def at(self, strength: float) -> Tensor:
        """Return the matrix T of y + s m = T v, (o, width)."""
        if self.missing is None or not strength:
            return self.weight
        whole = self.weight.clone()
        whole[:, self.missing].diagonal().add_(strength)
        return whole


def fit_corrected(
    train: SecondMoments,
    held_out: SecondMoments,
    features: Tensor,
    target: Target,
    metric: Tensor,
    ridges: Sequence[float],
    *,
    intercept: bool = True,
    refit: bool = False,
    spread: Target | None = None,
) -> CorrectedFit:
    """Fit to one part of the tokens, choose ridge and strength on another; ties go to the larger ridge.

    Args:
        train: moments of v, of the tokens to fit.
        held_out: the same for other tokens.
        features: coordinates of φ in v, (m,).
        target: y and m.
        metric: R (any, o).
        ridges: candidates for λ.
        intercept: whether there is a bias a; without it, moments about the origin are fitted.
        refit: finally fit to all tokens; the error remains the one measured before.
        spread: reference for the relative error, if it is not the target.
    """
    metric = metric.to(train.scatter)
    square = metric.T @ metric
    strengths = STRENGTHS if target.missing is not None else STRENGTHS[:1]
    wanted = target.at(1.0)
    solver = Solver(train, features, intercept)
    best: CorrectedFit | None = None
    judge = _Judge(held_out, features, wanted, square)
    goals = [target.at(strength) for strength in strengths]
    rotated = [solver.rotated(goal) for goal in goals[:: len(goals) - 1 or 1]]
    for ridge in sorted(ridges, reverse=True):
        ends = [solver.solved(each, ridge) for each in rotated]
        for strength, goal in zip(strengths, goals, strict=True):
            weight = ends[-1].lerp(ends[0], strength)  # linear in s
            bias = solver.bias(goal, weight)
            error = judge(weight, bias)
            if best is None or error < best.error:
                best = CorrectedFit(weight, bias, ridge, strength, error)
    assert best is not None
    whole = judge.spread() if spread is None else _Judge(held_out, features, spread.at(1.0), square).spread()
    if refit:
        weight, bias = Solver(merged(train, held_out), features, intercept)(target.at(best.strength), best.ridge)
        best = best._replace(weight=weight, bias=bias)
    return best._replace(error=relative_error(best.error, *whole))


def merged(one: SecondMoments, other: SecondMoments) -> SecondMoments:
    """Return the moments of the tokens of both, which are not changed."""
    together = SecondMoments(len(one.mean))
    together.merge(one)
    together.merge(other)
    return together


def error_of(
    moments: SecondMoments, features: Tensor, target: Target, metric: Tensor, weight: Tensor, bias: Tensor | None
) -> float:
    """Return the error of any readout, A (o, m) and a (o,), on the tokens of some moments, relative as in a fit."""
    square = metric.to(moments.scatter).T @ metric.to(moments.scatter)
    judge = _Judge(moments, features, target.at(1.0), square)
    return relative_error(judge(weight, bias), *judge.spread())


def moved(target: Target, features: Tensor, weight: Tensor) -> Target:
    """Return the target minus W φ: a readout of the rest adds to W, and a large ridge leaves W (o, m) unchanged."""
    rest = target.weight.clone()
    rest[:, features] -= weight.to(rest)
    return Target(rest, target.missing)


class Solver:
    """Readouts of some coordinates for any target and ridge, for one set of moments, from one eigendecomposition.

    Args:
        moments: of v.
        features: coordinates of φ in v, (m,).
        intercept: whether there is a bias a; without it, moments about the origin are fitted.
    """

    def __init__(self, moments: SecondMoments, features: Tensor, intercept: bool = True):
        second = moments.covariance()
        if not intercept:
            second = second + torch.outer(moments.mean, moments.mean)
        self.mean, self.features, self.intercept = moments.mean, features, intercept
        self.columns = second[:, features]
        self.values, self.vectors = torch.linalg.eigh(self.columns[features])
        self.values = self.values.clamp_min(0)
        self.scale = float(self.values.mean()) or 1.0

    def __call__(self, goal: Tensor, ridge: float) -> tuple[Tensor, Tensor | None]:
        """Return A (o, m) and a (o,) for the outputs T v, with T (o, width) the `goal`."""
        weight = self.solved(self.rotated(goal), ridge)
        return weight, self.bias(goal, weight)

    def rotated(self, goal: Tensor) -> Tensor:
        """Return the products of T v with the features' eigenvectors, (o, m); linear in T."""
        return goal @ self.columns @ self.vectors

    def solved(self, rotated: Tensor, ridge: float) -> Tensor:
        """Return A (o, m) from these products."""
        cutoff = len(self.values) * torch.finfo(self.values.dtype).eps * self.values[-1]
        inside = self.values > cutoff
        inverse = torch.where(inside, 1 / torch.where(inside, self.values + ridge * self.scale, 1.0), 0.0)
        return (rotated * inverse) @ self.vectors.T

    def bias(self, goal: Tensor, weight: Tensor) -> Tensor | None:
        """Return a (o,) for A."""
        return goal @ self.mean - weight @ self.mean[self.features] if self.intercept else None


class _Judge:
    """E w ‖R (T v − A φ − a)‖² over the tokens of some moments; arguments as above."""

    def __init__(self, moments: SecondMoments, features: Tensor, goal: Tensor, square: Tensor):
        covariance = moments.covariance()
        self.goal, self.square, self.mean = goal @ moments.mean, square, moments.mean[features]
        seen = square @ (goal @ covariance)
        self.whole = float((seen * goal).sum())
        self.cross, self.gram = seen[:, features], covariance[features][:, features]

    def __call__(self, weight: Tensor, bias: Tensor | None) -> float:
        offset = self.goal - weight @ self.mean - (0 if bias is None else bias)
        explained = float((weight * (2 * self.cross - self.square @ weight @ self.gram)).sum())
        return max(0.0, self.whole - explained + float(offset @ self.square @ offset))

    def spread(self) -> tuple[float, float]:
        """Return the variance of R T v, and its mean square."""
        return self.whole, self.whole + float(self.goal @ self.square @ self.goal)
