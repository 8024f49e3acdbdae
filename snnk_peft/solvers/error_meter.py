"""Relative squared error of a replacement, accumulated over batches and measured after the matrix that reads it."""

from __future__ import annotations

import torch
from torch import Tensor

from snnk_peft.functional.relative_error import relative_error
from snnk_peft.solvers.reduce import gathered


class ErrorMeter:
    """Σ‖W₂(y − ŷ)‖² / Σ‖W₂(y − ȳ)‖² over all vectors given.

    Args:
        output_weight: W₂ (o, l), or None for the identity.

    Attributes:
        count: number of vectors so far.
    """

    def __init__(self, output_weight: Tensor | None = None):
        self.output_weight = output_weight
        self.count = 0
        self._error = self._square = 0.0
        self._sum: Tensor | float = 0.0

    @torch.no_grad()
    def update(self, target: Tensor, estimate: Tensor) -> None:
        """Add target and estimate, both (n, l)."""
        if self.output_weight is not None:
            weight = self.output_weight.to(target.dtype)
            target, estimate = target @ weight.T, estimate.to(target.dtype) @ weight.T
        target, estimate = target.double(), estimate.double()
        self.count += len(target)
        self._error += float((target - estimate).square().sum())
        self._square += float(target.square().sum())
        self._sum = self._sum + target.sum(0)

    def reduce(self) -> None:
        """Add the vectors of all other processes; every process calls this, also one without any."""
        parts = gathered((self.count, self._error, self._square, torch.as_tensor(self._sum).cpu()))
        self.count, self._error, self._square, self._sum = (sum(column) for column in zip(*parts, strict=True))

    def value(self) -> float:
        """The relative error; 1 is no better than the mean (of equal targets: than zero)."""
        if self.count == 0:
            raise ValueError("no vectors were given; call update() first")
        mean = torch.as_tensor(self._sum) / self.count
        variance = self._square - self.count * float(mean.square().sum())
        return relative_error(self._error, variance, self._square)
