"""The χ_d distribution, that of the length of a standard normal vector of length d, by its quantiles.

    F(r) = P(d/2, r²/2),  P the regularised lower incomplete gamma function

F⁻¹ is found by bisection: F is monotone and its inverse has no closed form. Shapes: any; fp64 on the CPU. Lengths that
are coupled keep the distribution each, since F⁻¹ of a uniform number has it.
"""

from __future__ import annotations

import torch

from snnk_peft.functional.random_numbers import random_permutation, uniform_numbers


def chi_quantile(probability: torch.Tensor, dim: int) -> torch.Tensor:
    """F⁻¹, within 1e-9 (what torch knows F to) and up to √d + 9.

    Args:
        probability: numbers in the open interval (0, 1), fp64.
        dim: d >= 1.
    """
    half = torch.full_like(probability, dim / 2)
    # Beyond √d + 9 there are less than 2⁻⁵³ of all lengths.
    low, high = torch.zeros_like(probability), torch.full_like(probability, dim**0.5 + 9.0)
    for _ in range(64):
        middle = (low + high) / 2
        below = torch.special.gammainc(half, middle.square() / 2) < probability
        low, high = torch.where(below, middle, low), torch.where(below, high, middle)
    return (low + high) / 2


def paired_lengths(count: int, dim: int, generator: torch.Generator) -> torch.Tensor:
    """Lengths F⁻¹(u), F⁻¹(1 − u), F⁻¹(u'), F⁻¹(1 − u'), ...: (count,); the last one alone where count is odd."""
    uniform = uniform_numbers(-(-count // 2), generator=generator)
    return chi_quantile(torch.stack((uniform, 1 - uniform), 1).flatten()[:count], dim)


def stratified_lengths(count: int, dim: int, generator: torch.Generator) -> torch.Tensor:
    """Lengths F⁻¹(u_i), one uniform number u_i in each of `count` equal parts of (0, 1), in random order: (count,)."""
    place = random_permutation(count, generator).double()
    return chi_quantile((place + uniform_numbers(count, generator=generator)) / count, dim)
