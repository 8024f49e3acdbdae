"""P-model rows: ω_i = gᵀP_i, one Gaussian vector g recycled by fixed matrices P_i (Choromanski & Sindhwani 2016;
Spectraformer Eq. 20). Three cases: circulant W_ij = g[(i − j) mod dim], Toeplitz W_ij = g[i − j + dim − 1] and Hankel
W_ij = g[i + j].

In each case P_i picks every coordinate of ω_i from another place in g, so each row alone is exactly N(0, I) and
estimates are unbiased. Rows of a block share entries: a circulant block has dim of them, the other two 2·dim − 1, which
makes their rows less dependent. num_features > dim stacks independent blocks.

Cost per vector: O(m log dim) by the fast Fourier transform (of twice the length for Toeplitz and Hankel), m · dim as a
dense product. Storage: 1 or 2 values per row.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import torch

from snnk_peft.functional.circulant import (
    FOURIER_FAST_FROM,
    circulant_matrix,
    circulant_product,
    hankel_matrix,
    hankel_product,
    toeplitz_matrix,
    toeplitz_product,
)
from snnk_peft.functional.random_numbers import normal_numbers
from snnk_peft.options import Option
from snnk_peft.projections import PROJECTIONS
from snnk_peft.projections.base_structured import Structured

# structure -> values per block (as a function of dim), product, dense form
PMODEL_STRUCTURES = {
    "circulant": (lambda dim: dim, circulant_product, circulant_matrix),
    "toeplitz": (lambda dim: 2 * dim - 1, toeplitz_product, toeplitz_matrix),
    "hankel": (lambda dim: 2 * dim - 1, hankel_product, hankel_matrix),
}


@PROJECTIONS.register("pmodel")
class Pmodel(Structured):
    """Gaussian blocks of constant diagonals."""

    formula = "circulant, Toeplitz or Hankel matrices of Gaussian numbers"
    source = "Choromanski & Sindhwani 2016; Spectraformer"
    cost = "m log d (fast), m·d"

    fast_from = FOURIER_FAST_FROM

    def __init__(
        self,
        dim: int,
        num_features: int,
        *,
        structure: Annotated[
            str, Option('"circulant" is smallest and quickest.', choices=tuple(PMODEL_STRUCTURES))
        ] = "circulant",
        **kwargs: Any,
    ):
        self.structure, self.params = structure, {"structure": structure}
        super().__init__(dim, num_features, **kwargs)

    def draw_factors(self, generator: torch.Generator) -> dict[str, torch.Tensor]:
        """Draw the Gaussian numbers g of each block, (blocks, dim) or (blocks, 2·dim − 1)."""
        shape = -(-self.num_features // self.dim), PMODEL_STRUCTURES[self.structure][0](self.dim)
        return {"gaussian": normal_numbers(*shape, generator=generator).float()}

    def project(self, x: torch.Tensor, factors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Convolve with each block's values, truncated to num_features."""
        product = PMODEL_STRUCTURES[self.structure][1]
        return product(x, factors["gaussian"]).flatten(-2)[..., : self.num_features]

    def dense(self, factors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Compute W by indexing, which is exact, while transforms would round."""
        blocks = PMODEL_STRUCTURES[self.structure][2](factors["gaussian"])
        return blocks.flatten(0, 1)[: self.num_features].contiguous()
