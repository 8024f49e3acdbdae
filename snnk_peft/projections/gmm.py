"""A learned spectral Gaussian mixture (Learning the Transformer Kernel, Eqs. 4, 5; Spectraformer, Eq. 29).

    ω = Σ_c^½ n ± μ_c,  n ~ N(0, I) saved noise;   Σ_c = diag(root_c)²  or  root_c root_cᵀ

    cos/sin features estimate  K(x, y) = Σ_c 1/C exp(−½ δᵀΣ_cδ) cos(μ_cᵀδ),  δ = x − y,  K(x, x) = 1

The paper prints Σ n but means Σ^½ n, and its code estimates 2K. Every component has rows with +μ and rows with −μ,
so that kernels are real and even. Their noise is independent, unlike the paper's: with n shared between the two, all
rows would come in equal pairs at the start (μ = 0), half of them wasted, and the gradient for μ would be zero there
forever. Components start equal, Σ = I and μ = 0, at the kernel they replace; their noise distinguishes them.

The 2C groups of rows (component and sign) are equally large and all rows count the same: mixing weights are fixed, as
in the paper, because learned ones would multiply every feature, and a component that should count more can have a twin.
Row i belongs to group i mod 2C, so that whatever a feature map varies evenly along the rows (phases) is even
within each group. Take a multiple of 2C for num_features: otherwise the first groups have one row more, 1/C becomes the
component's share of the rows (`shares`), and ± is off balance by that row.

Cost: as gaussian, plus forming W: num_features · dim products for diagonal Σ, num_features · dim² for full.
Parameters: 2C · dim, or C · (dim² + dim).
"""

from __future__ import annotations

from typing import Annotated

import torch

from snnk_peft.options import MOST, Option
from snnk_peft.projections import PROJECTIONS
from snnk_peft.projections.base_learned import Learned


@PROJECTIONS.register("gmm")
class Gmm(Learned):
    """Rows from a Gaussian mixture with learned means and covariances.

    Attributes:
        root: Σ_c^½, a parameter: (C, dim) for diagonal covariances, (C, dim, dim) for full ones.
        mean: μ_c, a parameter (C, dim).
    """

    formula = "Σ_c^½ n ± μ_c, learned Σ_c and μ_c"
    source = "Learning the Transformer Kernel Eq. 4"
    cost = "m·d, and forming W"

    mixture = True

    root: torch.Tensor
    mean: torch.Tensor

    def __init__(
        self,
        dim: int,
        num_features: int,
        *,
        components: Annotated[
            int,
            Option(
                "C, the number of components; 2 as in the paper. num_features must be at least 2C.", low=1, high=MOST
            ),
        ] = 2,
        covariance: Annotated[
            str,
            Option('"diagonal" learns a scale per coordinate, "full" any covariance.', choices=("diagonal", "full")),
        ] = "diagonal",
        **kwargs: object,
    ):
        self.components, self.covariance = components, covariance
        self.params = {"components": components, "covariance": covariance}
        super().__init__(dim, num_features, **kwargs)  # type: ignore[arg-type]

    def settle(self) -> list[str]:
        found, least = super().settle(), 2 * self.components
        if self.num_features < least:
            found.append(
                f"gmm num_features is {self.num_features} with {self.components} components; expected at least "
                f"{least}, one row with +μ and one with −μ for each"
            )
        return found

    def initial(self, generator: torch.Generator) -> dict[str, torch.Tensor]:
        shape = (self.components, self.dim)
        ones = torch.ones(shape, device="cpu")
        return {
            "root": ones if self.covariance == "diagonal" else torch.diag_embed(ones),
            "mean": torch.zeros(shape, device="cpu"),
        }

    def rows(self) -> torch.Tensor:
        """Return W (num_features, dim): Σ_c^½ n ± μ_c; rows c, c + 2C, ... with +, those C further on with −, c < C."""
        result, groups = torch.empty_like(self.noise), 2 * self.components
        for group in range(groups):
            root, mean = self.root[group % self.components], self.mean[group % self.components]
            noise = self.noise[group::groups]
            spread = noise * root if self.covariance == "diagonal" else noise @ root.T
            result[group::groups] = spread + mean if group < self.components else spread - mean
        return result

    def shares(self) -> torch.Tensor:
        """Return the share of each component in the rows, (C,) in fp64: 1/C, or nearly."""
        return self._members("cpu").bincount(minlength=self.components).double() / self.num_features

    def _members(self, device: torch.device | str) -> torch.Tensor:
        """Return the component of each row, (num_features,)."""
        return torch.arange(self.num_features, device=device) % (2 * self.components) % self.components

    def gaussians(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.shares(), self.mean, self.covariances()

    def squares(self, x: torch.Tensor) -> torch.Tensor:
        """Compute `Projection.squares`, which is one value per mixture component."""
        root = self.root.to(x.dtype)
        if self.covariance == "diagonal":
            own = x.square() @ root.square().mT
        else:
            own = (x.unsqueeze(-2).unsqueeze(-2) @ root).square().sum((-2, -1))
        return own[..., self._members(x.device)]

    def covariances(self) -> torch.Tensor:
        return torch.diag_embed(self.root.square()) if self.covariance == "diagonal" else self.root @ self.root.mT

    def kernel(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Compute the exact kernel of cos/sin features, Eq. 4, for broadcasting x and y (..., dim); result (...)."""
        delta = (x - y).unsqueeze(-2)
        spread = torch.einsum("...cd,cde,...ce->...c", delta, self.covariances().to(delta.dtype), delta)
        terms = torch.exp(-spread / 2) * torch.cos((delta * self.mean.to(delta.dtype)).sum(-1))
        return terms @ self.shares().to(delta)
