"""GELU features: φ(x) = m^-½ GELU(Wx), the natural choice for landmarks of a GELU network.

The exact kernel E[GELU(ω·x) GELU(ω·y)] has a closed form: see `functional/activation_kernels.py`.
"""

from __future__ import annotations

import torch

from snnk_peft.components import COMPONENTS
from snnk_peft.components.base import Component
from snnk_peft.functional.activation_kernels import gelu_kernel


@COMPONENTS.register("gelu")
class Gelu(Component):
    """f(z) = z·P(N(0,1) <= z), the exact (erf) form."""

    formula = "m^-½ GELU(ω·x)"
    kernel_formula = "E[GELU(ω·x) GELU(ω·y)], closed form"
    source = "this package"
    cost = "one error function per row"
    in_kernels = "gelu"

    def function(self, z: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.gelu(z)

    def gradient(self, z: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
        return torch.ops.aten.gelu_backward(grad, z)

    def kernel(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return gelu_kernel(x, y)
