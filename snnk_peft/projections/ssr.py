"""Stochastic spherical-radial rules of degree (3, 3), "SSR" (Genz & Monahan 1998; Munkhoeva et al. 2018).

A Gaussian integral is one over directions and one over lengths. With v_j the dim + 1 corners of a regular simplex, Q a
Haar rotation and ρ ~ χ_{dim+2},

    E g(ω) ≈ (1 − dim/ρ²) g(0) + dim/ρ² · 1/(2(dim + 1)) Σ_j [g(ρ Q v_j) + g(−ρ Q v_j)].

k independent rules are averaged; they share the node 0, so W has m = 2k(dim + 1) + 1 rows. (Spectraformer prints
2·dim + 1 rows and leaves out the weights and the node 0.) Polynomials of degree <= 3 are integrated exactly in every
draw, and E of the rule is E g for every g: the factor 1/ρ² turns χ_{dim+2} into χ_dim. Yet `unbiased` is False, because
weights differ and are random, and components may count on equal ones (the phases of cos do).

The weight of the node 0 can be negative; each tower carries √|a_i|, the second one also the sign.

Cost: as gaussian.
"""

from __future__ import annotations

from typing import Any

import torch

from snnk_peft.functional.random_numbers import gaussian_lengths, haar, simplex
from snnk_peft.projections import PROJECTIONS
from snnk_peft.projections.base import Projection


@PROJECTIONS.register("ssr")
class Ssr(Projection):
    """Nodes of k spherical-radial rules, m = 2k(dim + 1) + 1. Arguments as in `Projection`."""

    formula = "spherical-radial rules of degree 3, random weights"
    source = "Munkhoeva et al. 2018; Spectraformer"
    cost = "m·d"

    unbiased = False
    uniform = False
    sampled_lengths = False

    @classmethod
    def nearest_size(cls, dim: int, num_features: int, **params: Any) -> int:
        """Return 2k(dim + 1) + 1 for the nearest k >= 1."""
        rule = 2 * (dim + 1)
        return rule * max(1, round((num_features - 1) / rule)) + 1

    def settle(self) -> list[str]:
        found, rule, extra = super().settle(), 2 * (self.dim + 1), self.num_features - 1
        if extra % rule or extra < rule:
            below = max(1, extra // rule)
            found.append(
                f"ssr num_features is {self.num_features} with dim {self.dim}; expected 2k(dim + 1) + 1 for a whole k: "
                f"{rule * below + 1}, {rule * (below + 1) + 1}, ..."
            )
        return found

    def draw(self, generator: torch.Generator) -> torch.Tensor:
        """Return the node 0, then the nodes of each rule, in fp64."""
        count = (self.num_features - 1) // (2 * (self.dim + 1))
        nodes = [torch.zeros(1, self.dim, dtype=torch.float64, device="cpu")]
        for radius in gaussian_lengths(count, self.dim + 2, generator):
            corners = radius * (simplex(self.dim + 1) @ haar(self.dim, generator))
            nodes += [corners, -corners]
        return torch.cat(nodes)

    @property
    def feature_weights(self) -> torch.Tensor:
        """Return dim / (ρ² · 2(dim + 1) k) for each node of length ρ; the rest to 1 for the node 0."""
        # ρ is read off W, so that weights and nodes stay consistent.
        others = self.dim / (
            self.weight[1:].to(torch.promote_types(self.dtype, torch.float32)).square().sum(-1)
            * (self.num_features - 1)
        )
        return torch.cat((1 - others.sum(dim=0, keepdim=True), others)).to(self.dtype)
