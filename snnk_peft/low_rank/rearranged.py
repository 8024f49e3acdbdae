"""Factors whose product is the weight after a permutation of its entries: k × 1 and 1 × k kernels.

A spatially split kernel is a matrix (out·k, in·k) of low rank, but its outputs are those of the weight (out, in·k·k)
with the same entries. The best factors for a function or for real inputs then have no subspace form; the same exact
risk is minimised over both factors at once.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from snnk_peft.functional.minimize import minimize
from snnk_peft.functional.nonlinearity import nonlinearity
from snnk_peft.low_rank.problem import InputMoments, rebalanced
from snnk_peft.low_rank.risk import gaussian_risk


def rearranged_factors(
    weight: Tensor,
    start: tuple[Tensor, Tensor],
    product: Callable[[Tensor, Tensor], Tensor],
    *,
    activation: str | Callable[[Tensor], Tensor] = "identity",
    bias: Tensor | None = None,
    inputs: InputMoments | None = None,
    steps: int = 150,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return balanced U, V and b' (out,), fp64, that minimise E‖f(product(U, V) x + b') − f(W x + b)‖² from the start.

    The risk never exceeds that of the start; a layer without b gets no b'.

    Args:
        weight: W (out, in).
        start: U (rows, rank) and V (columns, rank).
        product: (U, V) -> (out, in), the entries of U Vᵀ in their places.
        activation: f, a name of NONLINEARITIES or an elementwise function.
        bias: b (out,) or None.
        inputs: x ~ N(mean, covariance), exact for the identity; None is N(0, I).
        steps: maximum number of L-BFGS steps.
    """
    f, weight = nonlinearity(activation), weight.detach().double()
    U, V = (factor.detach().to(weight) for factor in start)
    root, mean = torch.eye(weight.shape[1]).to(weight), torch.zeros(weight.shape[1]).to(weight)
    if inputs is not None:
        root = inputs.root(centred=bias is not None)[0]
        mean = inputs.mean.to(weight) if bias is not None else mean
    scaled = weight @ root
    # The mean of the pre-activations is optimised instead of the bias: it does not change with the factors.
    shift = None if bias is None else bias.detach().to(weight) + weight @ mean
    energy = float(gaussian_risk(f, scaled, scaled, shift, shift)[1].clamp_min(1e-150))

    def loss(U: Tensor, V: Tensor, *moved: Tensor) -> Tensor:
        found = product(U, V) @ root
        if activation == "identity":
            return (found - scaled).square().sum() / energy
        return gaussian_risk(f, scaled, found, shift, moved[0] if moved else None)[0] / energy

    # The best mean of a linear layer is that of the weight.
    moving = [] if shift is None or activation == "identity" else [shift]
    U, V, *moved = minimize(loss, [U, V, *moving], steps=steps)
    U, V = rebalanced(U, V)
    behind = moved[0] if moved else shift
    return U, V, None if behind is None else behind - product(U, V) @ mean
