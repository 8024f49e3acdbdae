"""Independent geometric entries: P(ω_il = k) = p (1 − p)ᵏ, k = 0, 1, 2, ..., the number of failures before the first
success, for geometric random features (Likhosherstov et al. 2022).

The component divides by the same p, so any p gives an unbiased kernel; it sets the variance. Rows are independent
draws from the stated distribution.

Cost: as gaussian.
"""

from __future__ import annotations

import math
from typing import Annotated, Any

import torch

from snnk_peft.functional.random_numbers import uniform_numbers
from snnk_peft.options import Option
from snnk_peft.projections import PROJECTIONS
from snnk_peft.projections.base import Projection


@PROJECTIONS.register("geometric")
class Geometric(Projection):
    """W with independent geometric entries."""

    formula = "ω_il ~ Geometric(p), independent"
    source = "Likhosherstov et al. 2022"
    cost = "m·d"

    distribution = "geometric"

    def __init__(
        self,
        dim: int,
        num_features: int,
        *,
        p: Annotated[
            float | None,
            Option(
                "probability of success; the mean of the entries is (1 − p)/p. Small p has heavy tails and suits "
                "vectors with large coordinates. None is 1 − 1/dim (½ for one dimension), which suits vectors of "
                "length about 1: every coordinate multiplies the second moment by 1/p, a fixed p is hopeless in many.",
                above=0,
                below=1,
            ),
        ] = None,
        **kwargs: Any,
    ):
        if p is None:
            p = 1 - 1 / dim if isinstance(dim, int) and dim > 1 else 0.5
        self.p, self.params = p, {"p": p}
        super().__init__(dim, num_features, **kwargs)

    def draw(self, generator: torch.Generator) -> torch.Tensor:
        uniform = uniform_numbers(self.num_features, self.dim, generator=generator)
        # P(log(1 − u) / log(1 − p) >= k) = P(1 − u <= (1 − p)ᵏ) = (1 − p)ᵏ
        return torch.floor(torch.log1p(-uniform) / math.log1p(-self.p))
