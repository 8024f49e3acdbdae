"""The paper's own optimiser: Adam on Gaussian samples, with the settings of its section 5. A reference."""

from __future__ import annotations

import torch

from snnk_peft.functional.random_numbers import normal_numbers
from snnk_peft.low_rank.problem import Problem, Solution

LEARNING_RATE = 5e-3
BATCH = 512
STEPS = 6 * 128  # epochs of 128 steps


def adam_on_samples(problem: Problem, start: Solution) -> Solution:
    """Adam from `start` on E‖f(UVᵀx + b) − f(Wx + b)‖², a new batch of x ~ N(0, I) in each step; in fp32."""
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
