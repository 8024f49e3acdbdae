"""Signed circulant rows (Feng et al. 2015, "SCRF"; Spectraformer Eqs. 18, 19): a block is diag(σ) C, C circulant.

The first column of C has independent N(0, 1) entries, C_ij = c[(i − j) mod dim], and σ holds random signs. Every row is
a reordering of c, so each alone is exactly N(0, I): estimates are unbiased. The signs make rows uncorrelated, but not
independent: |ω_i·x| repeats for all i if x is constant, and even functions do not see the signs at all. (The paper's
code returns zeros.)

Cost per vector: O(m log dim) by the fast Fourier transform, m · dim as a dense product. Storage 2 values per row.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from snnk_peft.functional.circulant import FOURIER_FAST_FROM, circulant_matrix, circulant_product
from snnk_peft.functional.random_numbers import normal_numbers, random_signs
from snnk_peft.projections import PROJECTIONS
from snnk_peft.projections.base_structured import Structured


@PROJECTIONS.register("scrf")
class Scrf(Structured):
    """Circulant Gaussian blocks with signed rows. Arguments as in `Structured`."""

    formula = "circulant rows of a Gaussian vector, times random signs"
    source = "Feng et al. 2015; Spectraformer"
    cost = "m log d (fast), m·d"

    fast_from = FOURIER_FAST_FROM

    def draw_factors(self, generator: torch.Generator) -> dict[str, torch.Tensor]:
        """Draw first columns and row signs, both (blocks, dim)."""
        blocks = -(-self.num_features // self.dim)
        column = normal_numbers(blocks, self.dim, generator=generator).float()
        return {"column": column, "signs": random_signs(blocks, self.dim, generator=generator)}

    def project(self, x: torch.Tensor, factors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Convolve with each column, apply signs, truncate to num_features."""
        z = circulant_product(x, factors["column"]) * factors["signs"]
        return z.flatten(-2)[..., : self.num_features]

    def dense(self, factors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Compute W by indexing, which is exact, while transforms would round."""
        rows = circulant_matrix(factors["column"]) * factors["signs"].unsqueeze(-1)
        return rows.flatten(0, 1)[: self.num_features].contiguous()
