"""Cosine features (SNNK paper, adapters and pooler): φ(x) = m^-½ cos(Wx + c).

With phases c_i = π(i + ½)/m the exact kernel is half the Gaussian one, ½ e^{−‖x−y‖²/2}: by the product rule

    E[cos(ω·x + c) cos(ω·y + c)] = ½ e^{−‖x−y‖²/2} + ½ cos(2c) e^{−‖x+y‖²/2},

and the cosines of equally spaced 2c_i cancel. Without phases (as in the paper's code) the second term stays: every
feature is then an even function of x, and no readout can tell x from −x.
"""

from __future__ import annotations

import math
from typing import Annotated

import torch

from snnk_peft.components import COMPONENTS
from snnk_peft.components.base import Component
from snnk_peft.errors import ConfigError
from snnk_peft.options import Option
from snnk_peft.projections.base import Projection


@COMPONENTS.register("cos")
class Cos(Component):
    """f(z) = cos z."""

    formula = "m^-½ cos(ω·x + c), fixed phases c"
    kernel_formula = "½ e^{−‖x−y‖²/2}"
    source = "SNNK 4.2; Rahimi & Recht 2007"
    cost = "one cosine per row"

    periodic = True

    def __init__(self, phases: Annotated[bool, Option("add the fixed phases. False is the paper's form.")] = True):
        super().__init__(phases=phases)
        self.phases = phases

    def prepare(self, projection: Projection) -> None:
        """Check that all rows have equal weight, without which the phases do not cancel."""
        if self.phases and not projection.uniform:
            raise ConfigError(
                "cos with phases cannot use a projection with unequal feature weights: the phases would not cancel; "
                "use component_params={'phases': False}, or a projection of equal weights such as 'orf' or 'qmc'"
            )

    def offsets(self, num_features: int, device: torch.device | str = "cpu") -> torch.Tensor | None:
        """Return the phases c_i, (num_features,); a single one is π/4, where cos 2c = 0."""
        if not self.phases:
            return None
        return math.pi * (torch.arange(num_features, device=device) + 0.5) / max(num_features, 2)

    def function(self, z: torch.Tensor) -> torch.Tensor:
        return torch.cos(z)

    def gradient(self, z: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
        return -grad * torch.sin(z)

    def kernel(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Return ½ e^{−‖x−y‖²/2}, plus ½ e^{−‖x+y‖²/2} without phases."""
        kernel = torch.exp(-(x - y).square().sum(-1) / 2) / 2
        return kernel if self.phases else kernel + torch.exp(-(x + y).square().sum(-1) / 2) / 2
