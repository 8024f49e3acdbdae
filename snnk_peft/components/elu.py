"""ELU features (Katharopoulos et al. 2020; the lecture's linear attention): φ(x) = m^-½ (elu(Wx) + 1).

f(z) = z + 1 for z > 0 and e^z below: positive, smooth enough to train, with no relation to softmax. The exact kernel
E[f(ω·x) f(ω·y)] is a two-dimensional Gaussian integral, computed by quadrature (`functional/polar_quadrature.py`).
"""

from __future__ import annotations

import torch

from snnk_peft.components import COMPONENTS
from snnk_peft.components.base import Component
from snnk_peft.functional.polar_quadrature import gaussian_product_mean


@COMPONENTS.register("elu")
class Elu(Component):
    """f(z) = elu(z) + 1."""

    formula = "m^-½ (elu(ω·x) + 1)"
    kernel_formula = "E[f(ω·x) f(ω·y)], by quadrature"
    source = "Katharopoulos et al. 2020"
    cost = "one exponential per row"
    in_kernels = "elu"

    positive = True

    def function(self, z: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.elu(z) + 1

    def gradient(self, z: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
        return grad * z.clamp_max(0).exp()

    def kernel(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return gaussian_product_mean(self.function, x, y)
