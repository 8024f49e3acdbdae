"""Independent Poisson entries: P(ω_il = k) = e^{−λ} λᵏ / k!, for Poisson random features (Likhosherstov et al. 2022).

The component divides by the same λ, so any rate gives an unbiased kernel; it decides the variance. Rows are independent
draws from the stated distribution.

Cost: as gaussian.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from snnk_peft.projections import PROJECTIONS
from snnk_peft.projections.base import Projection


@PROJECTIONS.register("poisson")
class Poisson(Projection):
    """W with independent Poisson entries.

    Args:
        rate: λ > 0, mean and variance of the entries; best is the typical |x_l y_l| of a coordinate. None (default) is
            1/dim, right for vectors of length 1; every coordinate multiplies the second moment by e^λ.
        **kwargs: as in `Projection`.
    """

    formula = "ω_il ~ Poisson(λ), independent"
    source = "Likhosherstov et al. 2022"
    cost = "m·d"

    distribution = "poisson"

    def __init__(self, dim: int, num_features: int, *, rate: float | None = None, **kwargs: Any):
        if rate is None:
            rate = 1 / dim if isinstance(dim, int) and dim > 0 else 1.0
        self.rate, self.params = rate, {"rate": rate}
        super().__init__(dim, num_features, **kwargs)

    def argument_faults(self) -> list[str]:
        """Whether the rate is one."""
        rate = self.rate
        valid = isinstance(rate, (int, float)) and not isinstance(rate, bool) and 0 < rate < math.inf
        return super().argument_faults() + ([] if valid else [f"poisson rate is {rate!r}; expected a number > 0"])

    def draw(self, generator: torch.Generator) -> torch.Tensor:
        """(num_features, dim) of whole numbers >= 0."""
        rates = torch.full((self.num_features, self.dim), float(self.rate), dtype=torch.float64, device="cpu")
        return torch.poisson(rates, generator=generator)
