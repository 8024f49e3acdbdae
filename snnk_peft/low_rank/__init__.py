"""Low-rank factors W ≈ UVᵀ of a layer that approximate the function it computes: `factorize`, and inits by name."""

from snnk_peft.low_rank.factorize import Factors, factorize
from snnk_peft.low_rank.kernel_projection import kernel_projection
from snnk_peft.low_rank.many import factorize_many
from snnk_peft.low_rank.problem import LOW_RANK_INITS, InputMoments
from snnk_peft.low_rank.risk import risk

__all__ = ["LOW_RANK_INITS", "Factors", "InputMoments", "factorize", "factorize_many", "kernel_projection", "risk"]
