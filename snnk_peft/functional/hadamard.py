"""The Walsh-Hadamard transform x -> x H, H the Sylvester matrix with entries ±1 (H Hᵀ = n I), and fast random rotations
x -> x D_1 H D_2 H ... D_t H of random signs D_i and normalised H.

Shapes: (..., n) -> (..., n), n a power of two; rotations, one per block, (..., n) -> (..., blocks, n). Cost O(n log n)
per vector: n is split into factors of at most 32, and H is the Kronecker product of the Hadamard matrices of the
factors, so each factor is one small dense product. On a CPU that is several times faster than butterflies of radix two,
which read and write every vector log₂ n times.
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
    """Return the smallest power of two >= n; zero-padding to it keeps dot products."""
    return 1 << (n - 1).bit_length()


def hadamard_matrix(n: int, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu") -> torch.Tensor:
    """Return H (n, n) by Sylvester's construction, symmetric.

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
    """Compute x H along the last axis; raise ValueError unless its length is a power of two."""
    n = x.shape[-1]
    if not is_power_of_two(n):
        raise ValueError(
            f"the last axis has length {n}; expected a power of two, so pad to {next_power_of_two(max(n, 1))}"
        )
    return hadamard_transform(x)


@dispatched
def hadamard_transform(x: torch.Tensor) -> torch.Tensor:
    """Compute x H along the last axis, (..., n) -> (..., n); `walsh_hadamard` has checked n."""
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
    """Return powers of two of nearly equal size, each at most RADIX, with product n."""
    bits = n.bit_length() - 1
    parts = max(1, math.ceil(bits / math.log2(RADIX)))
    return [2 ** (bits // parts + (index < bits % parts)) for index in range(parts)]


# Size from which products of two or three transforms beat a dense product: about equal at 512 and 768 on one CPU
# thread, clearly faster at 2048.
HADAMARD_FAST_FROM = 1024


def hadamard_rotation(x: torch.Tensor, signs: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
    """Compute `scale` times the rotated x D_1 H ... D_t H, one rotation per block: (..., n) -> (..., blocks, n).

    Args:
        x: (..., n), n a power of two.
        signs: D_1, ..., D_t of each block, (t, blocks, n); D_1 acts first. Without factors, x is repeated.
        scale: factor on the result; it and the normalisation are absorbed into the signs, at no cost.
    """
    factors, blocks, n = signs.shape
    x = x.unsqueeze(-2).expand(*x.shape[:-1], blocks, n)
    for index in range(factors):
        factor = n**-0.5 * (scale if index == factors - 1 else 1.0)
        x = walsh_hadamard(x * (signs[index] * factor))
    return x


def fastfood_product(
    x: torch.Tensor, signs: torch.Tensor, permutation: torch.Tensor, gaussian: torch.Tensor, scaling: torch.Tensor
) -> torch.Tensor:
    """Compute x Vᵀ with V = n^-½ S H G Π H B per block, H unnormalised (Le et al. 2013): (..., n) -> (..., blocks, n).

    B, G and S (`signs`, `gaussian`, `scaling`) are (blocks, n). Π is `permutation`, indices (blocks · n,) into all
    blocks laid end to end: output k reads input permutation[k].
    """
    blocks, n = signs.shape
    mixed = walsh_hadamard(x.unsqueeze(-2) * signs)
    shuffled = mixed.flatten(-2).index_select(-1, permutation).unflatten(-1, (blocks, n))
    return walsh_hadamard(shuffled * gaussian) * (scaling * n**-0.5)
