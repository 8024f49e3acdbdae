"""Fast random rotations: x -> x D_1 H D_2 H ... D_t H, H the normalised Walsh-Hadamard matrix, D_i random signs.

Shapes: x (..., n), one rotation per block of signs -> (..., blocks, n). Cost O(t · blocks · n log n) per vector.
"""

from __future__ import annotations

import torch

from snnk_peft.functional.hadamard import walsh_hadamard

# Size from which products of two or three transforms beat a dense product: about equal at 512 and 768 on one CPU
# thread, clearly faster at 2048.
HADAMARD_FAST_FROM = 1024


def hadamard_rotation(x: torch.Tensor, signs: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
    """`scale` times the rotated vectors, one rotation per block.

    Args:
        x: (..., n), n a power of two.
        signs: D_1, ..., D_t of each block, (t, blocks, n); D_1 acts first. Without factors, x repeated.
        scale: multiplies the result; it and the normalisation ride on the signs, at no cost.

    Returns:
        (..., blocks, n).
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
    """x Vᵀ with V = n^-½ S H G Π H B per block, H unnormalised (Le et al. 2013), (..., blocks, n).

    Args:
        x: (..., n), n a power of two.
        signs: B, (blocks, n).
        permutation: Π as indices into all blocks laid end to end, (blocks · n,): output k reads input permutation[k].
        gaussian: G, (blocks, n).
        scaling: S, (blocks, n).
    """
    blocks, n = signs.shape
    mixed = walsh_hadamard(x.unsqueeze(-2) * signs)
    shuffled = mixed.flatten(-2).index_select(-1, permutation).unflatten(-1, (blocks, n))
    return walsh_hadamard(shuffled * gaussian) * (scaling * n**-0.5)
