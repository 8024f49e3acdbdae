"""The paper's "NKP": Adam on Gaussian samples from random factors. A reference."""

from __future__ import annotations

from snnk_peft.low_rank.problem import LOW_RANK_INITS, Problem, Solution
from snnk_peft.low_rank.sampled import adam_on_samples


@LOW_RANK_INITS.register("nkp")
def nkp(problem: Problem) -> Solution:
    """From `baseline`."""
    return adam_on_samples(problem, LOW_RANK_INITS["baseline"](problem))
