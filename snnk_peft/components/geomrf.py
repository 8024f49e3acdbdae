"""Geometric random features (Chefs' Random Tables; Spectraformer's GeomRF): φ(x) = m^-½ Π_l x_l^{ω_l} (ω_l! P(ω_l))^-½.

ω_l are independent geometric integers, P(k) = p (1−p)^k, so E[Π (x_l y_l)^{ω_l} / (ω_l! P(ω_l))] = Π Σ_k (x_l y_l)^k/k!
= e^{x·y}: the exact kernel, for any p in (0, 1). A large p gives small integers, which suits small coordinates.
Signs of x are kept (integer powers), so features are positive only for positive vectors. Computed through logarithms,
as in `poisrf`. Cost: two projections.
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


@COMPONENTS.register("geomrf")
class Geomrf(Exponential):
    """Π_l x_l^{ω_l} / √(ω_l! P(ω_l)), ω geometric."""

    formula = "m^-½ Π x_l^{ω_l} (ω_l! P(ω_l))^-½, ω geometric"
    source = "Likhosherstov et al. 2022; Spectraformer"
    cost = "a second product with W, one exponential per row"

    distribution = "geometric"

    def tower(
        self, x: torch.Tensor, projection: Projection, statistics: Mapping[str, torch.Tensor], second: bool
    ) -> Features:
        with full_precision(x):
            p = float(projection.params["p"])
            wide_x = wide(x)
            powers = projection.materialize().to(wide_x)
            mass = torch.lgamma(powers + 1) + powers * math.log1p(-p) + math.log(p)
            exponents = projection(log_abs(wide_x)) - mass.sum(-1) / 2
            factor = -half_square(x) if self.kernel_name == "gaussian" else 0.0
            values, scale = stabilised(exponents, factor, projection.amplitudes(signed=second), wide_x.dtype)
            return Features((values * sign_of_powers(x, projection)).to(x.dtype), scale)
