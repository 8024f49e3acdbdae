"""GatedReadout: scaling · v ⊙ (z Aᵀ), the trainable half of an adapter (SNNK paper, Eq. 22 and App. D).

Shapes: z (..., feature_dim) -> (..., dim); A (dim, feature_dim), v (dim,). Trainable: dim·(m + 1) parameters with the
gate, dim·m without (the paper prints (dim + 1)·m). It starts at 0, because v = 0 (the paper's form) or because A = 0 on
normalised inputs (the default).
"""

from __future__ import annotations

import torch
from torch import nn

from snnk_peft.errors import ConfigError
from snnk_peft.functional.random_numbers import normal_numbers
from snnk_peft.functional.residual import residual_linear
from snnk_peft.layers.adapter_step import adapter_step, readout_step
from snnk_peft.layers.feature_stage import FeatureStage


class GatedReadout(nn.Module):
    """scaling · v ⊙ (features Aᵀ), the trainable half of an adapter.

    Args:
        stage: the features it will read; decides the sizes.
        init: "default": A = 0 (only without gate). "paper": A = Φ(W₀), W₀ random with N(0, 1/dim) entries.
            "random": A ~ N(0, 1/feature_dim).
        gate: whether there is a vector v, which starts at 0.
        scaling: constant factor.
        out_dim: length of the outputs; None for that of the inputs.
        generator: randomness of `init`.

    Raises:
        ConfigError: an unknown init, or one under which the block is not the identity or gets no gradient.
    """

    def __init__(
        self,
        stage: FeatureStage,
        *,
        init: str = "default",
        gate: bool = False,
        scaling: float = 1.0,
        out_dim: int | None = None,
        generator: torch.Generator | None = None,
    ):
        super().__init__()
        if init not in ("default", "paper", "random"):
            raise ConfigError(f"init is {init!r}; expected 'default', 'paper' or 'random'")
        if (init == "default") == gate:
            raise ConfigError(
                f"init={init!r} with gate={gate}: the block must start as the identity with a gradient for something; "
                "use init='default' without a gate, or init='paper' or 'random' with one"
            )
        self.scaling = scaling
        dim, features = stage.dim if out_dim is None else out_dim, stage.out_dim
        if stage.feature_map.projection.is_blank():
            A = torch.empty(dim, features, device="meta")  # a loader brings it too
        elif init == "default":
            A = torch.zeros(dim, features)
        elif init == "random":
            A = normal_numbers(dim, features, generator=generator).float() * features**-0.5
        else:
            weight = normal_numbers(dim, stage.dim, generator=generator).float() * stage.dim**-0.5
            with torch.no_grad():
                A = stage.feature_map.psi(weight * stage.scale).dense()
        self.A = nn.Parameter(A)
        self.v = nn.Parameter(torch.zeros(dim)) if gate else None

    def forward(self, features: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """residual + scaling · v ⊙ (features Aᵀ), in the dtype of the residual.

        Args:
            features: (..., feature_dim).
            residual: (..., out_dim), what is added; fused into the product.
        """
        summed = readout_step(self, features, residual)
        return residual_linear(residual, features.to(self.A.dtype), self.matrix()) if summed is None else summed

    def step(self, stage: FeatureStage, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor | None:
        """residual + scaling · v ⊙ (Φ(x) Aᵀ) as one operation, or None; see `adapter_step`.

        Args:
            stage: Φ.
            x: (..., dim).
            residual: (..., out_dim); may be x.
        """
        return adapter_step(stage, self, x, None if residual is x else residual)

    def gated(self) -> torch.Tensor:
        """diag(v) A, (out_dim, feature_dim)."""
        return self.A if self.v is None else self.v[:, None] * self.A

    def matrix(self) -> torch.Tensor:
        """scaling · diag(v) A: the one matrix that everything folds into, (out_dim, feature_dim).

        Gate and scaling act on this small matrix and not on the hidden states, in training as in a bundle.
        """
        A = self.A if self.scaling == 1.0 else self.A * self.scaling
        return A if self.v is None else self.v[:, None] * A
