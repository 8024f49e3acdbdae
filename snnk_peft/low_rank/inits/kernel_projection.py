"""Algorithm 1 of the paper, which its Theorem 2.10 wrongly calls optimal. A reference."""

from __future__ import annotations

from snnk_peft.low_rank.kernel_projection import project
from snnk_peft.low_rank.problem import LOW_RANK_INITS, Problem, Solution, rebalanced


@LOW_RANK_INITS.register("kernel_projection")
def kernel_projection(problem: Problem) -> Solution:
    """W projected on the leading eigenvectors of its nonlinearity kernel."""
    return Solution(*rebalanced(*project(problem)), problem.bias)
