"""Exponential features with a quadratic term, in coordinates of the data's choice: what `gerf`, `oprf`, `saderf` and
`derf` share. They differ in where a and the coordinates come from.

    φ(x) = m^-½ D exp(Σ_l a_l ω_l² + ω·(√(1−4a) ∘ u) − ‖u‖²/2),      D = Π_l (1−4a_l)^¼

u is x, Ψx with a diagonal Ψ, or x times a matrix, such that the inner product of both towers is x·y: then the features
are unbiased for e^{x·y} whatever a < 1/8 is, and with kernel="gaussian" and a factor e^{−‖x‖²/2} of the original
vectors for e^{−‖x−y‖²/2} (Likhosherstov et al. 2022, 2023).

Shapes: x (..., n, dim), features (..., n, num_features). Cost: `posrf`, the change of coordinates, and ‖ω‖² per row.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch

from snnk_peft.components.base import Features
from snnk_peft.components.base_exponential import Exponential, exponential_logarithms
from snnk_peft.functional.exponential import half_square, log_factor, stabilised
from snnk_peft.functional.log_linear import LogLinear
from snnk_peft.functional.precision import full_precision, wide
from snnk_peft.projections.base import Projection


class Coordinates(NamedTuple):
    """One tower's change of coordinates: u = stretch ∘ x, or x · basis, or x itself where both are None.

    Attributes:
        a: a number, one per example (..., 1, 1), or one per coordinate (..., 1, dim) or (dim,); all below 1/8.
        stretch: (..., 1, dim) or (dim,).
        basis: (..., dim, dim).
    """

    a: torch.Tensor | float
    stretch: torch.Tensor | None = None
    basis: torch.Tensor | None = None


class Tilted(Exponential):
    """Base class of the components with a factor e^{Σ_l a_l ω_l²}; a member defines `coordinates`."""

    # What members hold in buffers for want of statistics is `posrf`, and nothing here changes it. The buffers stay
    # because all files of 0.1.0 have them, perhaps with other values.
    tilted = True

    def coordinates(
        self, statistics: Mapping[str, torch.Tensor], second: bool, like: torch.Tensor, dim: int
    ) -> Coordinates:
        """a and the coordinates of one tower.

        Args:
            statistics: see `Component.statistics`; empty for the stored ones.
            second: whether this is psi.
            like: any tensor on the device and in the dtype of the result, at least fp32.
            dim: length of the vectors.
        """
        raise TypeError(f"{type(self).__name__} does not define coordinates(); see Tilted")

    def tower(
        self, x: torch.Tensor, projection: Projection, statistics: Mapping[str, torch.Tensor], second: bool
    ) -> Features:
        with full_precision(x):
            u = wide(x)
            a, stretch, basis = self.coordinates(statistics, second, u, projection.dim)
            a = self.tilt(a, projection)
            if stretch is not None:
                u = u * stretch.to(u)
            if basis is not None:
                u = u @ basis.to(u)
            exponents = projection(u * (1 - 4 * a) ** 0.5)
            exponents += quadratic_forms(a, projection, exponents)
            factor = log_factor(u, "softmax", a)
            if self.kernel_name == "gaussian":
                factor = factor - half_square(x)
            return Features(*stabilised(exponents, factor, projection.amplitudes(signed=second), x.dtype))

    def log_linear(
        self, projection: Projection, statistics: Mapping[str, torch.Tensor], second: bool, like: torch.Tensor
    ) -> LogLinear | None:
        chosen = self.coordinates(statistics, second, like, projection.dim)
        return exponential_logarithms(projection, self.kernel_name, second, like, **chosen._asdict())


def quadratic_forms(a: torch.Tensor | float, projection: Projection, like: torch.Tensor) -> torch.Tensor:
    """Σ_l a_l ω_l² of every row: (num_features,), with leading dimensions those of a.

    Args:
        a: as in `Coordinates`.
        projection: W.
        like: a tensor on the device and in the dtype of the result.
    """
    if isinstance(a, torch.Tensor) and a.dim() > 0 and a.shape[-1] > 1:
        return a @ projection.materialize().to(like).square().mT
    return a * projection.squared_row_norms().to(like)
