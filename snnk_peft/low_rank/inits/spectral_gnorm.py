"""The truncated SVD with the rows of UVᵀ brought to the norms that suit the activation: never worse than the SVD.

For ReLU, row i gets the norm ‖w_i‖ κ(ρ_i) where the SVD leaves ‖w_i‖ ρ_i, with ρ_i = ‖Pw_i‖/‖w_i‖ (gnorm of Theorem
4.2, whose claim that this is optimal is false).
"""

from __future__ import annotations

import torch

from snnk_peft.low_rank.problem import LOW_RANK_INITS, Problem, Solution
from snnk_peft.low_rank.subspace import best_norms, directions


@LOW_RANK_INITS.register("spectral_gnorm")
def spectral_gnorm(problem: Problem) -> Solution:
    """Rows of U are rescaled; V is that of the SVD."""
    left, values, right = problem.svd
    r = problem.rank
    coordinates = left[:, :r] * values[:r]
    target = torch.linalg.vector_norm(left * values, dim=1)
    rho = torch.linalg.vector_norm(coordinates, dim=1) / torch.where(target > 0, target, 1.0)
    rows = directions(coordinates) * best_norms(problem.nonlinearity, target, rho.clamp(max=1))[:, None]
    root = values[:r].sqrt().clamp_min(torch.finfo(values.dtype).tiny)
    return Solution(rows / root, right[:, :r] * root, problem.bias)
