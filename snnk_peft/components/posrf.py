"""Positive random features (FAVOR+; Spectraformer's PosRF, Eq. 32): φ(x) = m^-½ exp(ω·x − ‖x‖²/2).

Exact kernel: e^{x·y}; with kernel="gaussian" (the Transformer-kernel paper's PRF, exp(ω·x − ‖x‖²)) e^{−‖x−y‖²/2}.
Variance of one row: e^{2‖x+y‖² − ‖x‖² − ‖y‖²} − e^{2x·y}: small where the kernel is small, as attention needs it.
Cost: the projection and one exponential per feature.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from snnk_peft.components import COMPONENTS
from snnk_peft.components.base import Features
from snnk_peft.components.base_exponential import Exponential, exponential_logarithms
from snnk_peft.functional.exponential import log_factor, stabilised
from snnk_peft.functional.log_linear import LogLinear
from snnk_peft.functional.precision import full_precision, wide
from snnk_peft.projections.base import Projection


@COMPONENTS.register("posrf")
class Posrf(Exponential):
    """exp(ω·x − ‖x‖²/2)."""

    formula = "m^-½ exp(ω·x − ‖x‖²/2)"
    source = "FAVOR+ (Choromanski 2021); Spectraformer Eq. 32"
    cost = "one exponential per row"

    positive = True

    def tower(
        self, x: torch.Tensor, projection: Projection, statistics: Mapping[str, torch.Tensor], second: bool
    ) -> Features:
        with full_precision(x):
            factor = log_factor(x, self.kernel_name)
            return Features(*stabilised(projection(wide(x)), factor, projection.amplitudes(signed=second), x.dtype))

    def log_linear(
        self, projection: Projection, statistics: Mapping[str, torch.Tensor], second: bool, like: torch.Tensor
    ) -> LogLinear:
        return exponential_logarithms(projection, self.kernel_name, second, like)
