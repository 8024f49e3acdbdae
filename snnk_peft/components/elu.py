"""ELU features (Katharopoulos et al. 2020; the lecture's linear attention): φ(x) = m^-½ (elu(Wx) + 1).

f(z) = z + 1 for z > 0 and e^z below: positive, smooth enough to train, with no relation to softmax. The exact kernel
E[f(ω·x) f(ω·y)] is a two-dimensional Gaussian integral, computed by quadrature (`gaussian_product_mean`).
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from snnk_peft.components import COMPONENTS
from snnk_peft.components.base import Component


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


_RADIUS, _RADIAL, _ANGULAR = 10.0, 96, 24


def _legendre(count: int, like: Tensor) -> tuple[Tensor, Tensor]:
    nodes, weights = np.polynomial.legendre.leggauss(count)
    return torch.as_tensor((nodes + 1) / 2).to(like), torch.as_tensor(weights / 2).to(like)


def gaussian_product_mean(f: Callable[[Tensor], Tensor], x: Tensor, y: Tensor) -> Tensor:
    """Compute E[f(ω·x) f(ω·y)], ω ~ N(0, I), x, y (..., d), to about 1e-10 for any f that is smooth except at 0.

    In the plane of x and y, ω has polar coordinates (r, α), so with θ the angle between the two

        E = (1/2π) ∫dα ∫dr r e^{−r²/2} f(‖x‖ r cos α) f(‖y‖ r cos(α − θ)).

    The kinks lie on the four rays α = ±π/2, θ ± π/2: Gauss-Legendre nodes between them never straddle one. Costs
    4·24·96 evaluations of f per pair.
    """
    x_norm, y_norm = torch.linalg.vector_norm(x, dim=-1), torch.linalg.vector_norm(y, dim=-1)
    u = x / torch.where(x_norm > 0, x_norm, 1.0).unsqueeze(-1)
    v = y / torch.where(y_norm > 0, y_norm, 1.0).unsqueeze(-1)
    # Accurate for nearly parallel vectors, with finite gradients at x == y.
    apart, together = torch.linalg.vector_norm(u - v, dim=-1), torch.linalg.vector_norm(u + v, dim=-1)
    together = torch.where((apart > 0) | (together > 0), together, 1.0)
    theta = 2 * torch.atan2(apart, together)
    r, r_weight = _legendre(_RADIAL, theta)
    r, r_weight = _RADIUS * r, _RADIUS * r_weight * (_RADIUS * r) * torch.exp(-(_RADIUS * r).square() / 2)
    step, step_weight = _legendre(_ANGULAR, theta)
    total = torch.zeros_like(theta)
    for start, length in (
        (theta * 0 - math.pi / 2, theta),
        (theta - math.pi / 2, math.pi - theta),
        (theta * 0 + math.pi / 2, theta),
        (theta + math.pi / 2, math.pi - theta),
    ):
        alpha = (start.unsqueeze(-1) + length.unsqueeze(-1) * step)[..., None, :]
        radius = r[:, None]
        first = f(x_norm[..., None, None] * radius * torch.cos(alpha))
        second = f(y_norm[..., None, None] * radius * torch.cos(alpha - theta[..., None, None]))
        total = total + length * torch.einsum("...ra,r,a->...", first * second, r_weight, step_weight)
    return total / (2 * math.pi)
