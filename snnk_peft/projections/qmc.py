"""Quasi-Monte Carlo rows: ω_i = Φ⁻¹(t_i), t_i low-discrepancy points in the unit cube (Yang et al. 2014; Spectraformer
Eq. 28): num_features points in dim dimensions. (The paper's code has this transposed: dim points in m dimensions.)

Points that fill the cube evenly leave a smaller error than independent ones, most of all in few dimensions and for many
features; a power of two suits "sobol". Scrambled points are each exactly uniform (to 2⁻³⁰ for Sobol), so each row alone
is N(0, I) and estimates are unbiased. Unscrambled, the matrix is the same for every seed and site, has an error that no
averaging removes, and in many dimensions its coordinates are strongly correlated until num_features is far above dim.

Cost: as gaussian.
"""

from __future__ import annotations

from typing import Annotated, Any

import torch

from snnk_peft.functional.low_discrepancy import MAX_SOBOL_DIM, normal_points
from snnk_peft.options import Option
from snnk_peft.projections import PROJECTIONS
from snnk_peft.projections.base import Projection


@PROJECTIONS.register("qmc")
class Qmc(Projection):
    """Normal quantiles of a low-discrepancy sequence."""

    formula = "normal quantiles of Sobol or Halton points"
    source = "Yang et al. 2014; Spectraformer"
    cost = "m·d"

    def __init__(
        self,
        dim: int,
        num_features: int,
        *,
        sequence: Annotated[
            str, Option('"sobol" has at most 21201 dimensions.', choices=("sobol", "halton"))
        ] = "sobol",
        scramble: Annotated[bool, Option("randomise the sequence by the seed; see above.")] = True,
        **kwargs: Any,
    ):
        self.sequence, self.scramble = sequence, scramble
        self.params = {"sequence": sequence, "scramble": scramble}
        self.unbiased = self.seeded = bool(scramble)
        super().__init__(dim, num_features, **kwargs)

    def settle(self) -> list[str]:
        """Check the dimension, up to which Sobol's sequence is tabulated."""
        found = super().settle()
        if self.sequence == "sobol" and self.dim > MAX_SOBOL_DIM:
            found.append(f"qmc dim is {self.dim}; sequence 'sobol' has {MAX_SOBOL_DIM} at most, use 'halton'")
        return found

    def draw(self, generator: torch.Generator) -> torch.Tensor:
        return normal_points(self.sequence, self.num_features, self.dim, generator if self.scramble else None)
