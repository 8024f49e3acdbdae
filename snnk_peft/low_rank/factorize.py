"""`factorize`: approximate a layer's weight by UVᵀ of low rank, such that f(UVᵀx + b') is close to f(Wx + b)."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from snnk_peft.arguments import takes_declared
from snnk_peft.low_rank.problem import LOW_RANK_INITS, InputMoments, check
from snnk_peft.low_rank.risk import problem_risk, ratio


@dataclass(frozen=True)
class Factors:
    """W ≈ UVᵀ.

    Attributes:
        U: (out, rank).
        V: (in, rank).
        bias: b' (out,); None if the layer has none.
        relative_risk: E‖f(UVᵀx + b') − f(Wx + b)‖² / E‖f(Wx + b)‖², for x ~ N(0, I) or over the given inputs.
        seconds: wall time of `factorize`.
    """

    U: Tensor
    V: Tensor
    bias: Tensor | None
    relative_risk: float
    seconds: float

    def weight(self) -> Tensor:
        return self.U @ self.V.T


@takes_declared
def factorize(
    weight: Tensor,
    rank: int,
    init: str = "function",
    *,
    activation: str | Callable[[Tensor], Tensor] = "identity",
    bias: Tensor | None = None,
    inputs: Tensor | InputMoments | None = None,
    seed: int = 0,
) -> Factors:
    """Compute factors U, V and a bias b' such that f(UVᵀx + b') is close to f(Wx + b).

    Computes in fp64 on the weight's device, without touching the global random state.

    Args:
        weight: W (out, in), as nn.Linear stores it.
        rank: columns of U and V, 1 to min(out, in).
        init: a name in LOW_RANK_INITS. "function" minimises the exact risk over x ~ N(0, I), "data" the risk over
            `inputs`; "spectral" is the SVD, "spectral_gnorm" the SVD with corrected row norms. Baselines for
            comparison: "baseline", "kernel_projection", "nkp", "ws_nkp".
        activation: f, a name (relu, leaky_relu, erf, gelu, silu, tanh, sigmoid, softplus, identity) or an elementwise
            function, whose risk is computed by quadrature.
        bias: b (out,) or None, for which there is no b' either.
        inputs: real inputs of the layer (n, in), or their InputMoments, to which "data" fits and over which
            relative_risk is computed. None: N(0, I).
        seed: seed of the random inits (baseline, nkp, ws_nkp).

    Returns:
        Factors, in the dtype and on the device of the weight.

    Raises:
        ConfigError: a rank above full rank, mismatched shapes, unknown names, "data" without inputs: all at once.
        NumericalError: a NaN or infinity among the tensors.

    Example:
        >>> weight = torch.tensor([[1.0, 0.0], [-1.0, 0.0], [0.0, 1.0]])
        >>> factors = factorize(weight, 1, activation="relu")
        >>> round(factors.relative_risk * 1.5, 4)   # of E‖f(Wx)‖² = 1.5; the SVD leaves .5
        0.4414
        >>> factors.weight().shape
        torch.Size([3, 2])
    """
    began = time.perf_counter()
    with torch.no_grad():
        problem = check(weight, rank, activation, bias, inputs, seed, init=init)
        solution = LOW_RANK_INITS[init](problem)
        if solution.risk is not None and solution.energy is not None and inputs is None:
            found, energy = max(float(solution.risk), 0.0), float(solution.energy)
        else:
            found, energy = problem_risk(problem, solution.U, solution.V, solution.bias)
    new_bias = None if solution.bias is None or bias is None else solution.bias.to(bias)
    U, V = solution.U.to(weight), solution.V.to(weight)
    return Factors(U, V, new_bias, ratio(found, energy), time.perf_counter() - began)
