"""Directions and lengths that Gaussian rows are made of: ω = length · direction, both drawn apart so that directions
can be coupled (orthogonal, simplex) while every row alone stays N(0, I).

Everything is drawn on the CPU from a generator and worked out in fp64. Shapes are stated per function.
"""

from __future__ import annotations

import torch

from snnk_peft.functional.random_numbers import normal_numbers


def haar(dim: int, generator: torch.Generator) -> torch.Tensor:
    """A Haar-distributed orthogonal (dim, dim) matrix in fp64: QR of a Gaussian, signs fixed by diag(R)."""
    q, r = torch.linalg.qr(normal_numbers(dim, dim, generator=generator))
    return q * torch.where(r.diagonal() < 0, -1.0, 1.0)


def block_orthogonal(count: int, dim: int, generator: torch.Generator) -> torch.Tensor:
    """Unit rows (count, dim) in fp64, orthogonal within independent Haar blocks of `dim`; the last block is cut."""
    return torch.cat([haar(dim, generator) for _ in range(-(-count // dim))])[:count]


def gaussian_lengths(count: int, dim: int, generator: torch.Generator) -> torch.Tensor:
    """Lengths of `count` independent standard normal vectors of length `dim` (χ_dim), (count,) in fp64."""
    return normal_numbers(count, dim, generator=generator).norm(dim=1)


def simplex(count: int) -> torch.Tensor:
    """Unit vectors to the corners of a regular simplex, (count, count − 1) in fp64; inner products −1/(count − 1).

    Scaled unit vectors, shifted along (1, ..., 1), and that direction itself (Reid et al. 2023; Spectraformer Eq. 26
    without its last coordinate, which is zero).

    Args:
        count: number of corners, >= 2.
    """
    k = count - 1
    corners = torch.full((count, k), -((count**0.5) + 1) / k**1.5, dtype=torch.float64, device="cpu")
    corners.diagonal().add_((count / k) ** 0.5)
    corners[-1] = k**-0.5
    return corners
