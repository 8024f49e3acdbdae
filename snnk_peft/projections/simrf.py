"""Simplex random features (Reid et al. 2023; Spectraformer Eqs. 25, 26, 27): a block of dim rows is D S R.

The rows of S are the dim unit vectors to the corners of a regular simplex, which lies in dim − 1 dimensions; R is a
Haar orthogonal matrix, D holds independent χ_dim lengths. Any two rows of a block meet at an angle a little over 90°,
as far apart as possible, from which positive features (posrf) benefit.

With weight-dependent coupling ("SimRF+") the directions depend on the lengths: one pass over the rows points each
against the sum of all others, ω_i <- −‖ω_i‖ Σ_{j≠i} ω_j / ‖Σ_{j≠i} ω_j‖, before the rotation. The block then sums
to almost 0.

In both cases R is independent of everything else, so each row alone is exactly N(0, I) and estimates are unbiased.
num_features > dim stacks independent blocks and truncates the last.

Cost: as gaussian; drawing takes one QR factorisation per block, in fp64.
"""

from __future__ import annotations

from typing import Annotated, Any

import torch

from snnk_peft.functional.random_numbers import gaussian_lengths, haar, simplex
from snnk_peft.options import Option
from snnk_peft.projections import PROJECTIONS
from snnk_peft.projections.base import Projection


@PROJECTIONS.register("simrf")
class Simrf(Projection):
    """Rows at the corners of randomly rotated simplices."""

    formula = "χ_d lengths times the directions of rotated simplices"
    source = "Reid et al. 2023; Spectraformer Eq. 26"
    cost = "m·d"

    def __init__(
        self,
        dim: int,
        num_features: int,
        *,
        coupling: Annotated[
            str,
            Option(
                '"independent" draws lengths independently of directions. "weight_dependent" chooses the directions '
                "given the lengths: lower variance still for positive features, a slower draw.",
                choices=("independent", "weight_dependent"),
            ),
        ] = "independent",
        **kwargs: Any,
    ):
        self.coupling, self.params = coupling, {"coupling": coupling}
        super().__init__(dim, num_features, **kwargs)

    def draw(self, generator: torch.Generator) -> torch.Tensor:
        count = -(-self.num_features // self.dim)
        return torch.cat([self._block(generator) for _ in range(count)])[: self.num_features]

    def _block(self, generator: torch.Generator) -> torch.Tensor:
        """Draw one block (dim, dim): lengths times directions times a rotation."""
        lengths = gaussian_lengths(self.dim, self.dim, generator)
        # In one dimension a simplex is a single point, and the rotation a sign.
        corners = torch.ones(1, 1, dtype=torch.float64, device="cpu")
        if self.dim > 1:
            corners = torch.nn.functional.pad(simplex(self.dim), (0, 1))
        rows = corners * lengths[:, None]
        if self.coupling == "weight_dependent" and self.dim > 1:
            total = rows.sum(0)
            for row, length in zip(rows, lengths, strict=True):
                others = total - row
                row.copy_(others * (-length / others.norm()))
                total = others + row
        return rows @ haar(self.dim, generator)
