"""Softmax features with both signs (Hedgehog, Zhang et al. 2024): φ(x) = softmax([Wx + b, −(Wx + b)]).

2m positive features that sum to 1: bounded for any x, and as peaked as W makes them. They estimate no kernel: W and b
are meant to be learned, so that Σ_j φ(q)·ψ(k_j) follows the softmax weights of a layer, with separate maps for queries
and keys. Over a learned `free` matrix with bias this is the map of attention transfer; over a fixed matrix it is merely
a positive map like `elu`.

Cost: the projection and two exponentials per row.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from snnk_peft.components import COMPONENTS
from snnk_peft.components.base import Component, Features
from snnk_peft.functional.precision import full_precision, wide
from snnk_peft.projections.base import Projection


@COMPONENTS.register("softmax_pm")
class SoftmaxPm(Component):
    """Softmax over the projections and their negatives. Unequal weights of the rows are ignored."""

    formula = "softmax([Wx + b, −(Wx + b)])"
    kernel_formula = "none; W is to be learned"
    source = "Hedgehog (Zhang et al. 2024)"
    cost = "two exponentials per row"

    positive = True

    @classmethod
    def fits(cls, projection: Projection | type[Projection]) -> bool:
        """Accept rows from any distribution."""
        return projection.distribution in ("gaussian", "none")

    def feature_dim(self, num_features: int, dim: int) -> int:
        return 2 * num_features

    def tower(
        self, x: torch.Tensor, projection: Projection, statistics: Mapping[str, torch.Tensor], second: bool
    ) -> Features:
        """Compute the features, equal for both towers; arguments as in `Component.tower`."""
        with full_precision(x):
            z = projection(wide(x))
            return Features(torch.cat((z, -z), -1).softmax(-1).to(x.dtype))
