"""ReLU features (SNNK paper, section 3.2): φ(x) = m^-½ ReLU(Wx).

Exact kernel: ½K₁(x, y) = ‖x‖‖y‖ (sin θ + (π − θ) cos θ) / 2π, half the arc-cosine kernel of order 1.
"""

from __future__ import annotations

import torch

from snnk_peft.components import COMPONENTS
from snnk_peft.components.base import Component
from snnk_peft.functional.activation_kernels import arccos_kernel


@COMPONENTS.register("relu")
class Relu(Component):
    """f(z) = max(z, 0)."""

    positive = True
    formula = "m^-½ max(ω·x, 0)"
    kernel_formula = "½K₁(x, y), arc-cosine of order 1"
    source = "SNNK 3.2; Cho & Saul 2009"
    cost = "one comparison per row"
    in_kernels = "relu"

    def function(self, z: torch.Tensor) -> torch.Tensor:
        return torch.relu(z)

    def gradient(self, z: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
        return torch.ops.aten.threshold_backward(grad, z, 0)

    def kernel(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return arccos_kernel(x, y, order=1) / 2
