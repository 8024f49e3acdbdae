"""Random factors: what a low-rank network starts from that is not told of W. A reference.

Entries are normal with a variance such that UVᵀ has the mean square of the entries of W ("Baseline Low-Rank" of the
paper's section 5, with the variance kept; factors drawn as W itself would shrink or blow up the product).
"""

from __future__ import annotations

import torch

from snnk_peft.functional.random_numbers import normal_numbers
from snnk_peft.low_rank.problem import LOW_RANK_INITS, Problem, Solution


@LOW_RANK_INITS.register("baseline")
def baseline(problem: Problem) -> Solution:
    """Var(U_ij) Var(V_ij) rank = mean of W_ij²."""
    weight, rank = problem.weight, problem.rank
    scale = (weight.square().mean() / rank) ** 0.25
    generator = torch.Generator().manual_seed(problem.seed)
    rows = normal_numbers(sum(weight.shape), rank, generator=generator).to(weight) * scale
    return Solution(rows[: len(weight)], rows[len(weight) :], problem.bias)
