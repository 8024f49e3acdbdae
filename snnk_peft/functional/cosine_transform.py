"""The discrete cosine transform (type II, orthonormal), by one complex Fourier transform of the same length.

    (Cx)_k = √(2/n) s_k Σ_j x_j cos(π k (2j + 1)/2n),   s_0 = √½, other s_k = 1

The even entries of x and then the odd ones backwards have a Fourier transform whose k-th entry, turned by −πk/2n, has
the wanted sum for its real part (Makhoul 1980). C is orthogonal for every n. Shapes: (..., n) -> (..., n), O(n log n).
"""

from __future__ import annotations

import math

import torch


def cosine_transform(x: torch.Tensor) -> torch.Tensor:
    """Cx for x (..., n), in fp32 or fp64."""
    n = x.shape[-1]
    shuffled = torch.cat((x[..., ::2], x[..., 1::2].flip(-1)), -1)
    angle = torch.arange(n, dtype=x.dtype, device=x.device) * (-math.pi / (2 * n))
    spectrum = torch.fft.fft(shuffled) * torch.complex(angle.cos(), angle.sin())
    return spectrum.real * _cosine_scales(n, x)


def cosine_matrix(n: int, like: torch.Tensor) -> torch.Tensor:
    """C (n, n) by its formula, in the dtype and on the device of `like`."""
    index = torch.arange(n, dtype=torch.float64, device=like.device)
    angles = index[:, None] * (2 * index + 1) * (math.pi / (2 * n))
    return (angles.cos() * _cosine_scales(n, angles)[:, None]).to(like.dtype)


def _cosine_scales(n: int, like: torch.Tensor) -> torch.Tensor:
    """Return the scales √(2/n) s_k of the orthonormal transform, (n,)."""
    scales = torch.full((n,), (2 / n) ** 0.5, dtype=like.dtype, device=like.device)
    scales[0] = n**-0.5
    return scales
