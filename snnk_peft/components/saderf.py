"""Simplified asymmetric dense exponential features (Spectraformer's SADERF): `gerf` on Ψx and Ψ⁻¹y.

Ψ is diagonal, Ψ_ll = (Σ_j y_jl² / Σ_i x_il²)^¼ (per example and head): it balances the coordinates of both towers and
leaves x·y as it is, so the estimate stays unbiased for e^{x·y}. A is the best one for the balanced vectors, as in
`oprf`. Coordinates that are all zeros on one side keep Ψ_ll = 1. Without statistics: Ψ = I, A = 0, which is `posrf`.
Over quadratures and rows of one length A = 0 (base_exponential.py), while Ψ stays.

With kernel="gaussian", e^{−‖x−y‖²/2}, the factors e^{−‖x‖²/2} are those of the original vectors. Cost: `oprf` and one
multiplication per coordinate.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

import torch

from snnk_peft.components import COMPONENTS
from snnk_peft.components.base_exponential import Coordinates, KernelName, Tilted
from snnk_peft.functional.exponential import masked_mean, mean_square_of_sums, optimal_a
from snnk_peft.functional.precision import wide
from snnk_peft.options import Option
from snnk_peft.projections.base import Projection


@COMPONENTS.register("saderf")
class Saderf(Tilted):
    """`gerf` on diagonally balanced vectors."""

    formula = "oprf on Ψx and Ψ⁻¹y, Ψ diagonal"
    source = "Likhosherstov et al. 2023; Spectraformer"
    cost = "one exponential per row, means over the tokens"

    adapts = positive = True
    mean_square: torch.Tensor
    balance: torch.Tensor

    def __init__(
        self,
        kernel: KernelName = "softmax",
        A: Annotated[float | None, Option("a fixed one, or None for the best one.", below=0.125)] = None,
    ):
        super().__init__(A=A, kernel=kernel)
        self.A = A
        self.register_buffer("mean_square", torch.zeros(()))

    def prepare(self, projection: Projection) -> None:
        """Create a buffer for Ψ, initialised to the identity."""
        self.register_buffer("balance", torch.ones(projection.dim))

    def statistics(
        self, x: torch.Tensor, y: torch.Tensor, x_mask: torch.Tensor | None = None, y_mask: torch.Tensor | None = None
    ) -> dict[str, torch.Tensor]:
        """Return {"balance": Ψ (..., 1, dim), "mean_square": S after balancing (..., 1, 1)}; without gradient."""
        with torch.no_grad():
            x, y = wide(x), wide(y)
            x_square, y_square = masked_mean(x.square(), x_mask), masked_mean(y.square(), y_mask)
            usable = (x_square > 0) & (y_square > 0)
            ratio = torch.where(usable, y_square, 1.0) / torch.where(usable, x_square, 1.0)
            balance = ratio.pow(0.25)
            square = mean_square_of_sums(x * balance, y / balance, x_mask, y_mask)
            return {"balance": balance, "mean_square": square.sum(-1, keepdim=True)}

    def coordinates(
        self, statistics: Mapping[str, torch.Tensor], second: bool, like: torch.Tensor, dim: int
    ) -> Coordinates:
        """Return A for the balanced vectors, and Ψ or its inverse."""
        balance = statistics.get("balance", self.balance).to(like)
        stretch = 1 / balance if second else balance
        if self.A is not None:
            return Coordinates(self.A, stretch)
        return Coordinates(optimal_a(statistics.get("mean_square", self.mean_square).to(like), dim), stretch)
