"""No matrix at all: W = I, so features are a function of the coordinates themselves.

The linear attention of Katharopoulos et al. (2020) and the lecture is `elu` over this: φ(x) = elu(x) + 1, up to the
factor m^-½ that cancels in attention. Rows are not a sample of anything, so no kernel is estimated; components whose
features are an average over random rows (posrf and its kin) do not fit. num_features is dim.

Cost: none.
"""

from __future__ import annotations

from typing import Any

import torch

from snnk_peft.projections import PROJECTIONS
from snnk_peft.projections.base import Projection


@PROJECTIONS.register("identity")
class Identity(Projection):
    """W = I. Arguments as in `Projection`; num_features must be dim.

    Attributes:
        ones: the diagonal of W, (dim,); nothing else of it is kept.
    """

    formula = "W = I"
    source = "Katharopoulos et al. 2020"
    cost = "0"

    distribution = "none"
    unbiased = False
    seeded = False
    resamplable = False

    ones: torch.Tensor

    @classmethod
    def nearest_size(cls, dim: int, num_features: int, **params: Any) -> int:
        return dim

    def settle(self) -> list[str]:
        found = super().settle()
        if self.num_features != self.dim:
            found.append(f"identity num_features is {self.num_features} with dim {self.dim}; expected {self.dim}")
        return found

    def draw_buffers(self, generator: torch.Generator) -> dict[str, torch.Tensor]:
        return {"ones": torch.ones(self.dim, device="cpu")}

    def blank(self) -> dict[str, torch.Tensor]:
        return {"ones": torch.empty(self.dim, dtype=torch.float32)}

    def materialize(self) -> torch.Tensor:
        """Return I, (dim, dim), created on each call."""
        return torch.diag(self.ones)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x
