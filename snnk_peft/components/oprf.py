"""Optimal positive random features (Spectraformer's OPRF, Eq. 35): `gerf` with the A that minimises the variance.

A depends on S, the mean of ‖x + y‖² over all pairs of a query and a key **of one example and head**: an average over
the batch would make an example's output depend on the rest of the batch, and an A that differs between towers would
bias the estimate. For any A the estimate is unbiased; A = 0 is `posrf`: for S = 0, without statistics, and over
quadratures and rows of one length (base_exponential.py).

Exact kernel: e^{x·y} or, with kernel="gaussian", e^{−‖x−y‖²/2}. Cost: `posrf` and the means.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from snnk_peft.components import COMPONENTS
from snnk_peft.components.base_exponential import Coordinates, KernelName, Tilted
from snnk_peft.functional.exponential import mean_square_of_sums, optimal_a


@COMPONENTS.register("oprf")
class Oprf(Tilted):
    """`gerf` with A from the data."""

    formula = "gerf with the A of least variance for the data"
    source = "Likhosherstov et al. 2022; Spectraformer Eq. 35"
    cost = "one exponential per row, means over the tokens"

    adapts = positive = True
    mean_square: torch.Tensor

    def __init__(self, kernel: KernelName = "softmax"):
        super().__init__(kernel)
        self.register_buffer("mean_square", torch.zeros(()))

    def statistics(
        self, x: torch.Tensor, y: torch.Tensor, x_mask: torch.Tensor | None = None, y_mask: torch.Tensor | None = None
    ) -> dict[str, torch.Tensor]:
        """Return {"mean_square": S (..., 1, 1)}; without gradient, since the estimate is unbiased for any A."""
        with torch.no_grad():
            return {"mean_square": mean_square_of_sums(x, y, x_mask, y_mask).sum(-1, keepdim=True)}

    def coordinates(
        self, statistics: Mapping[str, torch.Tensor], second: bool, like: torch.Tensor, dim: int
    ) -> Coordinates:
        """Return A for the mean of ‖x + y‖², and unchanged coordinates."""
        return Coordinates(optimal_a(statistics.get("mean_square", self.mean_square).to(like), dim))
