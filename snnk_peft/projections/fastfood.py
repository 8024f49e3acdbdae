"""Fastfood: V = n^-½ · S H G Π H B per block (Le et al. 2013; Spectraformer Eq. 17; KL-Transformer Eq. 6; here σ = 1).

H is the unnormalised Walsh-Hadamard matrix of order n, the power of two at or above dim (zero padding, first dim
columns), B random signs, Π a random permutation, G standard normal numbers, S_ii = s_i/‖G‖_F with s_i from χ_n.
(Spectraformer's Eq. 17 prints S_ii = s_i ‖G‖_F^-½ and drops n^-½: with these, rows have the wrong length.)

Row i before S is a sum of the n orthogonal rows of Π H B, all of length √n, with coefficients ±G_kk. So for any B and Π
its direction is uniform on the sphere and independent of ‖G‖, its length is √n ‖G‖, and S replaces that by s_i: each
row alone is exactly N(0, I), also in its first dim coordinates, and estimates are unbiased. But the rows of a block
share the n numbers G, which for many functions increases the variance compared with independent rows.

Cost per vector: O(m log n) by the transform, m · dim as a dense product.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from snnk_peft.functional.hadamard import HADAMARD_FAST_FROM, fastfood_product, next_power_of_two
from snnk_peft.functional.random_numbers import gaussian_lengths, normal_numbers, random_permutation, random_signs
from snnk_peft.projections import PROJECTIONS
from snnk_peft.projections.base_structured import Structured


@PROJECTIONS.register("fastfood")
class Fastfood(Structured):
    """Gaussian rows from two Hadamard transforms and three diagonals. Arguments as in `Structured`."""

    formula = "d^-½ S H G Π H B"
    source = "Le et al. 2013; Spectraformer Eq. 17"
    cost = "m log d (fast), m·d"

    fast_from = HADAMARD_FAST_FROM

    def draw_factors(self, generator: torch.Generator) -> dict[str, torch.Tensor]:
        """Draw B, Π, G and S of all blocks; see `fastfood_product` for their shapes."""
        n = next_power_of_two(self.dim)
        blocks = -(-self.num_features // n)
        signs = random_signs(blocks, n, generator=generator)
        shuffles = [random_permutation(n, generator) + n * block for block in range(blocks)]
        gaussian = normal_numbers(blocks, n, generator=generator).float()
        lengths = gaussian_lengths(blocks * n, n, generator).reshape(blocks, n)
        scaling = (lengths / gaussian.double().norm(dim=1, keepdim=True)).to(torch.float32)
        return {"signs": signs, "permutation": torch.cat(shuffles), "gaussian": gaussian, "scaling": scaling}

    def project(self, x: torch.Tensor, factors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Pad, apply the factors to all blocks, truncate to num_features."""
        padded = torch.nn.functional.pad(x, (0, factors["signs"].shape[-1] - self.dim))
        return fastfood_product(padded, **factors).flatten(-2)[..., : self.num_features]
