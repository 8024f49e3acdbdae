"""Spherical structured features (Lyu 2017; Spectraformer's "SSF"): ω_i = length · v_i, v_i spread evenly on the sphere.

The directions are m unit vectors made of dim/2 rows of the m/2 × m/2 discrete Fourier matrix, chosen to minimise the
Riesz energy (`fourier_indices`): Σ_i v_i v_iᵀ = (m/dim) I, and close pairs are avoided. Sizes: m even and
>= dim + 2. An odd dim is one coordinate of the next even dimension left out.

Lengths are χ, independent of directions. The paper uses one-dimensional quasi-Monte Carlo points for them and leaves
the directions unchanged; here a Haar rotation turns all of them (`rotate`). With both, each row alone is exactly
N(0, I) and estimates are unbiased. Equal lengths √dim have less variance and a bias that vanishes as dim grows; without
the rotation the error of the point set on the sphere remains.

Cost: as gaussian; drawing searches for the Fourier rows, about a second at dim = 768.
"""

from __future__ import annotations

from typing import Annotated, Any

import torch

from snnk_peft.functional.random_numbers import gaussian_lengths, haar, random_permutation
from snnk_peft.options import Option
from snnk_peft.projections import PROJECTIONS
from snnk_peft.projections.base import Projection


@PROJECTIONS.register("ssf")
class Ssf(Projection):
    """Even directions from the discrete Fourier matrix."""

    formula = "χ_d lengths times points of low Riesz energy on the sphere"
    source = "Lyu 2017; Spectraformer"
    cost = "m·d"

    def __init__(
        self,
        dim: int,
        num_features: int,
        *,
        norms: Annotated[
            str,
            Option(
                '"chi" draws each row\'s length as a Gaussian row has it; "sqrt_dim" gives every row √dim.',
                choices=("chi", "sqrt_dim"),
            ),
        ] = "chi",
        rotate: Annotated[bool, Option("turn all directions by one random rotation.")] = True,
        **kwargs: Any,
    ):
        self.norms, self.rotate = norms, rotate
        self.params = {"norms": norms, "rotate": rotate}
        super().__init__(dim, num_features, **kwargs)
        self.unbiased = norms == "chi" and rotate
        self.sampled_lengths = norms == "chi"

    @classmethod
    def nearest_size(cls, dim: int, num_features: int, **params: Any) -> int:
        """Return the next even number, at least dim + 2 (dim + 3 if odd)."""
        return max(dim + dim % 2 + 2, num_features + num_features % 2)

    def settle(self) -> list[str]:
        """Require an even number of points, more than dimensions."""
        found, nearest = super().settle(), self.nearest_size(self.dim, self.num_features)
        if self.num_features != nearest:
            found.append(
                f"ssf num_features is {self.num_features} with dim {self.dim}; expected an even number >= "
                f"{self.nearest_size(self.dim, 1)}, e.g. {nearest}"
            )
        return found

    def draw(self, generator: torch.Generator) -> torch.Tensor:
        even, n = self.dim + self.dim % 2, self.num_features // 2
        rows = sphere_points(fourier_indices(even // 2, n, generator), n)
        if self.rotate:
            rows = rows @ haar(even, generator)
        if self.norms == "sqrt_dim":
            return rows[:, : self.dim] * even**0.5
        return rows[:, : self.dim] * gaussian_lengths(self.num_features, even, generator)[:, None]


RIESZ_POWER = 2.0
RIESZ_CANDIDATES = 32  # exchanges tried per index and sweep; all of them where n is small
RIESZ_SWEEPS = 2
RIESZ_TIE = 1e-6  # relative differences of energies below this are noise


def sphere_points(indices: torch.Tensor, n: int) -> torch.Tensor:
    """Return v_1, ..., v_2n as rows, (2n, 2h) in fp64, for the rows Λ = `indices` (h,) of the n × n Fourier matrix.

    Its n columns f_j have entries of modulus 1, and v_j = [Re f_j, Im f_j] / √h, v_{n+j} = [−Im f_j, Re f_j] / √h are
    unit vectors with Σ v vᵀ = (n/h) I. All inner products are values of one sequence, <v_i, v_j> = Re c_{j−i} and <v_i,
    v_{n+j}> = −Im c_{j−i} with c_t = Σ_{k∈Λ} e^{2πikt/n} / h, so the Riesz energy Σ_{i≠j} ‖v_i − v_j‖^−s takes O(n) to
    evaluate.
    """
    angle = (torch.arange(n, device="cpu")[:, None] * indices % n).double() * (2 * torch.pi / n)
    real, imaginary = angle.cos(), angle.sin()
    points = torch.cat((torch.cat((real, imaginary), 1), torch.cat((-imaginary, real), 1)))
    return points * len(indices) ** -0.5


def riesz_energy(correlation: torch.Tensor) -> torch.Tensor:
    """Average ‖v_i − v_j‖^−s over pairs i ≠ j, from complex c (..., n): (...). Coincident points cost 10¹²ˢ."""
    # ‖v − w‖² = 2 − 2<v, w>; c_0 = 1 pairs v_i with itself, and its imaginary part v_i with v_{n+i}.
    inner = torch.cat((correlation.real[..., 1:], -correlation.imag), -1)
    return (2 - 2 * inner).clamp_min(1e-12).pow(-RIESZ_POWER / 2).mean(-1)


def fourier_indices(h: int, n: int, generator: torch.Generator) -> torch.Tensor:
    """Choose Λ, h distinct indices from 1 .. n − 1, n > h, with low Riesz energy, (h,).

    By coordinate descent: each index in turn is exchanged for the best of some candidates; the local optimum found
    depends on the seed. Cost O(sweeps · h · candidates · n).
    """
    order = random_permutation(n - 1, generator) + 1
    chosen, free = order[:h].clone(), order[h:].clone()
    if not len(free):
        return chosen
    # Columns k of the Fourier matrix by gathering from one table of roots of unity.
    turns = torch.arange(n, device="cpu")
    roots = torch.polar(torch.ones(n, dtype=torch.float64, device="cpu"), turns.double() * (2 * torch.pi / n))
    total = roots[chosen[:, None] * turns % n].sum(0)
    energy = riesz_energy(total / h)
    for _ in range(RIESZ_SWEEPS):
        for place in range(h):
            tried = random_permutation(len(free), generator)[:RIESZ_CANDIDATES]
            sums = total - roots[chosen[place] * turns % n] + roots[free[tried][:, None] * turns % n]
            found = riesz_energy(sums / h)
            # Symmetric choices have equal energies: take the first, and none for a gain within rounding.
            best = int((found <= found.min() * (1 + RIESZ_TIE)).nonzero()[0])
            if found[best] < energy * (1 - RIESZ_TIE):
                energy, total = found[best], sums[best]
                old = chosen[place].clone()
                chosen[place] = free[tried[best]]
                free[tried[best]] = old
    return chosen
