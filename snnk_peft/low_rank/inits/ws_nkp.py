"""The paper's "WS-NKP": Adam on Gaussian samples from the SVD, its warm start. A reference."""

from __future__ import annotations

from snnk_peft.low_rank.problem import LOW_RANK_INITS, Problem, Solution
from snnk_peft.low_rank.sampled import adam_on_samples


@LOW_RANK_INITS.register("ws_nkp")
def ws_nkp(problem: Problem) -> Solution:
    """From `spectral`."""
    return adam_on_samples(problem, LOW_RANK_INITS["spectral"](problem))
