"""The factors whose outputs are closest to the layer's: the exact risk, minimised by L-BFGS over the subspace.

Definition 3.3 without samples. With V orthonormal, row i of UVᵀ is best along the projection of w_i (k(ρ) grows with
ρ), and its norm and bias follow from ρ_i = ‖Vᵀw_i‖/‖w_i‖ (`unit_fit.py`). So the risk is a sum of functions of one ρ_i
each, and only the subspace has to be searched. The search starts from the SVD's subspace, that is from
`spectral_gnorm`, and is deterministic.
"""

from __future__ import annotations

import torch
from torch import Tensor

from snnk_peft.functional.minimize import minimize
from snnk_peft.functional.nonlinearity import NONLINEARITIES
from snnk_peft.low_rank.problem import LOW_RANK_INITS, Problem, Solution, directions, rebalanced, unit_scale
from snnk_peft.low_rank.risk import row_risks
from snnk_peft.low_rank.unit_fit import best_rows, fit_units, profile_risks, risk_profiles


@LOW_RANK_INITS.register("function")
def function(problem: Problem) -> Solution:
    """Minimise E‖f(UVᵀx + b') − f(Wx + b)‖² over U, V and b'."""
    return search(problem, problem.svd[2][:, : problem.rank])


def search(problem: Problem, start: Tensor) -> Solution:
    """Run `function` from the subspace of the columns of `start` (in, rank)."""
    f, weight, target, bias = problem.nonlinearity, problem.weight, problem.norms, problem.bias
    if f is NONLINEARITIES["identity"]:
        return LOW_RANK_INITS["spectral"](problem)
    profiles = None if f.homogeneous and bias is None else risk_profiles(f, target, bias)

    zero = torch.zeros_like(target)
    total = row_risks(f, zero, target, zero, bias, bias)[1].sum().clamp_min(1e-150)

    def correlations(basis: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        V = torch.linalg.qr(basis)[0]
        coordinates = weight @ V
        along = directions(coordinates.detach())
        return ((coordinates * along).sum(1) / unit_scale(target)).clamp(-1, 1), along, V

    def loss(basis: Tensor) -> Tensor:
        rho, _, _ = correlations(basis)
        if profiles is None:
            # The best norm is stationary, so that only ρ carries a gradient.
            risks, _ = row_risks(f, best_rows(f, target, rho.detach(), None)[0], target, rho)
        else:
            risks = profile_risks(profiles, rho)
        return risks.sum() / total

    rho, along, V = correlations(*minimize(loss, [start]))
    norms, means = best_rows(f, target, rho, bias) if profiles is None else fit_units(f, target, rho, bias)
    risks, energies = row_risks(f, norms, target, rho, means, bias)
    return Solution(*rebalanced(along * norms.unsqueeze(1), V), means, risks.sum(), energies.sum())
