"""Low-rank factors W ≈ UVᵀ of a layer that approximate the function it computes: `factorize`, and inits by name."""

from snnk_peft.low_rank.factorize import Factors, factorize
from snnk_peft.low_rank.problem import LOW_RANK_INITS

__all__ = ["LOW_RANK_INITS", "Factors", "factorize"]
