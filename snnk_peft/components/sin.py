"""Sine features: φ(x) = m^-½ sin(Wx).

Exact kernel: E[sin(ω·x) sin(ω·y)] = ½(e^{−‖x−y‖²/2} − e^{−‖x+y‖²/2}).
"""

from __future__ import annotations

import torch

from snnk_peft.components import COMPONENTS
from snnk_peft.components.base import Component


@COMPONENTS.register("sin")
class Sin(Component):
    """f(z) = sin z."""

    formula = "m^-½ sin(ω·x)"
    kernel_formula = "½ (e^{−‖x−y‖²/2} − e^{−‖x+y‖²/2})"
    source = "SNNK 4.2 (SIREN)"
    cost = "one sine per row"

    periodic = True

    def function(self, z: torch.Tensor) -> torch.Tensor:
        return torch.sin(z)

    def gradient(self, z: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
        return grad * torch.cos(z)

    def kernel(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Return ½(e^{−‖x−y‖²/2} − e^{−‖x+y‖²/2})."""
        minus, plus = (x - y).square().sum(-1), (x + y).square().sum(-1)
        return (torch.exp(-minus / 2) - torch.exp(-plus / 2)) / 2
