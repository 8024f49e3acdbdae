"""Positive features of a learned spectral mixture (Learning the Transformer Kernel, PRF over Eq. 4; made exact here):

    f_i(x) = m^-½ exp(ω_i·x − ½ xᵀΣ_i x),   ω_i ~ N(±μ_i, Σ_i), the component of the row,  over `gmm`

    K(x, y) = Σ_c a_c e^{xᵀΣ_c y} cosh(μ_c·(x + y)),   a_c the share of component c in the rows

For one row E e^{ω·(x+y)} = e^{±μ·(x+y) + ½(x+y)ᵀΣ(x+y)}: its own factor e^{−½xᵀΣx} leaves e^{xᵀΣy ± μ·(x+y)}, and
both signs together a cosh. Σ_c thus learns which coordinates attention compares, and μ_c which vectors attract it
regardless of the other one. The paper (and `posrf` over `gmm`) divide by the length e^{‖x‖²} that Σ = I would ask for:
there the kernel has a factor e^{½xᵀ(Σ_c − I)x} for either vector, which grows without bound as Σ_c does. With
kernel="gaussian", f has the factor e^{−xᵀΣ_i x}, and K = Σ_c a_c e^{−½(x−y)ᵀΣ_c(x−y)} cosh(μ_c·(x + y)).

At initialisation Σ = I and μ = 0: exactly the features of `posrf`. The signs ± are unbalanced, and K is not exact, if
num_features is not a multiple of 2C and μ is not 0. The square xᵀΣx is learned and differs between rows, so attention
uses the features themselves and not their logarithms (`log_linear`). Cost: `posrf`, and one square per component, C·dim
multiply-adds (C·dim² for full covariances).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from snnk_peft.components import COMPONENTS
from snnk_peft.components.base import Component, Features
from snnk_peft.components.base_exponential import KernelName
from snnk_peft.functional.exponential import stabilised
from snnk_peft.functional.precision import full_precision, wide
from snnk_peft.projections.base import Projection


@COMPONENTS.register("gmmrf")
class Gmmrf(Component):
    """exp(ω·x − ½ xᵀΣx) with the covariance Σ that ω was drawn with."""

    formula = "m^-½ exp(ω·x − ½ xᵀΣx), Σ that of the row"
    kernel_formula = "Σ_c a_c e^{xᵀΣ_c y} cosh(μ_c·(x + y)), or Gaussian"
    source = "Learning the Transformer Kernel, corrected"
    cost = "one exponential per row, a square per component"

    distribution = "gmm"
    positive = True

    def __init__(self, kernel: KernelName = "softmax"):
        super().__init__(kernel=kernel)
        self.factor = 0.5 if kernel == "softmax" else 1.0

    @classmethod
    def fits(cls, projection: Projection | type[Projection]) -> bool:
        """Return whether a matrix knows the Gaussians of its rows."""
        return projection.mixture

    def tower(
        self, x: torch.Tensor, projection: Projection, statistics: Mapping[str, torch.Tensor], second: bool
    ) -> Features:
        with full_precision(x):
            exponents = projection(wide(x)) - self.factor * projection.squares(wide(x))
            return Features(*stabilised(exponents, 0.0, projection.amplitudes(signed=second), x.dtype))

    def kernel_over(self, x: torch.Tensor, y: torch.Tensor, projection: Projection) -> torch.Tensor:
        """Return Σ_c a_c e^{xᵀΣ_c y} cosh(μ_c·(x + y)), or the Gaussian kernel, for the current matrix."""
        shares, means, covariances = (tensor.to(x) for tensor in projection.gaussians())

        def form(u: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            return torch.einsum("...d,cde,...e->...c", u, covariances, v)

        exponents = form(x, y) if self.factor == 0.5 else -form(x - y, x - y) / 2
        return (exponents.exp() * torch.cosh((x + y) @ means.mT)) @ shares
