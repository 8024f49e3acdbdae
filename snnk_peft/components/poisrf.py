"""Poisson random features (Chefs' Random Tables; PoisRF): φ(x) = m^-½ e^{λd/2} Π_l x_l^{ω_l} λ^{−ω_l/2}.

ω_l are independent Poisson(λ) integers, so E[Π (x_l y_l/λ)^{ω_l}] e^{λd} = Π e^{x_l y_l} = e^{x·y}: the exact kernel.
Second moment of one row: Π_l exp(λ + x_l² y_l²/λ), least at λ = |x_l y_l|: choose the projection's `rate` near the
typical |x_l y_l|. Signs of x are kept (integer powers), so features are positive only for positive vectors.

Computed through logarithms: Σ_l ω_l log|x_l| is the projection of log|x|, and the sign is that of the parity of the
projection of [x < 0]. Cost: two projections.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from snnk_peft.components import COMPONENTS
from snnk_peft.components.base import Features
from snnk_peft.components.base_exponential import Exponential
from snnk_peft.functional.exponential import half_square, stabilised
from snnk_peft.functional.powers import log_abs, sign_of_powers
from snnk_peft.functional.precision import full_precision, wide
from snnk_peft.projections.base import Projection


@COMPONENTS.register("poisrf")
class Poisrf(Exponential):
    """Π_l x_l^{ω_l}, ω Poisson."""

    formula = "m^-½ e^{λd/2} Π x_l^{ω_l} λ^{−ω_l/2}, ω Poisson(λ)"
    source = "Likhosherstov et al. 2022; Spectraformer"
    cost = "a second product with W, one exponential per row"

    distribution = "poisson"

    def tower(
        self, x: torch.Tensor, projection: Projection, statistics: Mapping[str, torch.Tensor], second: bool
    ) -> Features:
        with full_precision(x):
            rate = float(projection.params["rate"])
            exponents = projection(log_abs(wide(x)) - math.log(rate) / 2)
            factor = rate * projection.dim / 2 - (half_square(x) if self.kernel_name == "gaussian" else 0.0)
            values, scale = stabilised(exponents, factor, projection.amplitudes(signed=second), exponents.dtype)
            return Features((values * sign_of_powers(x, projection)).to(x.dtype), scale)
