"""The Walsh-Hadamard transform x -> x H, H the Sylvester matrix with entries ±1 (unnormalised, H Hᵀ = n I).

Shapes: (..., n) -> (..., n), n a power of two. Cost O(n log n) per vector: n is split into factors of at most 32, and H
is the Kronecker product of the Hadamard matrices of the factors, so each factor is one small dense product. On a CPU
that is several times faster than butterflies of radix two, which read and write every vector log₂ n times.
"""

from __future__ import annotations

import math

import torch

from snnk_peft.functional.backend import dispatched

RADIX = 32


def is_power_of_two(n: int) -> bool:
    """Return True for 1, 2, 4, 8, ..."""
    return n > 0 and n & (n - 1) == 0


def next_power_of_two(n: int) -> int:
    """The smallest power of two that is >= n; zero-padding to it keeps dot products."""
    return 1 << (n - 1).bit_length()


def hadamard_matrix(n: int, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu") -> torch.Tensor:
    """H (n, n) by Sylvester's construction, symmetric.

    Raises:
        ValueError: n is not a power of two.
    """
    if not is_power_of_two(n):
        raise ValueError(
            f"n is {n}; a Sylvester Hadamard matrix needs a power of two, e.g. {next_power_of_two(max(n, 1))}"
        )
    index = torch.arange(n, device=device)
    # H_ij = (−1)^(number of common one-bits of i and j)
    common = index[:, None] & index[None, :]
    parity = torch.zeros_like(common)
    for bit in range(max(1, n.bit_length())):
        parity ^= common >> bit & 1
    return (1 - 2 * parity).to(dtype)


def walsh_hadamard(x: torch.Tensor) -> torch.Tensor:
    """x H along the last axis.

    Args:
        x: (..., n), n a power of two.

    Raises:
        ValueError: n is not a power of two.
    """
    n = x.shape[-1]
    if not is_power_of_two(n):
        raise ValueError(
            f"the last axis has length {n}; expected a power of two, so pad to {next_power_of_two(max(n, 1))}"
        )
    return hadamard_transform(x)


@dispatched
def hadamard_transform(x: torch.Tensor) -> torch.Tensor:
    """x H along the last axis, (..., n) -> (..., n); `walsh_hadamard` has checked that n is a power of two."""
    n = x.shape[-1]
    lead, done = x.shape[:-1], 1
    for factor in _factors(n):
        # The axis as (before, factor, after): this factor's Hadamard matrix acts on the middle index.
        H = hadamard_matrix(factor, x.dtype, x.device)
        x = (
            x.reshape(-1, factor) @ H
            if done * factor == n
            else torch.matmul(H, x.reshape(-1, factor, n // (done * factor)))
        )
        done *= factor
    return x.reshape(*lead, n)


def _factors(n: int) -> list[int]:
    """Powers of two of nearly equal size, each at most RADIX, with product n."""
    bits = n.bit_length() - 1
    parts = max(1, math.ceil(bits / math.log2(RADIX)))
    return [2 ** (bits // parts + (index < bits % parts)) for index in range(parts)]
