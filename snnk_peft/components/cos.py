"""Cosine features (SNNK paper, adapters and pooler): φ(x) = m^-½ cos(Wx).

Exact kernel: E[cos(ω·x) cos(ω·y)] = ½(e^{−‖x−y‖²/2} + e^{−‖x+y‖²/2}), by the product rule and the Gaussian
characteristic function.
"""

from __future__ import annotations

import torch

from snnk_peft.components import COMPONENTS
from snnk_peft.components.base import Component


@COMPONENTS.register("cos")
class Cos(Component):
    """f(z) = cos z."""

    def function(self, z: torch.Tensor) -> torch.Tensor:
        """Elementwise cosine."""
        # A half-precision argument of size 20 is off by 0.06; the function value must not be.
        return torch.cos(z.float()).to(z.dtype) if z.dtype in (torch.float16, torch.bfloat16) else torch.cos(z)

    def kernel(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """½(e^{−‖x−y‖²/2} + e^{−‖x+y‖²/2})."""
        minus, plus = (x - y).square().sum(-1), (x + y).square().sum(-1)
        return (torch.exp(-minus / 2) + torch.exp(-plus / 2)) / 2
