"""Mean and covariance of a layer's inputs, beyond N(0, I); accumulated over a stream of batches."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class InputMoments(NamedTuple):
    """Inputs x ~ N(mean, covariance): exact for what is linear in x, a model of the inputs otherwise.

    Attributes:
        mean: E x, (in,).
        covariance: E (x − E x)(x − E x)ᵀ, (in, in).
    """

    mean: Tensor
    covariance: Tensor

    @classmethod
    def of(cls, inputs: Tensor) -> InputMoments:
        """The moments of inputs (n, in), in fp64."""
        inputs = inputs.double()
        mean = inputs.mean(0)
        centred = inputs - mean
        return cls(mean, centred.T @ centred / len(inputs))

    def root(self, centred: bool) -> tuple[Tensor, Tensor]:
        """R (in, k) with RRᵀ = C, and its pseudo-inverse (k, in); C is the covariance, or E xxᵀ if not `centred`.

        Directions in which the inputs do not vary (by 1e-12 of the largest variance) are left out.
        """
        matrix = self.covariance if centred else self.covariance + torch.outer(self.mean, self.mean)
        values, vectors = torch.linalg.eigh(matrix)
        # At least one direction, so that inputs that never vary are a problem like any other.
        kept = (values > 1e-12 * values[-1]) & (values > 0)
        kept[-1] = True
        scale = values[kept].clamp_min(1e-150).sqrt()
        return vectors[:, kept] * scale, (vectors[:, kept] / scale).T
