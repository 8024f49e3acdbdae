"""Independent geometric entries: P(ω_il = k) = p (1 − p)ᵏ, k = 0, 1, 2, ..., the number of failures before the first
success, for geometric random features (Likhosherstov et al. 2022).

The component divides by the same p, so any p gives an unbiased kernel; it decides the variance. Rows are independent
draws from the stated distribution.

Cost: as gaussian.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from snnk_peft.functional.random_numbers import uniform_numbers
from snnk_peft.projections import PROJECTIONS
from snnk_peft.projections.base import Projection


@PROJECTIONS.register("geometric")
class Geometric(Projection):
    """W with independent geometric entries.

    Args:
        p: probability of success, between 0 and 1; the mean of the entries is (1 − p)/p. Small p has heavy tails and
            suits vectors with large coordinates. None (default) is 1 − 1/dim (½ for one dimension), which suits vectors
            of length about 1: every coordinate multiplies the second moment by 1/p, so a fixed p is hopeless in many.
        **kwargs: as in `Projection`.
    """

    formula = "ω_il ~ Geometric(p), independent"
    source = "Likhosherstov et al. 2022"
    cost = "m·d"

    distribution = "geometric"

    def __init__(self, dim: int, num_features: int, *, p: float | None = None, **kwargs: Any):
        if p is None:
            p = 1 - 1 / dim if isinstance(dim, int) and dim > 1 else 0.5
        self.p, self.params = p, {"p": p}
        super().__init__(dim, num_features, **kwargs)

    def argument_faults(self) -> list[str]:
        """Whether p is a probability that leaves something to chance."""
        valid = isinstance(self.p, float) and 0 < self.p < 1
        found = [] if valid else [f"geometric p is {self.p!r}; expected a number between 0 and 1, both excluded"]
        return super().argument_faults() + found

    def draw(self, generator: torch.Generator) -> torch.Tensor:
        """(num_features, dim) of whole numbers >= 0."""
        uniform = uniform_numbers(self.num_features, self.dim, generator=generator)
        # P(log(1 − u) / log(1 − p) >= k) = P(1 − u <= (1 − p)ᵏ) = (1 − p)ᵏ
        return torch.floor(torch.log1p(-uniform) / math.log1p(-self.p))
