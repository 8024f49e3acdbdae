"""Non-negative sketches of the polynomial kernel (PolySketchFormer, Kacham et al. 2023): φ(x) = S(x)⊗S(x), S a sketch
of half the degree, so that an attention weight φ(x)·φ(y) = (S(x)·S(y))² is never negative. It estimates (x·y)^p.

    S₂(x) = r^-½ (W₁x) ∘ (W₂x),   S₂ₖ(x) = r^-½ (G Sₖ(x)) ∘ (G' S'ₖ(x)),   p = 2: S₁(x) = r^-½ W₁x

W₁, W₂, ... are r rows of W each (random signs), Sₖ and S'ₖ two independent sketches, G and G' Gaussian (r, r) (the tree
of Ahle et al. 2020): E S(x)·S(y) = (x·y)^{p/2}. The square of an unbiased estimate is biased by its variance: the exact
kernel, given by `kernel_over`, is u, the second moment of S(x)·S(y). With v = E ‖S(x)‖² ‖S(y)‖²,

    u₁ = (x·y)²,  v₁ = ‖x‖²‖y‖²,   f = v₁ + 2u₁ − 2 Σ_l x_l² y_l²      (f = E (ω·x)² (ω·y)² for random signs ω)
    p = 2: u = (1 − 1/r) u₁ + f/r
    u₂ = (1 − 1/r) u₁² + f²/r,   u₂ₖ = (1 − 1/r) uₖ² + (vₖ + 2uₖ)²/r,   v likewise with v₁² and vₖ² in the first term

So the weight of orthogonal vectors is not 0 but about ‖x‖^p ‖y‖^p/r: r determines the remaining contrast. The paper
first normalises queries and keys to one length; here they are used as given. Its learned sketches are not implemented.

Rows: r = num_features // (p/2); the remaining rows are unused. Features: r (r + 1)/2 (of S⊗S, each product once). Cost:
the projection, (p/2 − 2) r² for the tree, and r²/2 multiplications.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

import torch

from snnk_peft.components import COMPONENTS
from snnk_peft.components.base import Component, Features
from snnk_peft.errors import ConfigError
from snnk_peft.functional.powers import symmetric_square, symmetric_square_size
from snnk_peft.functional.precision import full_precision, wide
from snnk_peft.functional.random_numbers import normal_numbers
from snnk_peft.options import Option
from snnk_peft.projections.base import Projection
from snnk_peft.projections.base_drawn import site_generator


@COMPONENTS.register("polysketch")
class Polysketch(Component):
    """S(x)⊗S(x).

    Attributes:
        mixing: the matrices G of the tree, (p/2 − 2, r, r), from the lowest level up; None for p <= 4.
    """

    formula = "S(x)⊗S(x), S(x) products of p/2 projections"
    kernel_formula = "E (S(x)·S(y))², near (x·y)^p"
    source = "PolySketchFormer (Kacham et al. 2023)"
    cost = "r²/2 products, r = 2m/p"

    distribution = "rademacher"

    mixing: torch.Tensor | None

    def __init__(
        self,
        degree: Annotated[
            int,
            Option(
                "p, the power of x·y. A higher one attends more sharply, costs p/2 rows per feature of the sketch and "
                "has more variance.",
                choices=(2, 4, 8, 16),
            ),
        ] = 4,
    ):
        super().__init__(degree=degree)
        self.leaves = degree // 2
        self.register_buffer("mixing", None)

    def feature_dim(self, num_features: int, dim: int) -> int:
        """Return the number of products of two of the sketch's r entries."""
        return symmetric_square_size(num_features // self.leaves)

    def fewest_rows(self) -> int:
        """Return the number of rows for one entry of the sketch."""
        return self.leaves

    def prepare(self, projection: Projection) -> None:
        """Draw the tree from the projection's seed and site."""
        if projection.num_features < self.leaves:
            raise ConfigError(
                f"polysketch of degree {2 * self.leaves} needs at least {self.leaves} rows, got num_features="
                f"{projection.num_features}. Use more, or a lower degree"
            )
        if self.leaves > 2:
            size = projection.num_features // self.leaves
            generator = site_generator(projection.seed, f"{projection.site}:polysketch")
            self.mixing = normal_numbers(self.leaves - 2, size, size, generator=generator).float()

    def tower(
        self, x: torch.Tensor, projection: Projection, statistics: Mapping[str, torch.Tensor], second: bool
    ) -> Features:
        """Compute the features, equal for both towers; arguments as in `Component.tower`."""
        with full_precision(x):
            return Features(symmetric_square(self._sketch(projection(wide(x)))).to(x.dtype))

    def _sketch(self, z: torch.Tensor) -> torch.Tensor:
        """Compute S from the projections: (..., num_features) -> (..., r)."""
        size = z.shape[-1] // self.leaves
        z = z[..., : size * self.leaves].unflatten(-1, (self.leaves, size))
        if self.leaves == 1:
            return z.squeeze(-2) * size**-0.5
        parts = z[..., ::2, :] * z[..., 1::2, :] * size**-0.5
        start = 0
        while (count := parts.shape[-2]) > 1:
            assert self.mixing is not None
            level = self.mixing[start : start + count].to(parts.dtype)
            mixed = (parts.unsqueeze(-2) @ level.mT).squeeze(-2)
            parts, start = mixed[..., ::2, :] * mixed[..., 1::2, :] * size**-0.5, start + count
        return parts.squeeze(-2)

    def kernel_over(self, x: torch.Tensor, y: torch.Tensor, projection: Projection) -> torch.Tensor:
        """Return E (S(x)·S(y))² for the number of rows of a matrix of random signs."""
        share = 1 / (projection.num_features // self.leaves)
        u, v = (x * y).sum(-1).square(), x.square().sum(-1) * y.square().sum(-1)
        entry = v + 2 * u - 2 * (x.square() * y.square()).sum(-1)
        if self.leaves == 1:
            return (1 - share) * u + share * entry
        reached = 1
        while reached < self.leaves:
            u, v = ((1 - share) * moment.square() + share * entry.square() for moment in (u, v))
            reached, entry = 2 * reached, v + 2 * u
        return u
