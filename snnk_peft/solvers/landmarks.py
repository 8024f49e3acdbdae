"""Landmarks in closed form: the hidden units of a layer to keep, and a readout that makes up for the others.

A landmark feature is a hidden unit of the layer being replaced, so the covariance C of all hidden units (l, l) is
enough: for kept units S the best readout is A = C[:, S] (C[S, S] + λ)⁻¹, its error seen after the contraction W₂ is
tr W₂ (C − A C[S, :] − …) W₂ᵀ, and choosing S is column subset selection on C. One pass over the data, memory l²,
independent of the number of tokens and of the batch size.

Two rules for S:
- "importance": largest (output standard deviation × ‖W₂ column‖), each unit independently.
- "greedy" (default): the unit that removes most of the remaining error after W₂, one after the other (a pivoted
  Cholesky factorisation weighted by W₂). It does not pick redundant units.
"""

from __future__ import annotations

import torch
from torch import Tensor

from snnk_peft.errors import ConfigError
from snnk_peft.solvers.reduce import pooled_mean, summed, summed_number

RULES = ("greedy", "importance")
ROWS = 512  # vectors that are converted to fp64 together
CHOICES = 32  # choices of units between two matrix products
BLOCKS = 8  # of columns: a product with itself is symmetric, and blocks below its diagonal are not computed


class SecondMoments:
    """Mean and covariance of vectors of length `dim`, accumulated in fp64 over any number of batches.

    Attributes:
        count: number of vectors so far.
        weight: the sum of their weights; their number, if all weigh the same.
        mean: (dim,).
        scatter: (dim, dim), the sum of w (x − mean)(x − mean)ᵀ.
    """

    def __init__(self, dim: int):
        self.count, self.weight = 0, 0.0
        self.mean = torch.zeros(dim, dtype=torch.float64)
        self.scatter = torch.zeros(dim, dim, dtype=torch.float64)

    @torch.no_grad()
    def update(self, vectors: Tensor, weight: Tensor | None = None) -> None:
        """Add (n, dim) vectors, weighted by `weight` (n,).

        Raises:
            ValueError: an entry is NaN or infinite; the moments are left unchanged.
        """
        if not torch.isfinite(vectors).all():
            raise ValueError(
                "hidden activations hold NaN or infinity; expected finite numbers. Run the model in fp32 or bf16"
            )
        if len(vectors) == 0:
            return
        self.mean, self.scatter = (each.to(vectors.device) for each in (self.mean, self.scatter))
        width = -(-len(self.mean) // BLOCKS)
        blocks = [(start, start + width) for start in range(0, len(self.mean), width)]
        weights = [None] * len(vectors) if weight is None else weight.double().split(ROWS)
        for rows, each in zip(vectors.split(ROWS), weights, strict=False):
            rows = rows.double()
            if each is None:
                total, mean = float(len(rows)), rows.mean(0)
                rows = scaled = rows - mean
            else:
                total = float(each.sum())
                mean = each @ rows / total
                rows = rows - mean
                scaled = rows * each.unsqueeze(1)
            for start, end in blocks:
                self.scatter[start:end, start:].addmm_(scaled[:, start:end].T, rows[:, start:])
            self._shift(total, mean)
        self.count += len(vectors)
        for start, end in blocks:
            self.scatter[start:end, :start] = self.scatter[:start, start:end].T

    def merge(self, other: SecondMoments) -> None:
        """Add the vectors of another accumulator of the same length."""
        if other.count:
            self.mean, self.scatter = self.mean.to(other.mean), self.scatter.to(other.scatter) + other.scatter
            self._shift(other.weight, other.mean)
            self.count += other.count

    def reduce(self) -> None:
        """Add the vectors of all other processes; every process must call this, even one without any."""
        total, mean = pooled_mean(self.weight, self.mean)
        step = self.mean - mean
        self.scatter = summed(self.scatter.addr(step, step, alpha=self.weight))
        self.count, self.weight, self.mean = int(summed_number(self.count)), total, mean

    def _shift(self, weight: float, mean: Tensor) -> None:
        total = self.weight + weight
        step = mean - self.mean
        self.scatter.addr_(step, step, alpha=self.weight * weight / total)
        self.mean = self.mean + step * (weight / total)
        self.weight = total

    def mapped(self, matrix: Tensor) -> SecondMoments:
        """Return the moments of vectors whose first n coordinates are multiplied by M (k, n), from theirs."""
        found, inner = SecondMoments(0), matrix.shape[1]
        matrix = matrix.to(self.scatter)
        found.count, found.weight = self.count, self.weight
        found.mean = torch.cat((matrix @ self.mean[:inner], self.mean[inner:]))
        rows = matrix @ self.scatter[:inner]  # (k, dim)
        first = torch.cat((rows[:, :inner] @ matrix.T, rows[:, inner:]), 1)
        rest = torch.cat((rows[:, inner:].T, self.scatter[inner:, inner:]), 1)
        found.scatter = torch.cat((first, rest))
        return found

    def covariance(self) -> Tensor:
        if self.count == 0:
            raise ValueError("no vectors were accumulated; give at least one batch with an unmasked token")
        return self.scatter / self.weight


def choose_landmarks(
    moments: SecondMoments,
    output_weight: Tensor,
    count: int,
    *,
    rule: str = "greedy",
    given: int = 0,
    units: int | None = None,
) -> Tensor:
    """Return the hidden units to keep, (count,), most valuable first: a smaller choice is a prefix of a larger one.

    Args:
        moments: of the hidden units (l,), followed by `given` inputs that are always available to the readout.
        output_weight: W₂ (o, l), the contraction after the units; more columns, up to the length of the vectors, if the
            output depends on what follows them as well.
        count: number of units to keep, <= l.
        rule: "greedy" or "importance".
        given: number of coordinates of `moments` after the units that are always available to the readout.
        units: l, if vectors continue after the given inputs; otherwise None.

    Raises:
        ConfigError: unknown rule, or more units than there are.
    """
    units = len(moments.mean) - given if units is None else units
    if rule not in RULES:
        raise ConfigError(f"landmark rule is {rule!r}; expected one of {', '.join(RULES)}")
    if not 1 <= count <= units:
        raise ConfigError(f"number of landmarks is {count}; the layer has {units} hidden units")
    scatter = moments.scatter  # the covariance up to a factor, which changes no choice, without a copy
    weight = output_weight.to(scatter)
    if rule == "importance":
        spread = scatter.diagonal()[:units].clamp_min(0).sqrt()
        return (spread * weight[:, :units].norm(dim=0)).topk(count).indices
    start = scatter[:units, :units]
    seen = weight @ scatter[: weight.shape[1], :units]  # column j: covariance of unit j with the output
    if given:
        inputs = slice(units, units + given)
        known = torch.linalg.pinv(scatter[inputs, inputs], hermitian=True) @ scatter[inputs, :units]
        start = start - scatter[:units, inputs] @ known
        seen = seen - weight @ scatter[: weight.shape[1], inputs] @ known
    return _pivots(start, seen, count)


def _pivots(residual: Tensor, seen: Tensor, count: int) -> Tensor:
    """Return the units that reduce the output's error most, one after the other, (count,).

    After k choices, the remaining covariance is C − F Fᵀ, and the one with the output S − T Fᵀ. Both are updated only
    once per `CHOICES`, by matrix products: one step then reads S once.

    Args:
        residual: C (l, l).
        seen: S (o, l).
        count: number of units.
    """
    residual, seen, variance = residual.clone(), seen.clone(), residual.diagonal().clone()
    floor = 1e-10 * variance.max()
    open_units = torch.ones(len(variance), dtype=torch.bool, device=variance.device)
    chosen: list[int] = []
    while len(chosen) < count:
        F, T = (each.new_zeros(len(each), CHOICES) for each in (residual, seen))
        said = seen.square().sum(0)
        for k in range(min(CHOICES, count - len(chosen))):
            gain = torch.where(open_units & (variance > floor), said.clamp_min(0) / variance.clamp_min(floor), -1.0)
            # Units without any remaining variance are equally good: any open one will do.
            best = int(gain.argmax()) if gain.max() > 0 else int(open_units.nonzero()[0])
            open_units[best] = False
            chosen.append(best)
            if variance[best] > floor:
                scale = variance[best].rsqrt()
                column = (residual[best] - F[:, :k] @ F[best, :k]) * scale
                taken = (seen[:, best] - T[:, :k] @ F[best, :k]) * scale
                common = taken @ seen - F[:, :k] @ (taken @ T[:, :k])
                said += column * (column * taken.square().sum() - 2 * common)
                variance -= column.square()
                F[:, k], T[:, k] = column, taken
        residual.addmm_(F, F.T, alpha=-1.0)
        seen.addmm_(T, F.T, alpha=-1.0)
    return torch.tensor(chosen, device=variance.device)
