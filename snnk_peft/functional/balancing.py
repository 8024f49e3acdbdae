"""Linear maps of two sets of vectors that keep x·y: to eigenvectors, and x -> xT, y -> yT⁻¹, which balance them.

Among all of them, T² = P with P M₁ P = M₂ (the matrix geometric mean of M₁⁻¹ and M₂) minimises the sum of the mean
squared lengths, tr(P M₁) + tr(P⁻¹ M₂): its derivative is M₁ − P⁻¹ M₂ P⁻¹.

Shapes: x (..., n, d), moments and maps (..., d, d).
"""

from __future__ import annotations

import torch
from torch import Tensor

_FLOOR = 1e-3  # of the mean eigenvalue: directions without data keep a bounded stretch


def second_moment(x: Tensor, mask: Tensor | None = None) -> Tensor:
    """Mean of xxᵀ over the vectors of each set (those with mask True): (..., d, d)."""
    if mask is None:
        return x.mT @ x / x.shape[-2]
    weight = mask.to(x.dtype).unsqueeze(-1)
    return (x * weight).mT @ x / weight.sum(-2, keepdim=True).clamp_min(1)


def directed_eigenvectors(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues (..., d) and eigenvectors (..., d, d), each turned so that its largest entry is positive.

    Solvers leave the sign open, and that of a CPU, that of a GPU and a rounding of the matrix choose differently. With
    another sign random features are another, equally good draw: an output would depend on the machine.
    """
    values, vectors = torch.linalg.eigh(matrix)
    largest = vectors.gather(-2, vectors.abs().argmax(-2, keepdim=True))
    return values, torch.where(largest < 0, -vectors, vectors)


def _power(matrix: Tensor, exponent: float) -> Tensor:
    """A symmetric positive definite matrix to a real power."""
    values, vectors = torch.linalg.eigh(matrix)
    floor = torch.finfo(values.dtype).eps * values.amax(-1, keepdim=True).clamp_min(torch.finfo(values.dtype).tiny)
    return vectors * values.clamp_min(floor).pow(exponent).unsqueeze(-2) @ vectors.mT


def balancing_maps(x_moment: Tensor, y_moment: Tensor) -> tuple[Tensor, Tensor]:
    """(T, T⁻¹), symmetric, from the two second moments; the identity where a set is zero throughout."""
    identity = torch.eye(x_moment.shape[-1], dtype=x_moment.dtype, device=x_moment.device)

    def regular(moment: Tensor) -> Tensor:
        mean = moment.diagonal(dim1=-2, dim2=-1).mean(-1)[..., None, None]
        return moment + torch.where(mean > 0, _FLOOR * mean, 1.0) * identity

    x_moment, y_moment = regular(x_moment), regular(y_moment)
    root, inverse_root = _power(x_moment, 0.5), _power(x_moment, -0.5)
    square = inverse_root @ _power(root @ y_moment @ root, 0.5) @ inverse_root
    return _power(square, 0.5), _power(square, -0.5)
