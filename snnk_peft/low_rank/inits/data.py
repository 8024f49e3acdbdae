"""The best factors for the layer's real inputs: the activation-aware SVD, followed by minimising the risk over these.

Inputs with covariance C = RRᵀ and mean μ are R z + μ, so a layer W with bias b is one with weight W R and bias b + Wμ
on z. For f = identity and z of any distribution its SVD is optimal (only C and μ matter); for other f, L-BFGS on the
inputs themselves starts from the exact minimum for Gaussian z. With InputMoments, which hold no inputs, this minimum is
the result. A layer without bias gets none, and E xxᵀ replaces the covariance.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from snnk_peft.functional.minimize import minimize
from snnk_peft.functional.nonlinearity import NONLINEARITIES
from snnk_peft.low_rank.problem import LOW_RANK_INITS, InputMoments, Problem, Solution, rebalanced
from snnk_peft.low_rank.risk import sample_risk

_STEPS = 100


@LOW_RANK_INITS.register("data")
def data(problem: Problem) -> Solution:
    """Minimise the mean of ‖f(UVᵀx + b') − f(Wx + b)‖² over the inputs."""
    assert problem.inputs is not None  # checked with all other arguments
    start = _gaussian(problem)
    if isinstance(problem.inputs, InputMoments) or problem.nonlinearity is NONLINEARITIES["identity"]:
        return start
    return _refined(problem, start, problem.inputs)


def _gaussian(problem: Problem) -> Solution:
    """Minimise the risk over Gaussian inputs with the mean and covariance of the real ones."""
    inputs, bias = problem.inputs, problem.bias
    moments = inputs if isinstance(inputs, InputMoments) else InputMoments.of(inputs)  # type: ignore[arg-type]
    root, inverse = moments.root(centred=bias is not None)
    # Inputs may vary in fewer directions than the rank; the other directions do not matter.
    rank = min(problem.rank, root.shape[1])
    shifted = None if bias is None else bias + problem.weight @ moments.mean
    white = dataclasses.replace(problem, weight=problem.weight @ root, bias=shifted, rank=rank, inputs=None)
    found = LOW_RANK_INITS["function"](white)
    U, V = rebalanced(found.U, inverse.T @ found.V)
    new_bias = None if found.bias is None else found.bias - U @ (V.T @ moments.mean)
    spare = (0, problem.rank - rank)
    return Solution(torch.nn.functional.pad(U, spare), torch.nn.functional.pad(V, spare), new_bias)


def _refined(problem: Problem, start: Solution, inputs: Tensor) -> Solution:
    weight, f, bias = problem.weight, problem.nonlinearity, problem.bias
    _, energy = sample_risk(f, weight, (start.U, start.V), bias, start.bias, inputs)

    def loss(U: Tensor, V: Tensor, new_bias: Tensor) -> Tensor:
        risk, _ = sample_risk(f, weight, (U, V), bias, None if bias is None else new_bias, inputs)
        return risk / energy.clamp_min(1e-150)

    shift = torch.zeros_like(weight[:, 0]) if start.bias is None else start.bias
    U, V, new_bias = minimize(loss, [start.U, start.V, shift], steps=_STEPS)
    return Solution(*rebalanced(U, V), None if bias is None else new_bias)
