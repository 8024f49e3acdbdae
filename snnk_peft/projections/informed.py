"""Rows computed by `calibrate_adapters` from the gradients of one labelled pass (solvers/gradient_rows.py).

Fixed afterwards, as the rows of a random feature map are; for rows that are trained from there, use `free`. Until they
are computed, they are a Gaussian draw.

Cost: as gaussian.
"""

from __future__ import annotations

import torch

from snnk_peft.functional.random_numbers import normal_numbers
from snnk_peft.projections import PROJECTIONS
from snnk_peft.projections.base import Projection


@PROJECTIONS.register("informed")
class Informed(Projection):
    """W as given by `take`. Arguments as in `Projection`."""

    formula = "leading directions of the loss's gradient, whitened"
    source = "this package (adapters)"
    cost = "m·d"

    distribution = "none"
    unbiased = False
    redrawable = False
    resamplable = False
    takes_rows = True

    def draw(self, generator: torch.Generator) -> torch.Tensor:
        """Draw the initial W: (num_features, dim) standard normal numbers."""
        return normal_numbers(self.num_features, self.dim, generator=generator)

    @torch.no_grad()
    def take(self, rows: torch.Tensor) -> None:
        self.weight.copy_(rows)
