"""Random orthogonal embeddings ("ROM"): W = √n · ∏_{i=1..t} H D_i, any number t of factors; t = 3 is SORF (Choromanski
et al. 2017; Spectraformer Eq. 23). With complex entries in the first, the S-hybrid, W = √n · H D^(U) ∏_{i=2..t} H D_i
(Eq. 24).

H is the normalised Walsh-Hadamard matrix of order n, the power of two at or above dim (zero padding, first dim
columns), D_i holds random signs, D^(U) independent uniform numbers on the complex unit circle.

The S-hybrid is meant for Re(conj φ(x) · φ(y)) with complex features φ(x) = Wx. Here everything is real: with h complex
rows z_k, W has m = 2h rows, first √2 Re z_k, then √2 Im z_k. Since Re(conj a · b) = Re a Re b + Im a Im b,

    1/m Σ_{i≤m} (w_i·x)(w_i·y)  =  1/h Σ_{k≤h} Re(conj(z_k·x) · (z_k·y)),

so linear features give exactly the paper's estimator, and the 2h rows have entries of variance 1 for all others. One
random real direction and its complex partner share a rotation, which is where the lower variance comes from.

Not unbiased: rows are only nearly Gaussian, the less so the fewer factors (t = 1 with signs: entries ±1).

Cost per vector: O(t · m log n) by the transform, m · dim as a dense product.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any

import torch

from snnk_peft.functional.hadamard import HADAMARD_FAST_FROM, hadamard_rotation, next_power_of_two, walsh_hadamard
from snnk_peft.functional.random_numbers import random_signs, uniform_numbers
from snnk_peft.options import Option
from snnk_peft.projections import PROJECTIONS
from snnk_peft.projections.base_structured import Structured


@PROJECTIONS.register("rom")
class Rom(Structured):
    """Products of Hadamard matrices and random diagonals."""

    formula = "√n Π_i (H D_i), real or with complex units in the last"
    source = "Choromanski et al. 2017; Spectraformer"
    cost = "m log d (fast), m·d"

    unbiased = False
    sampled_lengths = False
    fast_from = HADAMARD_FAST_FROM

    def __init__(
        self,
        dim: int,
        num_features: int,
        *,
        factors: Annotated[
            int,
            Option(
                "number t of factors H D. More make the rows more nearly Gaussian and cost one transform each; there "
                "is little to gain beyond 3.",
                low=1,
                high=64,
            ),
        ] = 3,
        complex_unit: Annotated[
            bool,
            Option(
                "give the factor that acts last complex entries of modulus 1 instead of signs. num_features must then "
                "be even."
            ),
        ] = False,
        **kwargs: Any,
    ):
        self.num_factors, self.complex_unit = factors, complex_unit
        self.params = {"factors": factors, "complex_unit": complex_unit}
        super().__init__(dim, num_features, **kwargs)

    @classmethod
    def nearest_size(cls, dim: int, num_features: int, **params: Any) -> int:
        """Return the number itself; with complex entries, the next even one."""
        return num_features + num_features % 2 if params.get("complex_unit") else num_features

    def settle(self) -> list[str]:
        """Require an even number, since complex rows are pairs of real ones."""
        found = super().settle()
        if self.complex_unit and self.num_features % 2:
            found.append(
                f"rom num_features is {self.num_features} with complex_unit=True; expected an even number, for real "
                f"and imaginary parts, e.g. {self.num_features + 1}"
            )
        return found

    def draw_factors(self, generator: torch.Generator) -> dict[str, torch.Tensor]:
        """Draw signs in order of action (t, blocks, n); with `complex_unit`, one fewer, and (2, blocks, n)."""
        n = next_power_of_two(self.dim)
        rows = self.num_features // (2 if self.complex_unit else 1)
        blocks = -(-rows // n)
        signs = random_signs(self.num_factors - self.complex_unit, blocks, n, generator=generator)
        if not self.complex_unit:
            return {"signs": signs}
        angle = uniform_numbers(blocks, n, generator=generator) * (2 * math.pi)
        return {"signs": signs, "circle": torch.stack((angle.cos(), angle.sin())).float()}

    def project(self, x: torch.Tensor, factors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Pad, apply the factors to all blocks, truncate to num_features."""
        signs = factors["signs"]
        n = signs.shape[-1]
        padded = torch.nn.functional.pad(x, (0, n - self.dim))
        if not self.complex_unit:
            return hadamard_rotation(padded, signs, scale=n**0.5).flatten(-2)[..., : self.num_features]
        rotated = hadamard_rotation(padded, signs)
        # √n · n^-½ of the last factor is 1; √2 as explained above.
        parts = [walsh_hadamard(rotated * (2**0.5 * part)) for part in factors["circle"].unbind()]
        return torch.cat([part.flatten(-2)[..., : self.num_features // 2] for part in parts], -1)
