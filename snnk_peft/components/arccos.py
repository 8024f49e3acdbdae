"""Arc-cosine features of order n (Cho & Saul 2009; SNNK paper, Theorem 3.2): φ(x) = m^-½ 1[ω·x > 0] (ω·x)^n.

Exact kernel: ½K_n. The feature is the step times the power, not ReLU of the power: (ω·x)² is positive on both sides,
so ReLU((ω·x)²) would estimate another kernel.
"""

from __future__ import annotations

from typing import Annotated

import torch

from snnk_peft.components import COMPONENTS
from snnk_peft.components.base import Component
from snnk_peft.functional.activation_kernels import arccos_kernel
from snnk_peft.options import Option


@COMPONENTS.register("arccos")
class Arccos(Component):
    """f(z) = 1[z > 0] z^order."""

    positive = True
    formula = "m^-½ 1[ω·x > 0] (ω·x)^n, n = 0, 1, 2"
    kernel_formula = "½K_n(x, y), arc-cosine of order n"
    source = "SNNK Thm 3.2; Cho & Saul 2009"
    cost = "one comparison and n products per row"

    def __init__(
        self,
        order: Annotated[
            int,
            Option(
                "0 (step: angle only, no gradient), 1 (ReLU) or 2 (smooth, grows quadratically).",
                choices=(0, 1, 2),
            ),
        ] = 1,
    ):
        super().__init__(order=order)
        self.order = order

    def function(self, z: torch.Tensor) -> torch.Tensor:
        if self.order == 0:
            return (z > 0).to(z.dtype)
        return torch.relu(z) if self.order == 1 else torch.relu(z).square()

    def gradient(self, z: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
        if self.order == 0:
            return torch.zeros_like(grad)
        return torch.ops.aten.threshold_backward(grad if self.order == 1 else 2 * z * grad, z, 0)

    def kernel(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return arccos_kernel(x, y, order=self.order) / 2
