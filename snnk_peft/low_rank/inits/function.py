"""The factors whose outputs are nearest to those of the layer: the exact risk, minimised by L-BFGS over the subspace.

Definition 3.3 without samples. Norms and directions of the rows of UVᵀ are the best ones for each subspace
(`subspace.py`), so the search is over V alone. It starts from the SVD, hence from `spectral_gnorm`, and is
deterministic.
"""

from __future__ import annotations

import torch
from torch import Tensor

from snnk_peft.low_rank.problem import LOW_RANK_INITS, Problem, Solution, rebalanced
from snnk_peft.low_rank.risk import row_risks
from snnk_peft.low_rank.subspace import best_norms, directions


@LOW_RANK_INITS.register("function")
def function(problem: Problem) -> Solution:
    """Minimises E‖f(UVᵀx) − f(Wx)‖²."""
    weight, f = problem.weight, problem.nonlinearity
    target = torch.linalg.vector_norm(weight, dim=1)
    scale = torch.where(target > 0, target, 1.0)
    start = problem.svd[2][:, : problem.rank].contiguous()
    total = row_risks(f, torch.zeros_like(target), target, torch.zeros_like(target)).sum().clamp_min(1e-300)
    parameter = start.clone().requires_grad_()

    def risks(V: Tensor) -> Tensor:
        coordinates = weight @ V
        rho = ((coordinates * directions(coordinates).detach()).sum(1) / scale).clamp(-1, 1)
        # At the best norm the risk is stationary in it, so only ρ carries a gradient.
        return row_risks(f, best_norms(f, target, rho.detach()), target, rho).sum() / total

    optimizer = torch.optim.LBFGS(
        [parameter],
        max_iter=200,
        history_size=20,
        tolerance_grad=1e-9,
        tolerance_change=1e-10,
        line_search_fn="strong_wolfe",
    )

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = risks(torch.linalg.qr(parameter)[0])
        loss.backward()
        return loss

    with torch.enable_grad():
        optimizer.step(closure)
    with torch.no_grad():
        V = torch.linalg.qr(parameter)[0]
        coordinates = weight @ V
        rho = torch.linalg.vector_norm(coordinates, dim=1) / scale
        U = directions(coordinates) * best_norms(f, target, rho.clamp(max=1))[:, None]
        return Solution(*rebalanced(U, V), problem.bias)
