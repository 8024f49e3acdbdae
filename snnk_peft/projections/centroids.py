"""Rows and biases computed by `calibrate` from queries and keys of an attention layer (solvers/centroids.py).

Rows of queries and of keys differ, and every head has its own: a part over this projection always has such maps. Until
they are fitted, the rows are a meaningless Gaussian draw; afterwards they can be learned.

Cost: as gaussian; num_features · (dim + 1) parameters.
"""

from __future__ import annotations

import torch

from snnk_peft.projections import PROJECTIONS
from snnk_peft.projections.base_learned import Learned


@PROJECTIONS.register("centroids")
class Centroids(Learned):
    """W and c as parameters. Arguments as in `Projection`."""

    formula = "fitted to a layer's queries and keys, with biases"
    source = "this package (conversion of attention)"
    cost = "m·d"

    distribution = "none"
    resamplable = False
    of_attention = True

    def draw_buffers(self, generator: torch.Generator) -> dict[str, torch.Tensor]:
        """Return no buffers: the initial random values are replaced."""
        return {}

    def initial(self, generator: torch.Generator) -> dict[str, torch.Tensor]:
        """Return W, and a bias of zeros."""
        return {"weight": self.draw(generator), "bias": torch.zeros(self.num_features, device="cpu")}

    def rows(self) -> torch.Tensor:
        return self.weight
