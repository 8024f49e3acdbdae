"""Circulant, Toeplitz and Hankel matrices: products by the fast Fourier transform, and dense forms by indexing.

    circulant C_ij = c[(i − j) mod n],   Toeplitz T_ij = g[i − j + n − 1],   Hankel K_ij = g[i + j]

Shapes: x (..., n), one matrix per block: c (blocks, n), g (blocks, 2n − 1) -> (..., blocks, n). Cost
O(blocks · n log n) per vector. A Hankel product is the Toeplitz product of the reversed vector.
"""

from __future__ import annotations

import torch

# Size from which transforms beat a dense product on one CPU thread: circulant 256, Toeplitz and Hankel (twice as long)
# 512.
FOURIER_FAST_FROM = 512


def circulant_product(x: torch.Tensor, column: torch.Tensor) -> torch.Tensor:
    """Compute x Cᵀ, the circular convolution of x (..., n) with each first column, `column` (blocks, n)."""
    n = column.shape[-1]
    return torch.fft.irfft(torch.fft.rfft(x.unsqueeze(-2)) * torch.fft.rfft(column), n=n)


def toeplitz_product(x: torch.Tensor, diagonals: torch.Tensor) -> torch.Tensor:
    """Compute x Tᵀ for x (..., n), `diagonals` g (blocks, 2n − 1), from the top right to the bottom left corner."""
    n = x.shape[-1]
    # A linear convolution; with 2n − 1 points or more, wrap-around does not reach the n values needed.
    spectrum = torch.fft.rfft(x.unsqueeze(-2), n=2 * n) * torch.fft.rfft(diagonals, n=2 * n)
    return torch.fft.irfft(spectrum, n=2 * n)[..., n - 1 : 2 * n - 1]


def hankel_product(x: torch.Tensor, diagonals: torch.Tensor) -> torch.Tensor:
    """Compute x Kᵀ for x (..., n), `diagonals` g (blocks, 2n − 1), from the top left to the bottom right corner."""
    return toeplitz_product(x.flip(-1), diagonals)


def circulant_matrix(column: torch.Tensor) -> torch.Tensor:
    """Return C (blocks, n, n) from first columns (blocks, n)."""
    index = torch.arange(column.shape[-1], device=column.device)
    return column[:, (index[:, None] - index) % len(index)]


def toeplitz_matrix(diagonals: torch.Tensor) -> torch.Tensor:
    """Return T (blocks, n, n) from g (blocks, 2n − 1)."""
    index = torch.arange((diagonals.shape[-1] + 1) // 2, device=diagonals.device)
    return diagonals[:, index[:, None] - index + len(index) - 1]


def hankel_matrix(diagonals: torch.Tensor) -> torch.Tensor:
    """Return K (blocks, n, n) from g (blocks, 2n − 1)."""
    index = torch.arange((diagonals.shape[-1] + 1) // 2, device=diagonals.device)
    return diagonals[:, index[:, None] + index]
