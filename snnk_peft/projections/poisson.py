"""Independent Poisson entries: P(ω_il = k) = e^{−λ} λᵏ / k!, for Poisson random features (Likhosherstov et al. 2022).

The component divides by the same λ, so any rate gives an unbiased kernel; it sets the variance. Rows are independent
draws from the stated distribution.

Cost: as gaussian.
"""

from __future__ import annotations

from typing import Annotated, Any

import torch

from snnk_peft.functional.random_numbers import uniform_numbers
from snnk_peft.options import Option
from snnk_peft.projections import PROJECTIONS
from snnk_peft.projections.base import Projection

MAX_POISSON_RATE = 1e6


@PROJECTIONS.register("poisson")
class Poisson(Projection):
    """W with independent Poisson entries."""

    formula = "ω_il ~ Poisson(λ), independent"
    source = "Likhosherstov et al. 2022"
    cost = "m·d"

    distribution = "poisson"

    def __init__(
        self,
        dim: int,
        num_features: int,
        *,
        rate: Annotated[
            float | None,
            Option(
                "λ, mean and variance of the entries; best is the typical |x_l y_l| of a coordinate. None is 1/dim, "
                "right for vectors of length 1; every coordinate multiplies the second moment by e^λ.",
                above=0,
                high=MAX_POISSON_RATE,
            ),
        ] = None,
        **kwargs: Any,
    ):
        if rate is None:
            rate = 1 / dim if isinstance(dim, int) and dim > 0 else 1.0
        self.rate, self.params = rate, {"rate": rate}
        super().__init__(dim, num_features, **kwargs)

    def draw(self, generator: torch.Generator) -> torch.Tensor:
        least, upper = poisson_table(self.rate)
        uniform = uniform_numbers(self.num_features, self.dim, generator=generator)
        return least + torch.searchsorted(upper, uniform, right=True).clamp_max(len(upper) - 1).double()


def poisson_table(rate: float) -> tuple[int, torch.Tensor]:
    """Return the least number that matters and P(ω <= k) from it on, until the rest is below rounding."""
    mode, masses = int(rate), [1.0]  # relative to the mode's: e^{−λ} would be 0 for a large λ
    while masses[-1] > 1e-20:
        masses.append(masses[-1] * rate / (mode + len(masses)))
    below = [1.0]
    while below[-1] > 1e-20 and len(below) <= mode:
        below.append(below[-1] * (mode + 1 - len(below)) / rate)
    table = torch.tensor(below[:0:-1] + masses, dtype=torch.float64, device="cpu").cumsum(0)
    return mode + 1 - len(below), table / table[-1]
