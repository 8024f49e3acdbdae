"""The truncated singular value decomposition, U = A√Σ and V = B√Σ (Definition 3.1): best for the weights."""

from __future__ import annotations

from snnk_peft.low_rank.problem import LOW_RANK_INITS, Problem, Solution, balanced


@LOW_RANK_INITS.register("spectral")
def spectral(problem: Problem) -> Solution:
    """UVᵀ is the matrix of this rank that is nearest to W."""
    left, values, right = problem.svd
    r = problem.rank
    return Solution(*balanced(left[:, :r], values[:r], right[:, :r]), problem.bias)
