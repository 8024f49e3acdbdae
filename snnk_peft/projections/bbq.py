"""Black-box quantiles: one learned quantile function per coordinate (Tompkins et al. 2019; Spectraformer, A.4, "BBQ").

    ω_ij = Q_j(u_ij) = g_j(Φ⁻¹(u_ij)),  u_i uniform points in the unit cube, Φ⁻¹ the normal quantile function
    g_j(z) = b_j + ∫₀^z slope_j,  slope_j > 0 and constant on each of `segments` intervals of equal probability

g_j is increasing, so every Q_j is a quantile function, of a distribution with independent coordinates. Initially
b = 0 and all slopes are 1: Q is the normal quantile function and W the draw it replaces. The points are scrambled Sobol
points, which fill the cube evenly (every one of them is uniform, so estimates are initially unbiased), or random
ones. The saved noise is Φ⁻¹(u).

Cost: as gaussian, plus forming W: segments · num_features · dim. Parameters: (segments + 1) · dim.
"""

from __future__ import annotations

from statistics import NormalDist
from typing import Annotated

import torch

from snnk_peft.functional.low_discrepancy import MAX_SOBOL_DIM, sobol
from snnk_peft.options import Option
from snnk_peft.projections import PROJECTIONS
from snnk_peft.projections.base_learned import Learned


@PROJECTIONS.register("bbq")
class Bbq(Learned):
    """Rows from learned quantile functions.

    Attributes:
        log_slope: logarithms of the slopes, a parameter (dim, segments).
        offset: b, the medians, a parameter (dim,).
    """

    formula = "learned monotone quantile functions of Sobol points"
    source = "Tompkins et al. 2019"
    cost = "m·d, and forming W"

    log_slope: torch.Tensor
    offset: torch.Tensor

    def __init__(
        self,
        dim: int,
        num_features: int,
        *,
        segments: Annotated[
            int,
            Option(
                "pieces of each quantile function; more of them can follow more modes, and each needs some of the "
                "num_features points to learn from. With 1 it learns a scale and a mean.",
                low=1,
                high=1024,
            ),
        ] = 8,
        points: Annotated[str, Option('"sobol" has at most 21201 dimensions.', choices=("sobol", "random"))] = "sobol",
        **kwargs: object,
    ):
        self.segments, self.points = segments, points
        self.params = {"segments": segments, "points": points}
        super().__init__(dim, num_features, **kwargs)  # type: ignore[arg-type]

    def settle(self) -> list[str]:
        found = super().settle()
        if self.points == "sobol" and self.dim > MAX_SOBOL_DIM:
            found.append(f"bbq dim is {self.dim}; Sobol points have at most {MAX_SOBOL_DIM}, use points='random'")
        return found

    def draw(self, generator: torch.Generator) -> torch.Tensor:
        """Return normal quantiles of the points, (num_features, dim)."""
        if self.points == "random":
            return super().draw(generator)
        return torch.special.ndtri(sobol(self.num_features, self.dim, generator))

    def initial(self, generator: torch.Generator) -> dict[str, torch.Tensor]:
        """Start with the normal quantile function in every coordinate."""
        return {
            "log_slope": torch.zeros(self.dim, self.segments, device="cpu"),
            "offset": torch.zeros(self.dim, device="cpu"),
        }

    def warp(self, z: torch.Tensor) -> torch.Tensor:
        """Apply g: z (..., dim) -> (..., dim), each coordinate with its own increasing function."""
        knots = [NormalDist().inv_cdf(k / self.segments) for k in range(1, self.segments)]
        edges = [None, *knots, None]
        result = z + self.offset
        for extra, low, high in zip(torch.expm1(self.log_slope).unbind(-1), edges[:-1], edges[1:], strict=True):
            # The part of the way from 0 to z in this interval, times (slope − 1).
            result = result + extra * (clipped_between(z, low, high) - clipped_between(torch.zeros_like(z), low, high))
        return result

    def quantile(self, levels: torch.Tensor) -> torch.Tensor:
        """Apply Q: levels (..., dim) in (0, 1) -> (..., dim)."""
        return self.warp(torch.special.ndtri(levels))

    def rows(self) -> torch.Tensor:
        """Return W (num_features, dim), the quantiles of the saved points."""
        return self.warp(self.noise)


def clipped_between(z: torch.Tensor, low: float | None, high: float | None) -> torch.Tensor:
    """Clamp z to [low, high], either of which may be absent."""
    return z if low is None and high is None else z.clamp(low, high)
