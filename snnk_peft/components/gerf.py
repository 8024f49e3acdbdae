"""Generalised exponential features (Spectraformer's GERF): φ(x) = m^-½ D exp(A‖ω‖² + B ω·x + C‖x‖²).

B = √(s(1−4A)), D = (1−4A)^{d/4}, C = −s/2 for the softmax kernel e^{x·y} and −(s+1)/2 for the Gaussian e^{−‖x−y‖²/2}.
s = +1: positive features; A = 0 gives `posrf`, A < 0 bounded features with less variance for long vectors.
s = −1: B is imaginary; cosines and sines times e^{A‖ω‖²}; A = 0 gives `trigrf`.
Second moments are finite for A < 1/8 only. Over quadratures and rows of one length the factor e^{A‖ω‖²} is integrated
analytically, which gives A = 0 (base_exponential.py). Cost: that of `posrf` (s = −1: two features per row).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

import torch

from snnk_peft.components import COMPONENTS
from snnk_peft.components.base import Features
from snnk_peft.components.base_exponential import Coordinates, KernelName, Tilted, quadratic_forms
from snnk_peft.functional.exponential import log_factor, stabilised
from snnk_peft.functional.log_linear import LogLinear
from snnk_peft.functional.precision import full_precision, wide
from snnk_peft.options import Option
from snnk_peft.projections.base import Projection


@COMPONENTS.register("gerf")
class Gerf(Tilted):
    """D exp(A‖ω‖² + B ω·x + C‖x‖²)."""

    formula = "m^-½ D exp(A‖ω‖² + B ω·x + C‖x‖²)"
    source = "Likhosherstov et al. 2022; Spectraformer"
    cost = "one exponential per row"

    def __init__(
        self,
        A: Annotated[
            float,
            Option(
                "without effect over quadratures and rows of one length, see above; at 1/8 the variance becomes "
                "infinite. The best value falls with ‖x + y‖²/dim (see `oprf`, which chooses it).",
                below=0.125,
            ),
        ] = -0.03,
        s: Annotated[int, Option("+1 (positive features) or −1 (trigonometric).", choices=(1, -1))] = 1,
        kernel: KernelName = "softmax",
    ):
        super().__init__(A=A, s=s, kernel=kernel)
        self.A, self.s, self.positive = A, s, s == 1

    def feature_dim(self, num_features: int, dim: int) -> int:
        """Return one feature per row, or two for s = −1."""
        return num_features if self.s == 1 else 2 * num_features

    def coordinates(
        self, statistics: Mapping[str, torch.Tensor], second: bool, like: torch.Tensor, dim: int
    ) -> Coordinates:
        """Return A and unchanged coordinates."""
        return Coordinates(self.A)

    def tower(
        self, x: torch.Tensor, projection: Projection, statistics: Mapping[str, torch.Tensor], second: bool
    ) -> Features:
        if self.s == 1:
            return super().tower(x, projection, statistics, second)
        with full_precision(x):
            a = self.tilt(self.A, projection)
            z = projection(wide(x)) * (1 - 4 * a) ** 0.5
            exponents, factor = quadratic_forms(a, projection, z), log_factor(x, self.kernel_name, a, sign=-1)
            values, scale = stabilised(exponents, factor, projection.amplitudes(signed=second), z.dtype)
            return Features(torch.cat((values * torch.cos(z), values * torch.sin(z)), -1).to(x.dtype), scale)

    def log_linear(
        self, projection: Projection, statistics: Mapping[str, torch.Tensor], second: bool, like: torch.Tensor
    ) -> LogLinear | None:
        return super().log_linear(projection, statistics, second, like) if self.s == 1 else None
