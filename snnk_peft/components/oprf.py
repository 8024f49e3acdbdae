"""Optimal positive random features (Spectraformer's OPRF, Eq. 35): `gerf` with the A of least variance.

A depends on S, the mean of ‖x + y‖² over all pairs of a query and a key **of one example and head**: an average over
the batch would make an example's output depend on its batch-mates, and an A that differs between the towers would bias
the estimate. For any A the estimate is unbiased; A = 0 is `posrf`: for S = 0, before `calibrate`, and over quadratures
and rows of one length (base_exponential.py).

Exact kernel: e^{x·y} or, with kernel="gaussian", e^{−‖x−y‖²/2}. Cost: `posrf` and the means.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from snnk_peft.components import COMPONENTS
from snnk_peft.components.base import Features
from snnk_peft.components.base_exponential import Exponential, exponential_logarithms
from snnk_peft.functional.exponential import (
    log_factor,
    mean_square_of_sums,
    optimal_a,
    stabilised,
)
from snnk_peft.functional.log_linear import LogLinear
from snnk_peft.functional.precision import full_precision, wide
from snnk_peft.projections.base import Projection


@COMPONENTS.register("oprf")
class Oprf(Exponential):
    """gerf with A from the data.

    Args:
        kernel: "softmax" (default) or "gaussian".
    """

    formula = "gerf with the A of least variance for the data"
    source = "Likhosherstov et al. 2022; Spectraformer Eq. 35"
    cost = "one exponential per row, means over the tokens"

    adapts = positive = tilted = True
    mean_square: torch.Tensor

    def __init__(self, kernel: str = "softmax"):
        super().__init__(kernel)
        self.register_buffer("mean_square", torch.zeros(()))

    def statistics(
        self, x: torch.Tensor, y: torch.Tensor, x_mask: torch.Tensor | None = None, y_mask: torch.Tensor | None = None
    ) -> dict[str, torch.Tensor]:
        """{"mean_square": S (..., 1, 1)}; no gradient flows through it, since the estimate is unbiased for any A."""
        with torch.no_grad():
            return {"mean_square": mean_square_of_sums(x, y, x_mask, y_mask).sum(-1, keepdim=True)}

    def calibrate(self, statistics: Mapping[str, torch.Tensor]) -> None:
        """Keep the mean of S over all leading dimensions."""
        self.mean_square = statistics["mean_square"].mean().to(self.mean_square)

    def tower(
        self, x: torch.Tensor, projection: Projection, statistics: Mapping[str, torch.Tensor], second: bool
    ) -> Features:
        """See `Component.tower`."""
        with full_precision(x):
            a = optimal_a(statistics.get("mean_square", self.mean_square).to(wide(x)), x.shape[-1])
            a = self.tilt(a, projection)
            exponents = projection(wide(x) * (1 - 4 * a).sqrt())
            exponents += a * projection.squared_row_norms().to(exponents.dtype)
            factor = log_factor(x, self.kernel_name, a)
            return Features(*stabilised(exponents, factor, projection.amplitudes(signed=second), x.dtype))

    def log_linear(
        self, projection: Projection, statistics: Mapping[str, torch.Tensor], second: bool, like: torch.Tensor
    ) -> LogLinear:
        """See `Component.log_linear`."""
        a = optimal_a(statistics.get("mean_square", self.mean_square).to(like), projection.dim)
        return exponential_logarithms(projection, self.kernel_name, second, like, a=a)
