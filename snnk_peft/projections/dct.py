"""Rows of the discrete cosine transform with quasi-Monte Carlo lengths (DiJiang, Chen et al. 2024): a block is

    W = T P (C D)^t,   C the orthonormal cosine transform of order dim, D random signs, P a random order of the rows

and T holds the lengths F⁻¹(u_i), F the distribution function of χ_dim and u_i one random point in each of num_features
equal parts of (0, 1), in random order. C has any order: unlike Hadamard matrices it needs no padding. Rows of a block
are orthogonal, their lengths are those of Gaussian rows, each exactly χ_dim and together an even sample of it.

The paper uses T C alone, with the rows of C in order, and claims that this samples the Gaussian. It does not: in
all draws the directions are the fixed C, so the estimate of e^{x·y} depends on the order of the coordinates, and not
even E ωωᵀ is I (entries of a row of C differ in size). Signs and a random order of the rows give each row the mean 0
and E ωωᵀ = I exactly, hence correct means of polynomials up to degree 3, also in a cut block. Beyond these W is
not Gaussian, so not unbiased: for t = 1 the fourth moment of a coordinate is about 1.5 instead of 3 (cosines stay
within ±√2); t = 2 mixes the coordinates before, and it is between 3 and 3 + 3/dim from dim = 8 on.

The paper's factor e^{−‖x‖²} is that of the Gaussian kernel (kernel="gaussian" of `posrf`), not of softmax. Its learned
weights of the rows are left out: equal ones estimate the kernel, and readouts weight features anyway.

Cost per vector: O(t m log dim) by the fast Fourier transform, m · dim as a dense product. Storage: t + 2 values a row.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any

import torch

from snnk_peft.functional.circulant import FOURIER_FAST_FROM
from snnk_peft.functional.random_numbers import random_permutation, random_signs, stratified_lengths
from snnk_peft.options import Option
from snnk_peft.projections import PROJECTIONS
from snnk_peft.projections.base_structured import Structured


@PROJECTIONS.register("dct")
class Dct(Structured):
    """Cosine transforms of randomly signed coordinates."""

    formula = "χ_d lengths, one per stratum, times P (C D)^t, C the cosine transform"
    source = "DiJiang (Chen et al. 2024), with random signs"
    cost = "m log d (fast), m·d"

    unbiased = False
    fast_from = FOURIER_FAST_FROM

    def __init__(
        self,
        dim: int,
        num_features: int,
        *,
        rounds: Annotated[
            int,
            Option(
                "t, how many times signs and the transform act. 1 is nearest to the paper, 2 nearer to Gaussian rows, "
                "at twice the cost where the fast transform is used.",
                low=1,
                high=64,
            ),
        ] = 2,
        **kwargs: Any,
    ):
        self.rounds, self.params = rounds, {"rounds": rounds}
        super().__init__(dim, num_features, **kwargs)

    def draw_factors(self, generator: torch.Generator) -> dict[str, torch.Tensor]:
        """Draw signs (t, blocks, dim) in order of action, then order and lengths of the rows (num_features,)."""
        blocks = -(-self.num_features // self.dim)
        signs = random_signs(self.rounds, blocks, self.dim, generator=generator)
        orders = [random_permutation(self.dim, generator) + block * self.dim for block in range(blocks)]
        lengths = stratified_lengths(self.num_features, self.dim, generator)
        return {"signs": signs, "order": torch.cat(orders)[: self.num_features], "lengths": lengths.float()}

    def project(self, x: torch.Tensor, factors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Flip signs and transform, once per block and round; then reorder and scale the rows."""
        z = x.unsqueeze(-2)
        for signs in factors["signs"]:
            z = cosine_transform(z * signs)
        return z.flatten(-2)[..., factors["order"]] * factors["lengths"]

    def dense(self, factors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Compute W by matrix products, which round less than transforms."""
        signs = factors["signs"]
        cosines = cosine_matrix(self.dim, signs)
        block = cosines * signs[-1].unsqueeze(-2)
        for earlier in signs.flip(0)[1:]:
            block = block @ (cosines * earlier.unsqueeze(-2))
        return (block.flatten(0, 1)[factors["order"]] * factors["lengths"].unsqueeze(-1)).contiguous()


def cosine_transform(x: torch.Tensor) -> torch.Tensor:
    """Compute Cx for x (..., n), in fp32 or fp64, C the orthonormal cosine transform of type II:

        (Cx)_k = √(2/n) s_k Σ_j x_j cos(π k (2j + 1)/2n),   s_0 = √½, other s_k = 1

    The even entries of x and then the odd ones backwards have a Fourier transform whose k-th entry, rotated by −πk/2n,
    has the desired sum as its real part (Makhoul 1980).
    """
    n = x.shape[-1]
    shuffled = torch.cat((x[..., ::2], x[..., 1::2].flip(-1)), -1)
    angle = torch.arange(n, dtype=x.dtype, device=x.device) * (-math.pi / (2 * n))
    spectrum = torch.fft.fft(shuffled) * torch.complex(angle.cos(), angle.sin())
    return spectrum.real * _cosine_scales(n, x)


def cosine_matrix(n: int, like: torch.Tensor) -> torch.Tensor:
    """Compute C (n, n) by its formula, in the dtype and on the device of `like`."""
    index = torch.arange(n, dtype=torch.float64, device=like.device)
    angles = index[:, None] * (2 * index + 1) * (math.pi / (2 * n))
    return (angles.cos() * _cosine_scales(n, angles)[:, None]).to(like.dtype)


def _cosine_scales(n: int, like: torch.Tensor) -> torch.Tensor:
    scales = torch.full((n,), (2 / n) ** 0.5, dtype=like.dtype, device=like.device)
    scales[0] = n**-0.5
    return scales
