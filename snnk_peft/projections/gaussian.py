"""Independent Gaussian rows: ω_i ~ N(0, I). The base case of random features (Rahimi & Recht 2007).

Cost: num_features · dim MACs per input vector.
"""

from __future__ import annotations

import torch

from snnk_peft.functional.random_numbers import normal_numbers
from snnk_peft.projections import PROJECTIONS
from snnk_peft.projections.base import Projection


@PROJECTIONS.register("gaussian")
class Gaussian(Projection):
    """W with independent standard normal entries. Arguments as in `Projection`."""

    formula = "ω ~ N(0, I), independent"
    source = "Rahimi & Recht 2007; Spectraformer 'Base'"
    cost = "m·d"

    def draw(self, generator: torch.Generator) -> torch.Tensor:
        return normal_numbers(self.num_features, self.dim, generator=generator)
