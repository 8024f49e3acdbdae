"""Hyperbolic random features (FAVOR+ with ±ω; Spectraformer's HypRF): φ(x) = (2m)^-½ e^{−‖x‖²/2} [e^{ω·x}, e^{−ω·x}].

Exact kernel: e^{x·y}, or e^{−‖x−y‖²/2} with kernel="gaussian". Every row serves twice, with both signs, which lowers
the variance below that of 2m independent rows of `posrf`. Cost: the projection, and two exponentials per row.
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


@COMPONENTS.register("hyprf")
class Hyprf(Exponential):
    """[exp(ω·x − ‖x‖²/2), exp(−ω·x − ‖x‖²/2)]."""

    formula = "(2m)^-½ e^{−‖x‖²/2} [e^{ω·x}, e^{−ω·x}]"
    source = "FAVOR+ (Choromanski 2021); Spectraformer"
    cost = "two exponentials per row"

    positive = True

    def feature_dim(self, num_features: int, dim: int) -> int:
        return 2 * num_features

    def tower(
        self, x: torch.Tensor, projection: Projection, statistics: Mapping[str, torch.Tensor], second: bool
    ) -> Features:
        with full_precision(x):
            z = projection(wide(x))
            both, factor = torch.cat((z, -z), -1), log_factor(x, self.kernel_name)
            return Features(*stabilised(both, factor, projection.amplitudes(second, copies=2), x.dtype))

    def log_linear(
        self, projection: Projection, statistics: Mapping[str, torch.Tensor], second: bool, like: torch.Tensor
    ) -> LogLinear:
        return exponential_logarithms(projection, self.kernel_name, second, like, both_signs=True)
