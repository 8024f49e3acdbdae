"""Sparse Gauss quadrature of level 2 (Dao et al. 2017; Spectraformer appendix A.3): 2·dim + 1 nodes instead of samples.

    nodes 0 and ±√3 e_i, weights 1 − dim/3 and 1/6:   Σ_i a_i g(p_i) = E g(ω), ω ~ N(0, I), for g of degree <= 3

and for powers of one coordinate up to the fifth: Σ a = 1, Σ a p pᵀ = I, Σ a p_l⁴ = 3. (The paper's code has nodes at
±11.62.) The weight of the node 0 is negative from dim = 4 on; each tower carries √|a_i|, the second one also the sign.
Mixed moments of degree 4 are missed, so in many dimensions the estimate is good for short vectors only.

Deterministic, and so not unbiased: an error remains that no number of features removes. With `rotate` the nodes are
rotated by a Haar matrix; polynomials up to degree 3 are still integrated exactly.

Cost: as gaussian.
"""

from __future__ import annotations

from typing import Annotated, Any

import torch

from snnk_peft.functional.random_numbers import haar
from snnk_peft.options import Option
from snnk_peft.projections import PROJECTIONS
from snnk_peft.projections.base import Projection


@PROJECTIONS.register("sgq")
class Sgq(Projection):
    """The 2·dim + 1 nodes of the rule."""

    formula = "nodes 0, ±√3 e_i with weights 1 − d/3, 1/6"
    source = "Dao et al. 2017; Spectraformer"
    cost = "m·d"

    unbiased = False
    uniform = False
    sampled_lengths = False

    def __init__(
        self,
        dim: int,
        num_features: int,
        *,
        rotate: Annotated[
            bool,
            Option(
                "turn the nodes by a random rotation, a different one at each site. False leaves them on the axes: the "
                "same matrix at every site, whatever the seed."
            ),
        ] = False,
        **kwargs: Any,
    ):
        self.rotate, self.params = rotate, {"rotate": rotate}
        self.seeded = bool(rotate)
        super().__init__(dim, num_features, **kwargs)

    @classmethod
    def nearest_size(cls, dim: int, num_features: int, **params: Any) -> int:
        return 2 * dim + 1

    def settle(self) -> list[str]:
        size, found = 2 * self.dim + 1, super().settle()
        if self.num_features != size:
            found.append(f"sgq num_features is {self.num_features} with dim {self.dim}; expected 2·dim + 1 = {size}")
        return found

    def draw(self, generator: torch.Generator) -> torch.Tensor:
        """Return the nodes 0, √3 e_i, −√3 e_i, rotated if requested, in fp64."""
        axes = 3**0.5 * (
            haar(self.dim, generator) if self.rotate else torch.eye(self.dim, dtype=torch.float64, device="cpu")
        )
        return torch.cat((torch.zeros_like(axes[:1]), axes, -axes))

    @property
    def feature_weights(self) -> torch.Tensor:
        """Return 1 − dim/3 for the node 0, 1/6 for the others."""
        weights = torch.full((self.num_features,), 1 / 6, dtype=self.dtype, device=self.device)
        weights[0] = 1 - self.dim / 3
        return weights
