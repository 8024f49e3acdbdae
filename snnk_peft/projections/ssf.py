"""Spherical structured features (Lyu 2017; Spectraformer's "SSF"): ω_i = length · v_i, v_i spread evenly on the sphere.

The directions are m unit vectors made of dim/2 rows of the m/2 × m/2 discrete Fourier matrix, chosen to minimise the
Riesz energy (functional/fourier_sphere.py): Σ_i v_i v_iᵀ = (m/dim) I, and close pairs are avoided. Sizes: m even and
>= dim + 2. An odd dim is one coordinate of the next even dimension left out.

Lengths are χ, independent of directions. The paper takes one-dimensional quasi-Monte Carlo points for them and leaves
the directions where they are; here a Haar rotation turns all of them (`rotate`). With both, each row alone is exactly
N(0, I) and estimates are unbiased. Equal lengths √dim have less variance and a bias that vanishes as dim grows; without
the rotation the error of the point set on the sphere remains.

Cost: as gaussian; drawing searches for the Fourier rows, about a second at dim = 768.
"""

from __future__ import annotations

from typing import Annotated, Any

import torch

from snnk_peft.functional.fourier_sphere import fourier_indices, sphere_points
from snnk_peft.functional.random_directions import gaussian_lengths, haar
from snnk_peft.options import Option
from snnk_peft.projections import PROJECTIONS
from snnk_peft.projections.base import Projection


@PROJECTIONS.register("ssf")
class Ssf(Projection):
    """Even directions from the discrete Fourier matrix.

    Args:
        **kwargs: as in `Projection`.
    """

    formula = "χ_d lengths times points of low Riesz energy on the sphere"
    source = "Lyu 2017; Spectraformer"
    cost = "m·d"

    def __init__(
        self,
        dim: int,
        num_features: int,
        *,
        norms: Annotated[
            str,
            Option(
                '"chi" draws each row\'s length as a Gaussian row has it; "sqrt_dim" gives every row √dim.',
                choices=("chi", "sqrt_dim"),
            ),
        ] = "chi",
        rotate: Annotated[bool, Option("turn all directions by one random rotation.")] = True,
        **kwargs: Any,
    ):
        self.norms, self.rotate = norms, rotate
        self.params = {"norms": norms, "rotate": rotate}
        super().__init__(dim, num_features, **kwargs)
        self.unbiased = norms == "chi" and rotate
        self.sampled_lengths = norms == "chi"

    @classmethod
    def nearest_size(cls, dim: int, num_features: int, **params: Any) -> int:
        """The next even number, dim + 2 (dim + 3 if odd) or more."""
        return max(dim + dim % 2 + 2, num_features + num_features % 2)

    def settle(self) -> list[str]:
        """The construction has an even number of points, more than dimensions."""
        found, nearest = super().settle(), self.nearest_size(self.dim, self.num_features)
        if self.num_features != nearest:
            found.append(
                f"ssf num_features is {self.num_features} with dim {self.dim}; expected an even number >= "
                f"{self.nearest_size(self.dim, 1)}, e.g. {nearest}"
            )
        return found

    def draw(self, generator: torch.Generator) -> torch.Tensor:
        even, n = self.dim + self.dim % 2, self.num_features // 2
        rows = sphere_points(fourier_indices(even // 2, n, generator), n)
        if self.rotate:
            rows = rows @ haar(even, generator)
        if self.norms == "sqrt_dim":
            return rows[:, : self.dim] * even**0.5
        return rows[:, : self.dim] * gaussian_lengths(self.num_features, even, generator)[:, None]
