"""The best rows of UVᵀ in a given subspace: with V orthonormal, only a subspace is left to search.

Row y_i of UVᵀ enters the risk by its norm and its correlation with w_i. For a positively homogeneous f the best y_i
points along the projection of w_i, and has the norm ‖w_i‖ k(ρ_i)/k(1), with k(ρ) = E[f(u) f(v)]: for ReLU ‖w_i‖ κ(ρ_i).
"""

from __future__ import annotations

import torch
from torch import Tensor

from snnk_peft.functional.nonlinearity import Nonlinearity


def directions(coordinates: Tensor) -> Tensor:
    """Rows (out, r) brought to norm 1; a row of zeros, which has no direction, becomes the first unit vector."""
    first = torch.zeros_like(coordinates[0])
    first[0] = 1
    norm = torch.linalg.vector_norm(coordinates, dim=1, keepdim=True)
    return torch.where(norm > 0, coordinates / torch.where(norm > 0, norm, 1.0), first)


def best_norms(f: Nonlinearity, target_norm: Tensor, rho: Tensor) -> Tensor:
    """The best ‖y_i‖, (out,), where the subspace allows the correlations ρ (out,)."""
    assert f.kernel is not None
    one = torch.ones_like(rho)
    return target_norm * f.kernel(one, one, rho) / f.kernel(one, one, one)
