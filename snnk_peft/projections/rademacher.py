"""Independent ±1 entries (Rademacher), as random Maclaurin features need them (Kar & Karnick 2012).

E[ω ωᵀ] = I as for Gaussian rows, but higher moments differ: only components that ask for "rademacher" accept it.
Unbiased for these, since rows are independent draws from the stated distribution.

Cost: as gaussian.
"""

from __future__ import annotations

import torch

from snnk_peft.functional.random_numbers import random_signs
from snnk_peft.projections import PROJECTIONS
from snnk_peft.projections.base import Projection


@PROJECTIONS.register("rademacher")
class Rademacher(Projection):
    """W with independent random signs. Arguments as in `Projection`."""

    formula = "ω_il = ±1, independent"
    source = "Kar & Karnick 2012"
    cost = "m·d"

    distribution = "rademacher"

    def draw(self, generator: torch.Generator) -> torch.Tensor:
        return random_signs(self.num_features, self.dim, generator=generator)
