"""The initialisations that the paper compares with, as baselines.

baseline            random factors: the initialisation of a low-rank network that does not use W
kernel_projection   Algorithm 1, which Theorem 2.10 wrongly calls optimal
nkp, ws_nkp         the paper's own optimiser, Adam on Gaussian samples with the settings of its section 5, from
                    `baseline` and from the SVD (its warm start)
"""

from __future__ import annotations

import torch

from snnk_peft.functional.random_numbers import normal_numbers
from snnk_peft.low_rank.kernel_projection import project
from snnk_peft.low_rank.problem import LOW_RANK_INITS, Problem, Solution, rebalanced

LEARNING_RATE = 5e-3
BATCH = 512
STEPS = 6 * 128  # epochs of 128 steps


@LOW_RANK_INITS.register("baseline")
def baseline(problem: Problem) -> Solution:
    """Draw normal entries with Var(U_ij) Var(V_ij) rank = mean of W_ij²: UVᵀ has the mean square of W's entries.

    This is the "Baseline Low-Rank" of section 5 with the variance preserved; factors drawn like W itself would shrink
    or blow up the product.
    """
    weight, rank = problem.weight, problem.rank
    scale = (weight.square().mean() / rank) ** 0.25
    generator = torch.Generator().manual_seed(problem.seed)
    rows = normal_numbers(sum(weight.shape), rank, generator=generator).to(weight) * scale
    return Solution(rows[: len(weight)], rows[len(weight) :], problem.bias)


@LOW_RANK_INITS.register("kernel_projection")
def kernel_projection(problem: Problem) -> Solution:
    """Project W onto the leading eigenvectors of its nonlinearity kernel."""
    return Solution(*rebalanced(*project(problem)), problem.bias)


def adam_on_samples(problem: Problem, start: Solution) -> Solution:
    """Run Adam from `start` on E‖f(UVᵀx + b) − f(Wx + b)‖² with a new batch of x ~ N(0, I) in each step; in fp32."""
    f = problem.nonlinearity.function
    weight = problem.weight.float()
    bias = None if problem.bias is None else problem.bias.float()
    U, V = (factor.float().contiguous().requires_grad_() for factor in (start.U, start.V))
    optimizer = torch.optim.Adam([U, V], lr=LEARNING_RATE)
    generator = torch.Generator().manual_seed(problem.seed)
    for _ in range(STEPS):
        x = normal_numbers(BATCH, weight.shape[1], generator=generator).to(weight)
        wanted = f(torch.nn.functional.linear(x, weight, bias))
        with torch.enable_grad():
            found = f(torch.nn.functional.linear(x @ V, U, bias))
            loss = (found - wanted).square().sum(1).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return Solution(U.detach().double(), V.detach().double(), problem.bias)


@LOW_RANK_INITS.register("nkp")
def nkp(problem: Problem) -> Solution:
    """Run NKP from the `baseline` factors."""
    return adam_on_samples(problem, LOW_RANK_INITS["baseline"](problem))


@LOW_RANK_INITS.register("ws_nkp")
def ws_nkp(problem: Problem) -> Solution:
    """Run NKP from the `spectral` factors."""
    return adam_on_samples(problem, LOW_RANK_INITS["spectral"](problem))
