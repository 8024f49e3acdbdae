"""Weight matrices with a fast transform: either the factors of W or W itself is kept, whichever is faster.

Shapes: W is (num_features, dim), x is (..., dim), the result (..., num_features). Both forms are the same matrix.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import torch

from snnk_peft.functional.precision import full_precision
from snnk_peft.options import Option
from snnk_peft.projections.base import Projection
from snnk_peft.projections.base_drawn import site_generator


class Structured(Projection):
    """A matrix with few parameters, applied by a fast transform instead of a dense product.

    A member draws its factors and defines how they act on vectors; whether the factors or the dense W are kept depends
    on `fast`. Both hold the same matrix for the same seed.

    Attributes:
        fast_from: the size from which the fast transform wins on a CPU.
    """

    fast_from: int

    def __init__(
        self,
        dim: int,
        num_features: int,
        *,
        fast: Annotated[
            bool | None,
            Option(
                "True keeps the factors and applies them; no dense W is stored. False stores W and multiplies with it. "
                "None takes whichever is quicker at these sizes: fast from min(dim, num_features) >= `fast_from` on. "
                "Decided once, at construction, and recorded in `params`."
            ),
        ] = None,
        **kwargs: Any,
    ):
        self.params = {**self.params, "fast": fast}
        super().__init__(dim, num_features, **kwargs)

    def settle(self) -> list[str]:
        wanted = self.params["fast"]
        self.fast = min(self.dim, self.num_features) >= self.fast_from if wanted is None else wanted
        self.params = {**self.params, "fast": self.fast}
        return super().settle()

    def draw_factors(self, generator: torch.Generator) -> dict[str, torch.Tensor]:
        """Draw the factors by name, on the CPU: fp32, or int64 for indices."""
        raise TypeError(f"{type(self).__name__} does not define draw_factors(); see Structured")

    def project(self, x: torch.Tensor, factors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Compute x Wᵀ by the fast transform: x (..., dim) -> (..., num_features); all of one dtype, fp32 or finer."""
        raise TypeError(f"{type(self).__name__} does not define project(); see Structured")

    def dense(self, factors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Compute W (num_features, dim) from its factors: the fast transform of the unit vectors."""
        like = next(factor for factor in factors.values() if factor.is_floating_point())
        return self.project(torch.eye(self.dim, dtype=like.dtype, device=like.device), factors).T.contiguous()

    def draw(self, generator: torch.Generator) -> torch.Tensor:
        """Compute W in fp64 from factors in fp32."""
        return self.dense(as_dtype(self.draw_factors(generator), torch.float64))

    def draw_buffers(self, generator: torch.Generator) -> dict[str, torch.Tensor]:
        """Return the factors if fast, else W."""
        return self.draw_factors(generator) if self.fast else super().draw_buffers(generator)

    def blank(self) -> dict[str, torch.Tensor]:
        """Return undefined tensors of the right shapes; drawing a few factors is the easiest way to find these."""
        if not self.fast:
            return super().blank()
        drawn = self.draw_factors(site_generator(self.seed, self.site))
        return {name: torch.empty(factor.shape, dtype=factor.dtype) for name, factor in drawn.items()}

    def factors(self, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        """Return the stored factors in `dtype`."""
        return as_dtype({name: getattr(self, name) for name in self._drawn}, dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute x Wᵀ for x (..., dim); result (..., num_features) in the dtype of x, computed in fp32 or finer."""
        if not self.fast:
            return super().forward(x)
        if x.numel() == 0:  # Fourier transforms reject an empty batch
            return x[..., :1].expand(*x.shape[:-1], self.num_features)
        wide = torch.promote_types(x.dtype, torch.float32)
        with full_precision(x):
            return self.project(x.to(wide), self.factors(wide)).to(x.dtype)

    def materialize(self) -> torch.Tensor:
        """Return W as a dense (num_features, dim) tensor; recomputed on each call if fast."""
        if not self.fast:
            return super().materialize()
        wide = torch.promote_types(self.dtype, torch.float32)
        with full_precision(self.state_tensors()[0]):
            return self.dense(self.factors(wide)).to(self.dtype)


def as_dtype(tensors: Mapping[str, torch.Tensor], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Return floating-point tensors in `dtype`, indices unchanged."""
    return {name: value.to(dtype) if value.is_floating_point() else value for name, value in tensors.items()}
