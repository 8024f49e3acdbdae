"""`factorize`: a layer's weight as UVᵀ of low rank, so that f(UVᵀx + b') stays near f(Wx + b)."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from snnk_peft.errors import ConfigError
from snnk_peft.functional.nonlinearity import nonlinearity
from snnk_peft.low_rank.problem import LOW_RANK_INITS, Problem
from snnk_peft.low_rank.risk import energy, gaussian_risk


@dataclass(frozen=True)
class Factors:
    """W ≈ UVᵀ.

    Attributes:
        U: (out, rank).
        V: (in, rank).
        bias: (out,) or None.
        relative_risk: E‖f(UVᵀx + bias) − f(Wx + b)‖² / E‖f(Wx + b)‖².
        seconds: wall time of `factorize`.
    """

    U: Tensor
    V: Tensor
    bias: Tensor | None
    relative_risk: float
    seconds: float

    def weight(self) -> Tensor:
        """UVᵀ, (out, in)."""
        return self.U @ self.V.T


def factorize(
    weight: Tensor,
    rank: int,
    init: str = "function",
    *,
    activation: str | Callable[[Tensor], Tensor] = "identity",
    bias: Tensor | None = None,
    inputs: Tensor | None = None,
    seed: int = 0,
) -> Factors:
    """Low-rank factors of the layer f(Wx + b)."""
    began = time.perf_counter()
    f = nonlinearity(activation)
    if bias is not None or inputs is not None or f.kernel is None:
        raise ConfigError("bias, inputs and activations without closed form are not there yet")
    if not 1 <= rank <= min(weight.shape):
        raise ConfigError(f"rank is {rank}; expected 1 to {min(weight.shape)}, the full rank of {tuple(weight.shape)}")
    with torch.no_grad():
        problem = Problem(weight.detach().double(), rank, f, None, None, seed)
        U, V, _ = LOW_RANK_INITS[init](problem)
        risk = float(gaussian_risk(f, problem.weight, U, V) / energy(f, problem.weight))
    return Factors(U.to(weight), V.to(weight), None, max(risk, 0.0), time.perf_counter() - began)
