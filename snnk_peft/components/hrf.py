"""Hybrid random features (Choromanski et al. 2022; Spectraformer's HRF): a mixture of a positive and a trigonometric
estimate of the same kernel, K̂ = λ K̂_pos + (1−λ) K̂_trig, each used where it is good.

    mode="angular": λ(x, y) = θ/π, θ the angle between x and y, itself estimated without bias from n random directions
        τ_j: ½ − ½ mean_j sgn(τ_j·x) sgn(τ_j·y). For vectors of equal length, trigonometric features are exact at θ = 0
        (x = y) and positive ones at θ = π (x = −y); for other lengths some variance remains there. Features: both
        bases times [1, sgn(τ_1·x), ..., sgn(τ_n·x)], with the minus sign on psi.
    mode="learned": λ is a trained scalar in (0, 1) (a sigmoid), initially ½.

Unbiased for e^{x·y} (or e^{−‖x−y‖²/2}) whatever λ is, because λ̂ is independent of W. Features: 3 per row, times n + 1
in the angular mode. Cost: the projection, three transcendental functions per row, and n·dim.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

import torch
from torch import nn

from snnk_peft.components import COMPONENTS
from snnk_peft.components.base import Features
from snnk_peft.components.base_exponential import Exponential, KernelName
from snnk_peft.functional.exponential import half_square, log_factor
from snnk_peft.functional.precision import full_precision, wide
from snnk_peft.functional.random_numbers import normal_numbers
from snnk_peft.options import Option
from snnk_peft.projections.base import Projection
from snnk_peft.projections.base_drawn import site_generator


@COMPONENTS.register("hrf")
class Hrf(Exponential):
    """λ · positive + (1 − λ) · trigonometric."""

    formula = "√λ posrf and √(1−λ) trigrf, λ from the angle or learned"
    source = "Choromanski et al. 2022; Spectraformer"
    cost = "three transcendental functions per row, times n + 1"

    periodic = True

    directions: torch.Tensor | None

    def __init__(
        self,
        mode: Annotated[str, Option("how λ is chosen.", choices=("angular", "learned"))] = "angular",
        directions: Annotated[
            int,
            Option(
                "n, random directions that estimate the angle; more of them cost features and lower the variance.",
                low=1,
                high=1024,
            ),
        ] = 4,
        kernel: KernelName = "softmax",
    ):
        super().__init__(mode=mode, directions=directions, kernel=kernel)
        self.mode, self.count = mode, directions
        self.register_buffer("directions", None)
        self.logit = nn.Parameter(torch.zeros(())) if mode == "learned" else None

    def feature_dim(self, num_features: int, dim: int) -> int:
        """Return three features per row, times the number of sign features."""
        return 3 * num_features * (1 + self.count if self.mode == "angular" else 1)

    def prepare(self, projection: Projection) -> None:
        """Draw the directions from the projection's seed and site."""
        if self.mode == "angular":
            generator = site_generator(projection.seed, f"{projection.site}:hrf")
            self.directions = normal_numbers(self.count, projection.dim, generator=generator).float()

    def tower(
        self, x: torch.Tensor, projection: Projection, statistics: Mapping[str, torch.Tensor], second: bool
    ) -> Features:
        with full_precision(x):
            z = projection(wide(x))
            positive = z + log_factor(x, self.kernel_name)
            # Softmax: cosines and sines times e^{‖x‖²/2}. Both bases share one scale per vector.
            growth = half_square(x) if self.kernel_name == "softmax" else torch.zeros_like(half_square(x))
            top = torch.maximum(positive.detach().amax(-1, keepdim=True), growth.detach())
            amplitudes = projection.amplitudes(signed=second)
            pos = (positive - top).exp() * amplitudes
            angular = (growth - top).exp() * amplitudes
            trig = torch.cat((torch.cos(z) * angular, torch.sin(z) * angular), -1)
            return Features(self._mix(trig, pos, wide(x), second).to(x.dtype), top)

    def _mix(self, trig: torch.Tensor, pos: torch.Tensor, x: torch.Tensor, second: bool) -> torch.Tensor:
        if self.logit is not None:
            weight = torch.sigmoid(self.logit).to(pos.dtype)
            return torch.cat((trig * (1 - weight).sqrt(), pos * weight.sqrt()), -1)
        assert self.directions is not None
        # x = 0 has no angle; sgn(0) = +1 on both towers keeps λ a probability.
        signs = torch.where(x @ self.directions.to(x.dtype).T >= 0, 1.0, -1.0).to(x.dtype) * self.count**-0.5
        parts = [trig, _outer(trig, signs), pos, _outer(pos, -signs if second else signs)]
        return torch.cat(parts, -1) * 0.5**0.5


def _outer(features: torch.Tensor, signs: torch.Tensor) -> torch.Tensor:
    """Compute all pairwise products, (..., m) and (..., n) -> (..., m·n)."""
    return (features.unsqueeze(-1) * signs.unsqueeze(-2)).flatten(-2)
