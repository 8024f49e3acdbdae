"""Random numbers that are the same on every machine, whatever its CPU, number of threads and version of torch.

torch.randn differs between CPUs: its vectorised forms round differently (entries differ by 2e-5), and
its stream may change between versions. Here only whole numbers are drawn, and all else is a function of them:

    generator --8 whole numbers--> key of a Philox counter generator --> 64-bit words k --> u = (k/2¹² + ½) / 2⁵²
    normal: Φ⁻¹(u),   sign: the top bit of k,   permutation: the order of the words,   others: quantiles of u

The words are exact everywhere (numpy guarantees the stream of Philox); functions of them are exact to the last bits of
fp64, which almost never show in fp32.

Rows ω = length · direction are drawn in two parts, so that directions can be coupled (orthogonal, simplex) or lengths
(χ_d, through its quantiles) while every row alone stays N(0, I).

Shapes: as requested; fp64 on the CPU unless stated. A generator of None is torch's global one.
"""

from __future__ import annotations

import math

import numpy as np
import torch


def haar(dim: int, generator: torch.Generator) -> torch.Tensor:
    """Return a Haar-distributed orthogonal (dim, dim) matrix in fp64: QR of a Gaussian, signs fixed by diag(R)."""
    q, r = torch.linalg.qr(normal_numbers(dim, dim, generator=generator))
    return q * torch.where(r.diagonal() < 0, -1.0, 1.0)


def block_orthogonal(count: int, dim: int, generator: torch.Generator) -> torch.Tensor:
    """Return unit rows (count, dim) in fp64, orthogonal in independent Haar blocks of `dim`; the last is cut."""
    return torch.cat([haar(dim, generator) for _ in range(-(-count // dim))])[:count]


def gaussian_lengths(count: int, dim: int, generator: torch.Generator) -> torch.Tensor:
    """Return lengths of `count` independent standard normal vectors of length `dim` (χ_dim), (count,) in fp64."""
    return normal_numbers(count, dim, generator=generator).norm(dim=1)


def simplex(count: int) -> torch.Tensor:
    """Return unit vectors to a regular simplex's corners, (count, count − 1) in fp64; products −1/(count − 1).

    Scaled unit vectors, shifted along (1, ..., 1), and that direction itself (Reid et al. 2023; Spectraformer Eq. 26
    without its last coordinate, which is zero).
    """
    k = count - 1
    corners = torch.full((count, k), -((count**0.5) + 1) / k**1.5, dtype=torch.float64, device="cpu")
    corners.diagonal().add_((count / k) ** 0.5)
    corners[-1] = k**-0.5
    return corners


def random_words(count: int, generator: torch.Generator | None) -> np.ndarray:
    """Draw `count` independent uniform 64-bit words (uint64); the generator advances equally for any count."""
    parts = torch.randint(2**16, (8,), generator=generator, device="cpu").tolist()
    key = sum(part << (16 * place) for place, part in enumerate(parts))
    return np.random.Philox(key=key).random_raw(count)


def uniform_numbers(*shape: int, generator: torch.Generator | None) -> torch.Tensor:
    """Draw independent uniform numbers in the open interval (0, 1)."""
    # 52 bits and a half: exact in fp64, never 0 or 1, and symmetric about ½.
    steps = (random_words(math.prod(shape), generator) >> np.uint64(12)).astype(np.float64)
    return torch.from_numpy((steps + 0.5) * 2.0**-52).reshape(shape)


def normal_numbers(*shape: int, generator: torch.Generator | None) -> torch.Tensor:
    """Draw independent standard normal numbers."""
    return torch.special.ndtri(uniform_numbers(*shape, generator=generator))


def random_signs(*shape: int, generator: torch.Generator | None) -> torch.Tensor:
    """Draw independent ±1 with equal probability (Rademacher), fp32."""
    bits = (random_words(math.prod(shape), generator) >> np.uint64(63)).astype(np.float32)
    return torch.from_numpy(2 * bits - 1).reshape(shape)


def random_permutation(count: int, generator: torch.Generator | None) -> torch.Tensor:
    """Return the numbers 0 .. count − 1 in random order, int64."""
    return torch.from_numpy(np.argsort(random_words(count, generator), kind="stable"))


def random_choices(probability: torch.Tensor, count: int, generator: torch.Generator | None) -> torch.Tensor:
    """Draw `count` independent indices, each i with probability[i] (a vector that sums to 1), int64."""
    upper = probability.to("cpu", torch.float64).cumsum(0)
    found = torch.searchsorted(upper, uniform_numbers(count, generator=generator), right=True)
    return found.clamp_max(len(probability) - 1)


def chi_quantile(probability: torch.Tensor, dim: int) -> torch.Tensor:
    """Compute F⁻¹ on (0, 1), fp64, within 1e-9 (torch's accuracy of F) and up to √d + 9, d = `dim`."""
    half = torch.full_like(probability, dim / 2)
    # Beyond √d + 9 there is less than 2⁻⁵³ of all lengths.
    low, high = torch.zeros_like(probability), torch.full_like(probability, dim**0.5 + 9.0)
    for _ in range(64):
        middle = (low + high) / 2
        below = torch.special.gammainc(half, middle.square() / 2) < probability
        low, high = torch.where(below, middle, low), torch.where(below, high, middle)
    return (low + high) / 2


def paired_lengths(count: int, dim: int, generator: torch.Generator) -> torch.Tensor:
    """Draw lengths F⁻¹(u), F⁻¹(1 − u), F⁻¹(u'), F⁻¹(1 − u'), ...: (count,); the last one single for odd counts."""
    uniform = uniform_numbers(-(-count // 2), generator=generator)
    return chi_quantile(torch.stack((uniform, 1 - uniform), 1).flatten()[:count], dim)


def stratified_lengths(count: int, dim: int, generator: torch.Generator) -> torch.Tensor:
    """Draw lengths F⁻¹(u_i), one uniform u_i in each of `count` equal parts of (0, 1), in random order: (count,)."""
    place = random_permutation(count, generator).double()
    return chi_quantile((place + uniform_numbers(count, generator=generator)) / count, dim)
