"""A learned spectral Gaussian mixture (Learning the Transformer Kernel, Eqs. 4, 5; Spectraformer, Eq. 29).

    ω = Σ_c^½ n ± μ_c,  n ~ N(0, I) saved noise;   Σ_c = diag(root_c)²  or  root_c root_cᵀ

    cos/sin features estimate  K(x, y) = Σ_c 1/C exp(−½ δᵀΣ_cδ) cos(μ_cᵀδ),  δ = x − y,  K(x, x) = 1

The paper prints Σ n where Σ^½ n is meant, and its code estimates 2K. Every component has rows with +μ and rows with −μ,
so that kernels are real and even. Their noise is independent, unlike the paper's: with n shared between the two, all
rows would come in equal pairs at the start (μ = 0), half of them wasted, and the gradient for μ would be zero there
forever. Components start equal, Σ = I and μ = 0, hence at the kernel they replace; their noise tells them apart.

The 2C groups (component and sign) are equally large, the mixing weights 1/C fixed as in the paper (a component that
should count more can have a twin). Where 2C does not divide num_features, some groups have one row more, and feature
weights 1/(2C · size of the group) keep the kernel above exact; a multiple of 2C spares that multiplication.

Cost: as gaussian, plus forming W: num_features · dim products for diagonal Σ, num_features · dim² for full.
Parameters: 2C · dim, or C · (dim² + dim).
"""

from __future__ import annotations

import torch

from snnk_peft.projections import PROJECTIONS
from snnk_peft.projections.base import Learned

COVARIANCES = ("diagonal", "full")


@PROJECTIONS.register("gmm")
class Gmm(Learned):
    """Rows from a Gaussian mixture with learned means and covariances.

    Args:
        components: C, the number of components, >= 1; 2 as in the paper. num_features must be at least 2C.
        covariance: "diagonal" (default) learns a scale per coordinate, "full" any covariance.
        **kwargs: as in `Projection`.

    Attributes:
        root: Σ_c^½, a parameter: (C, dim) for diagonal covariances, (C, dim, dim) for full ones.
        mean: μ_c, a parameter (C, dim).
    """

    root: torch.Tensor
    mean: torch.Tensor

    def __init__(
        self, dim: int, num_features: int, *, components: int = 2, covariance: str = "diagonal", **kwargs: object
    ):
        self.components, self.covariance = components, covariance
        self.params = {"components": components, "covariance": covariance}
        super().__init__(dim, num_features, **kwargs)  # type: ignore[arg-type]
        self.uniform = num_features % (2 * components) == 0

    def argument_faults(self) -> list[str]:
        """A bad number of components, too few rows for them, an unknown kind of covariance."""
        found, count, rows = [], self.components, self.num_features
        if not isinstance(count, int) or isinstance(count, bool) or count < 1:
            found.append(f"gmm components is {count!r}; expected an integer >= 1")
        elif type(rows) is int and 1 <= rows < 2 * count:
            found.append(
                f"gmm num_features is {rows} with {count} components; expected at least {2 * count}, one row with +μ "
                "and one with −μ for each"
            )
        if self.covariance not in COVARIANCES:
            found.append(f"gmm covariance is {self.covariance!r}; expected one of {', '.join(COVARIANCES)}")
        return found

    def initial(self, generator: torch.Generator) -> dict[str, torch.Tensor]:
        """Identity covariances and zero means."""
        shape = (self.components, self.dim)
        ones = torch.ones(shape, device="cpu")
        return {
            "root": ones if self.covariance == "diagonal" else torch.diag_embed(ones),
            "mean": torch.zeros(shape, device="cpu"),
        }

    def group_sizes(self) -> list[int]:
        """Number of rows with (component, sign) = (0, +), (0, −), (1, +), ..., in the order of the rows."""
        groups = 2 * self.components
        return [self.num_features // groups + (group < self.num_features % groups) for group in range(groups)]

    def materialize(self) -> torch.Tensor:
        """W (num_features, dim): Σ_c^½ n ± μ_c, group by group."""
        rows = []
        for group, noise in enumerate(self.noise.split(self.group_sizes())):
            component, negative = divmod(group, 2)
            root, mean = self.root[component], self.mean[component]
            spread = noise * root if self.covariance == "diagonal" else noise @ root.T
            rows.append(spread - mean if negative else spread + mean)
        return torch.cat(rows)

    @property
    def feature_weights(self) -> torch.Tensor:
        """1 / (2C · size of the row's group), (num_features,): 1/num_features where the groups are equally large."""
        sizes = self.group_sizes()
        return torch.cat(
            [torch.full((size,), 1 / (len(sizes) * size), dtype=self.dtype, device=self.device) for size in sizes]
        )

    def covariances(self) -> torch.Tensor:
        """Σ_c, (C, dim, dim)."""
        return torch.diag_embed(self.root.square()) if self.covariance == "diagonal" else self.root @ self.root.mT

    def kernel(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """The exact kernel of cos/sin features, Eq. 4: x and y (..., dim) broadcast over leading axes, result (...)."""
        delta = (x - y).unsqueeze(-2)
        spread = torch.einsum("...cd,cde,...ce->...c", delta, self.covariances().to(delta.dtype), delta)
        return (torch.exp(-spread / 2) * torch.cos((delta * self.mean.to(delta.dtype)).sum(-1))).mean(-1)
