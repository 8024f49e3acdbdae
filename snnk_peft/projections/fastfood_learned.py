"""Fastfood with learned diagonals, "FastFoodL" (Le et al. 2013; Yang et al. 2015; Learning the Transformer Kernel,
Eq. 6; Spectraformer, Eq. 17).

    V = d^-½ S H G Π H B    per block of d rows; ⌈num_features / d⌉ independent blocks, the last one truncated

H is the Walsh-Hadamard matrix, Π a permutation, B random signs, G Gaussian, S = χ_d / ‖G‖: every row is N(0, I) at the
start, so this begins as exact Fastfood at the kernel it replaces. (Spectraformer prints ‖G‖^-½ and drops d^-½.) The
bandwidth 1/σ of the papers is part of S. Only χ_d is stored for S and ‖G‖ is computed, so that a G that is learned or
redrawn does not affect the lengths of the rows. If dim is not a power of two, d is the next one and x is padded with
zeros, which keeps dot products; values that act on the padding only are not stored.

Cost: O(num_features · log d) per vector. About 2 to 4 parameters per row instead of dim; no dense W is kept. Below
d = 1024 a dense product is faster (recipes/benchmarks/feature_maps.py), so W is formed on the fly if there are
more vectors than it has columns.
"""

from __future__ import annotations

from typing import Annotated

import torch
from torch import nn

from snnk_peft.functional.backend import exporting
from snnk_peft.functional.hadamard import fastfood_product, next_power_of_two
from snnk_peft.functional.precision import full_precision
from snnk_peft.functional.random_numbers import gaussian_lengths, normal_numbers, random_permutation, random_signs
from snnk_peft.options import Option
from snnk_peft.projections import PROJECTIONS
from snnk_peft.projections.base_learned import Learned

FAST_FROM = 1024  # d from which the transform is faster than the dense product


@PROJECTIONS.register("fastfood_learned")
class FastfoodLearned(Learned):
    """Structured W with learned diagonal factors.

    Attributes:
        lengths: χ_d of S, (num_features,), a parameter: ‖ω_i‖ as long as B consists of signs and nothing is padded.
        gauss: diagonal of G, (blocks, d).
        signs: diagonal of B, (blocks, dim).
        permutation: Π of all blocks as positions in their concatenation, (blocks · d,) int64.
    """

    formula = "d^-½ S H G Π H B, learned diagonals"
    source = "Learning the Transformer Kernel Eq. 6"
    cost = "m log d"

    lengths: torch.Tensor
    gauss: torch.Tensor
    signs: torch.Tensor
    permutation: torch.Tensor

    def __init__(
        self,
        dim: int,
        num_features: int,
        *,
        learn: Annotated[
            str,
            Option(
                '"SGB" (the papers\' choice) trains all three diagonals, "S" the lengths of the rows only. What is not '
                'trained is random, and is drawn anew by `redraw_every`; with "SGB" that leaves the permutations.',
                choices=("S", "SGB"),
            ),
        ] = "SGB",
        **kwargs: object,
    ):
        self.learn, self.params = learn, {"learn": learn}
        super().__init__(dim, num_features, **kwargs)  # type: ignore[arg-type]

    @property
    def order(self) -> int:
        """Return the rows of a block, d: `dim` or the next power of two."""
        return next_power_of_two(self.dim)

    @property
    def blocks(self) -> int:
        return -(-self.num_features // self.order)

    def draw_buffers(self, generator: torch.Generator) -> dict[str, torch.Tensor]:
        """Draw permutations, and the diagonals that are not learned."""
        shifted = [random_permutation(self.order, generator) + block * self.order for block in range(self.blocks)]
        kept = {} if self.learn == "SGB" else self._diagonals(generator)
        return {"permutation": torch.cat(shifted), **kept}

    def initial(self, generator: torch.Generator) -> dict[str, torch.Tensor]:
        """Draw lengths of Gaussian vectors, and the other diagonals if they are learned."""
        learned = self._diagonals(generator) if self.learn == "SGB" else {}
        return {"lengths": gaussian_lengths(self.num_features, self.order, generator), **learned}

    def _diagonals(self, generator: torch.Generator) -> dict[str, torch.Tensor]:
        """Draw the diagonals G and B."""
        signs = random_signs(self.blocks, self.dim, generator=generator)
        gauss = normal_numbers(self.blocks, self.order, generator=generator).float()
        return {"gauss": gauss, "signs": signs}

    def _product(self, x: torch.Tensor) -> torch.Tensor:
        """Compute x Vᵀ, all in the dtype of x."""
        pad, padding = nn.functional.pad, (0, self.order - self.dim)
        lengths = pad(self.lengths.to(x.dtype), (0, self.blocks * self.order - self.num_features))
        gauss = nn.functional.normalize(self.gauss.to(x.dtype), dim=-1, eps=torch.finfo(x.dtype).tiny)
        signs, scaling = pad(self.signs.to(x.dtype), padding), lengths.unflatten(0, (self.blocks, self.order))
        rows = fastfood_product(pad(x, padding), signs, self.permutation, gauss, scaling)
        return rows.flatten(-2)[..., : self.num_features]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute x Vᵀ for x (..., dim) in fp32 or finer by fast transforms or, if faster, through V; dtype of x."""
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        with full_precision(x):
            # An exported graph must work for any number of vectors.
            if self.order >= FAST_FROM or exporting() or x.numel() <= self.dim**2:
                return self._product(wide).to(x.dtype)
            rows = self._product(torch.eye(self.dim, dtype=wide.dtype, device=x.device)).T
            return nn.functional.linear(wide, rows).to(x.dtype)

    def rows(self) -> torch.Tensor:
        """Return V as a dense (num_features, dim) tensor, computed on demand."""
        wide = torch.promote_types(self.dtype, torch.float32)
        return self._product(torch.eye(self.dim, dtype=wide, device=self.device)).T.to(self.dtype)
