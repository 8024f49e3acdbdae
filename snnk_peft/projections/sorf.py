"""Structured orthogonal rows: W = √n · H D₁ H D₂ H D₃ (Yu et al. 2016; Spectraformer Eq. 22).

H is the normalised Walsh-Hadamard matrix of order n, the power of two at or above dim, and D_i holds random signs.
Vectors are padded with zeros to n, which keeps their inner products; W is the first dim columns. A block has n rows,
W Wᵀ = n · I where dim = n. (The paper's code leaves H unnormalised: its entries are n^{3/2} times too large.)

Not unbiased: a row has ±1-like randomness, and is close to Gaussian only for large n.

Cost per vector: O(m log n) by the transform, m · dim as a dense product.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from snnk_peft.functional.hadamard import HADAMARD_FAST_FROM, hadamard_rotation, next_power_of_two
from snnk_peft.functional.random_numbers import random_signs
from snnk_peft.projections import PROJECTIONS
from snnk_peft.projections.base_structured import Structured


@PROJECTIONS.register("sorf")
class Sorf(Structured):
    """Random rotations made of Hadamard transforms and sign flips. Arguments as in `Structured`."""

    formula = "√n H D₁ H D₂ H D₃"
    source = "Yu et al. 2016; Spectraformer Eq. 22"
    cost = "m log d (fast), m·d"

    unbiased = False
    sampled_lengths = False
    fast_from = HADAMARD_FAST_FROM

    def draw_factors(self, generator: torch.Generator) -> dict[str, torch.Tensor]:
        """Draw the signs D₃, D₂, D₁ of each block, in the order in which they act: (3, blocks, n)."""
        n = next_power_of_two(self.dim)
        return {"signs": random_signs(3, -(-self.num_features // n), n, generator=generator)}

    def project(self, x: torch.Tensor, factors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Pad, rotate once per block, truncate to num_features."""
        signs = factors["signs"]
        n = signs.shape[-1]
        padded = torch.nn.functional.pad(x, (0, n - self.dim))
        return hadamard_rotation(padded, signs, scale=n**0.5).flatten(-2)[..., : self.num_features]
