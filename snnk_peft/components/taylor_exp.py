"""The second-order Taylor map of the exponential (Based, Arora et al. 2024; Zhang et al. 2024), without randomness:

    φ(x) = [1, z, z⊗z/√2],  z = Wx,      φ(x)·φ(y) = 1 + z·z' + (z·z')²/2

Over `identity`, z = x, this is e^{x·y} up to third powers of x·y: off by 3 % at −½ and 1 % at ½, by 36 % at −1 and 8 %
at 1. 1 + t + t²/2 = ½ (1 + t)² + ½ is positive for every t, so attention weights are, although features are not. Over
other rows that are not a random sample, the kernel is that of Wx. (For random rows, `taylor` gives an unbiased
estimate.)

The published map has all d² products; here z⊗z keeps each once, times √2 if it appears twice: the same inner products
from 1 + m + m(m+1)/2 features, m the number of rows of W. Cost: one multiplication per feature. Based itself learns
queries and keys of length 16; at 64, one head of BERT, there are 2145 features.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from snnk_peft.components import COMPONENTS
from snnk_peft.components.base import Component, Features
from snnk_peft.functional.powers import symmetric_square, symmetric_square_size
from snnk_peft.functional.precision import full_precision, wide
from snnk_peft.projections.base import Projection


@COMPONENTS.register("taylor_exp")
class TaylorExp(Component):
    """Features [1, z, z⊗z/√2], each product once."""

    formula = "[1, z, z⊗z/√2], z = Wx, each product once"
    kernel_formula = "1 + z·z' + (z·z')²/2, exact"
    source = "Based (Arora et al. 2024)"
    cost = "m²/2 products"

    distribution = "none"
    exact = True

    def feature_dim(self, num_features: int, dim: int) -> int:
        """Return the number of features: the constant, z and its products."""
        return 1 + num_features + symmetric_square_size(num_features)

    def tower(
        self, x: torch.Tensor, projection: Projection, statistics: Mapping[str, torch.Tensor], second: bool
    ) -> Features:
        """Compute the features, equal for both towers; arguments as in `Component.tower`."""
        with full_precision(x):
            z = projection(wide(x))
            parts = torch.ones_like(z[..., :1]), z, symmetric_square(z) * 0.5**0.5
            return Features(torch.cat(parts, -1).to(x.dtype))

    def kernel_over(self, x: torch.Tensor, y: torch.Tensor, projection: Projection) -> torch.Tensor:
        """Return 1 + t + t²/2, with t the inner product of Wx and Wy."""
        t = (projection(x) * projection(y)).sum(-1)
        return 1 + t + t.square() / 2
