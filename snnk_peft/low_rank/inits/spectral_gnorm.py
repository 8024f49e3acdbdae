"""The truncated SVD with the rows of UVᵀ brought to the norms that suit the activation: never worse than the SVD.

For ReLU, row i gets the norm ‖w_i‖ κ(ρ_i) where the SVD leaves ‖w_i‖ ρ_i, with ρ_i = ‖Pw_i‖/‖w_i‖ (gnorm of Theorem
4.2, whose claim that this is optimal is false); for other activations see `unit_fit.py`.
"""

from __future__ import annotations

import torch

from snnk_peft.low_rank.directions import directions, unit_scale
from snnk_peft.low_rank.problem import LOW_RANK_INITS, Problem, Solution
from snnk_peft.low_rank.risk import row_energies, row_risks
from snnk_peft.low_rank.unit_fit import best_rows


@LOW_RANK_INITS.register("spectral_gnorm")
def spectral_gnorm(problem: Problem) -> Solution:
    """U rescaled row by row; V is that of the SVD."""
    f, r = problem.nonlinearity, problem.rank
    left, values, right = problem.svd
    coordinates = left[:, :r] * values[:r]
    rho = (torch.linalg.vector_norm(coordinates, dim=1) / unit_scale(problem.norms)).clamp(max=1)
    norms, bias = best_rows(f, problem.norms, rho, problem.bias)
    # σ may be 0, where W has a lower rank.
    root = values[:r].sqrt().clamp_min(1e-100)
    U = directions(coordinates) * norms.unsqueeze(1) / root
    risk = row_risks(f, norms, problem.norms, rho, bias, problem.bias).sum()
    energy = row_energies(f, problem.norms, problem.bias).sum()
    return Solution(U, right[:, :r] * root, bias, risk, energy)
