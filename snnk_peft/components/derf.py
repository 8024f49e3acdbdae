"""Dense exponential random features (DERF; Spectraformer's ADERF and SDERF): φ(x) = m^-½ D exp(ωᵀAω + ωᵀBx + xᵀCx).

A is a symmetric matrix, so the quadratic term follows the data's principal directions. After a change of basis every
case is `gerf` with one parameter a_l per coordinate:

    mode="symmetric" (SDERF): both towers are rotated to the eigenvectors of E(x+y)(x+y)ᵀ, with eigenvalues λ_l, and
        a_l is the best parameter of a one-dimensional problem with S = λ_l.
    mode="asymmetric" (ADERF): x -> Tx, y -> T⁻¹y with the symmetric T for which T² is the geometric mean of the
        second moments, T² E[xxᵀ] T² = E[yyᵀ]: it minimises E‖Tx‖² + E‖T⁻¹y‖². One a for all coordinates.

Moments are those **of one example and head**. Unbiased for e^{x·y} for any rotation, T and a; with kernel="gaussian",
e^{−‖x−y‖²/2}. Without statistics: the identity and a = 0, which is `posrf`. Over quadratures and rows of one
length a = 0 (base_exponential.py), while the change of basis stays. Cost: `posrf`, 2 dim² multiply-adds per vector, and
eigendecompositions of (dim, dim) matrices per example and head.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

import torch
from torch import Tensor

from snnk_peft.components import COMPONENTS
from snnk_peft.components.base_exponential import Coordinates, KernelName, Tilted
from snnk_peft.functional.exponential import masked_mean, mean_square_of_sums, optimal_a
from snnk_peft.functional.precision import full_precision, wide
from snnk_peft.options import Option
from snnk_peft.projections.base import Projection


@COMPONENTS.register("derf")
class Derf(Tilted):
    """`gerf` in the coordinates of the data."""

    formula = "m^-½ D exp(ωᵀAω + ωᵀBx + xᵀCx)"
    source = "Likhosherstov et al. 2023; Spectraformer"
    cost = "one exponential per row, dim² per vector, eigenvectors per head"

    adapts = positive = True
    x_map: torch.Tensor
    y_map: torch.Tensor
    a: torch.Tensor

    def __init__(
        self,
        mode: Annotated[
            str, Option("which coordinates, see above.", choices=("symmetric", "asymmetric"))
        ] = "symmetric",
        kernel: KernelName = "softmax",
    ):
        super().__init__(mode=mode, kernel=kernel)
        self.mode = mode

    def prepare(self, projection: Projection) -> None:
        """Create buffers for the maps, initialised to the identity."""
        self.register_buffer("x_map", torch.eye(projection.dim))
        self.register_buffer("y_map", torch.eye(projection.dim))
        self.register_buffer("a", torch.zeros(1, projection.dim))

    def statistics(
        self, x: torch.Tensor, y: torch.Tensor, x_mask: torch.Tensor | None = None, y_mask: torch.Tensor | None = None
    ) -> dict[str, torch.Tensor]:
        """Return {"x_map", "y_map": (..., dim, dim), applied from the right, "a": (..., 1, dim)}; without gradient."""
        with torch.no_grad(), full_precision(x):
            x, y = wide(x).double(), wide(y).double()
            x_moment, y_moment = second_moment(x, x_mask), second_moment(y, y_mask)
            if self.mode == "asymmetric":
                x_map, y_map = balancing_maps(x_moment, y_moment)
                square = mean_square_of_sums(x @ x_map, y @ y_map, x_mask, y_mask).sum(-1, keepdim=True)
                a = optimal_a(square, x.shape[-1]).expand(*square.shape[:-1], x.shape[-1])
            else:
                cross = masked_mean(x, x_mask).mT @ masked_mean(y, y_mask)
                eigenvalues, x_map = directed_eigenvectors(x_moment + y_moment + cross + cross.mT)
                y_map, a = x_map, optimal_a(eigenvalues.clamp_min(0), 1).unsqueeze(-2)
            return {"x_map": x_map, "y_map": y_map, "a": a}

    def coordinates(
        self, statistics: Mapping[str, torch.Tensor], second: bool, like: torch.Tensor, dim: int
    ) -> Coordinates:
        """Return a per coordinate, and the change of basis."""
        name = "y_map" if second else "x_map"
        # Without its leading 1, the stored a fits vectors of any shape.
        a = statistics.get("a", self.a.squeeze(0)).to(like)
        return Coordinates(a, basis=statistics.get(name, getattr(self, name)).to(like))


_FLOOR = 1e-3  # of the mean eigenvalue: directions without data keep a bounded stretch


def second_moment(x: Tensor, mask: Tensor | None = None) -> Tensor:
    """Compute the mean of xxᵀ over the vectors of each set (those with mask True): (..., d, d)."""
    if mask is None:
        return x.mT @ x / x.shape[-2]
    weight = mask.to(x.dtype).unsqueeze(-1)
    return (x * weight).mT @ x / weight.sum(-2, keepdim=True).clamp_min(1)


def directed_eigenvectors(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Return eigenvalues (..., d) and eigenvectors (..., d, d), signed so that the largest entry of each is positive.

    Solvers leave the sign undefined; it differs between CPU and GPU and with rounding of the matrix. Another sign makes
    another, equally good draw of the random features, so outputs would depend on the machine.
    """
    values, vectors = torch.linalg.eigh(matrix)
    largest = vectors.gather(-2, vectors.abs().argmax(-2, keepdim=True))
    return values, torch.where(largest < 0, -vectors, vectors)


def _power(matrix: Tensor, exponent: float) -> Tensor:
    values, vectors = torch.linalg.eigh(matrix)
    floor = torch.finfo(values.dtype).eps * values.amax(-1, keepdim=True).clamp_min(torch.finfo(values.dtype).tiny)
    return vectors * values.clamp_min(floor).pow(exponent).unsqueeze(-2) @ vectors.mT


def balancing_maps(x_moment: Tensor, y_moment: Tensor) -> tuple[Tensor, Tensor]:
    """Return (T, T⁻¹), symmetric (..., d, d), from the second moments of x and y; the identity if a set is all zeros.

    Among all maps x -> xT, y -> yT⁻¹, T² = P with P M₁ P = M₂ (the matrix geometric mean of M₁⁻¹ and M₂) minimises the
    sum of the mean squared lengths, tr(P M₁) + tr(P⁻¹ M₂): its derivative is M₁ − P⁻¹ M₂ P⁻¹.
    """
    identity = torch.eye(x_moment.shape[-1], dtype=x_moment.dtype, device=x_moment.device)

    def regular(moment: Tensor) -> Tensor:
        mean = moment.diagonal(dim1=-2, dim2=-1).mean(-1)[..., None, None]
        return moment + torch.where(mean > 0, _FLOOR * mean, 1.0) * identity

    x_moment, y_moment = regular(x_moment), regular(y_moment)
    root, inverse_root = _power(x_moment, 0.5), _power(x_moment, -0.5)
    square = inverse_root @ _power(root @ y_moment @ root, 0.5) @ inverse_root
    return _power(square, 0.5), _power(square, -0.5)
