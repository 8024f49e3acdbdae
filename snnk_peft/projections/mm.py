"""Moment matching: quasi-Monte Carlo rows with sample mean exactly 0 and sample covariance exactly I (Shen et al. 2017;
Spectraformer's "MM", Ã⁻¹(Φ⁻¹(t_i) − μ̃)).

    W <- (W − 1 μᵀ) C^-½,   μ = mean of the rows, C = covariance of the rows:   Σ_i ω_i = 0, WᵀW/m = I

so linear and quadratic functions are averaged without error, Σ_i (ω_i·x)(ω_i·y)/m = x·y. The symmetric root moves the
rows as little as possible. A covariance of full rank needs num_features > dim; below, only the mean is matched. (The
paper's code whitens independent draws instead of quasi-Monte Carlo points.)

Not unbiased: what is matched within a draw is no longer independent of the rows. The error falls faster than that of
the plain sequence for smooth functions.

Cost: as gaussian; drawing takes an eigendecomposition of a (dim, dim) matrix.
"""

from __future__ import annotations

from typing import Annotated, Any

import torch

from snnk_peft.errors import ConfigError
from snnk_peft.functional.low_discrepancy import MAX_SOBOL_DIM, normal_points
from snnk_peft.options import Option
from snnk_peft.projections import PROJECTIONS
from snnk_peft.projections.base import Projection

SMALLEST_EIGENVALUE = 1e-5  # relative to the largest; below it, whitening would amplify rounding errors


@PROJECTIONS.register("mm")
class Mm(Projection):
    """Quasi-Monte Carlo rows with exact first and second moments."""

    formula = "qmc points shifted and stretched to mean 0, covariance I"
    source = "Shen et al. 2017; Spectraformer"
    cost = "m·d"

    unbiased = False

    def __init__(
        self,
        dim: int,
        num_features: int,
        *,
        sequence: Annotated[
            str, Option('"sobol" has at most 21201 dimensions.', choices=("sobol", "halton"))
        ] = "sobol",
        scramble: Annotated[
            bool,
            Option("randomise the sequence by the seed. False gives the same matrix for every seed and site."),
        ] = True,
        covariance: Annotated[
            bool | None,
            Option("match the covariance as well as the mean; needs num_features > dim. None: where possible."),
        ] = None,
        **kwargs: Any,
    ):
        self.sequence, self.scramble, self.covariance = sequence, scramble, covariance
        self.params = {"sequence": sequence, "scramble": scramble, "covariance": covariance}
        self.seeded = bool(scramble)
        super().__init__(dim, num_features, **kwargs)

    @classmethod
    def nearest_size(cls, dim: int, num_features: int, **params: Any) -> int:
        """Require at least two rows; more than dim to match the covariance."""
        return max(2, num_features, dim + 1 if params.get("covariance") else 0)

    def settle(self) -> list[str]:
        """Determine what can be matched."""
        found = super().settle()
        if self.sequence == "sobol" and self.dim > MAX_SOBOL_DIM:
            found.append(f"mm dim is {self.dim}; sequence 'sobol' has {MAX_SOBOL_DIM} at most, use 'halton'")
        if self.num_features == 1:
            found.append("mm num_features is 1; a single row minus its mean is 0, take 2 or more")
        if self.covariance is None:
            self.covariance = self.num_features > self.dim
        elif self.covariance and self.num_features <= self.dim:
            found.append(
                f"mm covariance is True with num_features {self.num_features} and dim {self.dim}; {self.num_features} "
                f"centred rows cannot span {self.dim} dimensions: take num_features >= {self.dim + 1}, or "
                "covariance=False to match the mean only"
            )
        self.params = {**self.params, "covariance": self.covariance}
        return found

    def draw(self, generator: torch.Generator) -> torch.Tensor:
        rows = normal_points(self.sequence, self.num_features, self.dim, generator if self.scramble else None)
        rows = rows - rows.mean(0)
        if not self.covariance:
            return rows
        values, vectors = torch.linalg.eigh(rows.T @ rows / self.num_features)
        if values[0] < SMALLEST_EIGENVALUE * values[-1]:
            raise ConfigError(
                f"mm cannot match the covariance: {self.num_features} points of the {self.sequence} sequence "
                f"(scramble={self.scramble}) are almost collinear in {self.dim} dimensions; take more features, "
                "scramble=True or covariance=False"
            )
        return rows @ (vectors * values.rsqrt()) @ vectors.T
