"""Narrower attention heads in closed form: the best product of rank r in the place of one of rank d.

What a head computes depends on queries and keys only through q·k, and on values and outputs only through W_o W_v. Both
are products through a space of d dimensions, and P, R (r, d) replace the identity in between:

    q·k         ≈ (P q)·(R k)          minimising E (q·k − (Pq)·(Rk))² over queries and keys that are independent
    W_o v       ≈ (W_o Rᵀ)(P v)        the same problem, with the columns of W_o in the place of the keys

By Eckart and Young, with M = C_q^½ C_k^½ = U S Vᵀ, cut to r: P = S^½ Uᵀ C_q^-½, R = S^½ Vᵀ C_k^-½. With the second
moments of weights alone these are the singular vectors of W_qᵀ W_k and W_o W_v themselves, found in d dimensions.
"""

from __future__ import annotations

import torch
from torch import Tensor

# Directions in which vectors vary less than this, relative to the largest, count as rounding.
FLOOR = 1e-10


def power_of(moment: Tensor, exponent: float) -> Tensor:
    """C^exponent of symmetric non-negative C (..., d, d) on its range; directions outside of it become 0."""
    values, vectors = torch.linalg.eigh(moment)
    inside = values > FLOOR * values.amax(-1, keepdim=True)
    powers = torch.where(inside, values.clamp_min(torch.finfo(values.dtype).tiny) ** exponent, 0.0)
    return (vectors * powers.unsqueeze(-2)) @ vectors.mT


def narrow_products(left: Tensor, right: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """P and R that keep the products of two kinds of vectors.

    Args:
        left: (heads, d, d), second moment of the first kind (queries), up to a factor.
        right: (heads, d, d), of the second (keys).
        size: r, <= d.

    Returns:
        P and R, both (heads, size, d), in the dtype of `left`.
    """
    U, S, Vh = torch.linalg.svd(power_of(left, 0.5) @ power_of(right, 0.5))
    scale = S[..., :size].sqrt().unsqueeze(-1)
    return scale * U[..., :size].mT @ power_of(left, -0.5), scale * Vh[..., :size, :] @ power_of(right, -0.5)


def narrow_values(gram: Tensor, cross: Tensor, heads: int, size: int, *, sweeps: int = 8) -> Tensor:
    """Which directions of every head's output to keep, so that a linear map of them all gives the target best.

    Reduced-rank regression, head after head on what the others leave, since heads partly say the same.

    Args:
        gram: (heads·d, heads·d), centred second moment of the outputs of the heads, side by side, up to a factor.
        cross: (out, heads·d), of the target with them, up to the same factor.
        heads: number of heads.
        size: directions kept in each.
        sweeps: how often each head is visited.

    Returns:
        (heads, size, d): the output z of a head becomes E z.
    """
    dim = len(gram) // heads
    gram = gram.clone()
    gram.diagonal().add_(1e-4 * gram.diagonal().mean())
    readout = torch.linalg.solve(gram, cross.mT).mT.clone()  # (out, heads·d)
    kept = [gram[:0]] * heads
    for _ in range(sweeps):
        for head in range(heads):
            own = slice(head * dim, (head + 1) * dim)
            others = readout.clone()
            others[:, own] = 0
            whiten = power_of(gram[own, own], -0.5)
            U, S, Vh = torch.linalg.svd((cross[:, own] - others @ gram[:, own]) @ whiten, full_matrices=False)
            kept[head] = Vh[:size] @ whiten
            readout[:, own] = (U[:, :size] * S[:size]) @ kept[head]
    return torch.stack(kept)
