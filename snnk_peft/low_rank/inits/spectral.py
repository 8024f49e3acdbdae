"""The truncated singular value decomposition, U = A√Σ and V = B√Σ (Definition 3.1): best for the weights.

Also the same with the rows of UVᵀ rescaled to the best norms for the activation, which is never worse. For ReLU, row i
gets the norm ‖w_i‖ κ(ρ_i) instead of the SVD's ‖w_i‖ ρ_i, with ρ_i = ‖Pw_i‖/‖w_i‖ (gnorm of Theorem 4.2, whose claim
that this is optimal is false); for other activations see `unit_fit.py`.
"""

from __future__ import annotations

import torch

from snnk_peft.low_rank.problem import LOW_RANK_INITS, Problem, Solution, balanced, directions
from snnk_peft.low_rank.risk import row_risks
from snnk_peft.low_rank.unit_fit import best_rows


@LOW_RANK_INITS.register("spectral")
def spectral(problem: Problem) -> Solution:
    """Return the factors of the matrix UVᵀ of this rank that is closest to W."""
    left, values, right = problem.svd
    r = problem.rank
    return Solution(*balanced(left[:, :r], values[:r], right[:, :r]), problem.bias)


@LOW_RANK_INITS.register("spectral_gnorm")
def spectral_gnorm(problem: Problem) -> Solution:
    """Rescale U row by row; V is that of the SVD. The rescaling should cost no more than the SVD."""
    f, target, r = problem.nonlinearity, problem.norms, problem.rank
    left, values, right = problem.svd
    coordinates = left[:, :r] * values[:r]
    lengths = torch.linalg.vector_norm(coordinates, dim=1)
    rho = (lengths / target.clamp_min(1e-150)).clamp(max=1)
    norms, bias = best_rows(f, target, rho, problem.bias)
    # σ may be 0, if W has a lower rank, and so may a row.
    root = values[:r].sqrt().clamp_min(1e-100)
    along = coordinates / lengths.unsqueeze(1) if lengths.all() else directions(coordinates)
    risks, energies = row_risks(f, norms, target, rho, bias, problem.bias)
    return Solution(along * norms.unsqueeze(1) / root, right[:, :r] * root, bias, risks.sum(), energies.sum())
