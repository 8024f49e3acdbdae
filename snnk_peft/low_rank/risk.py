"""The risk of low-rank factors, E‖f(UVᵀx + b') − f(Wx + b)‖²: exact for Gaussian x, a mean over given inputs.

The risk is a sum over outputs: with w_i and y_i the rows of W and UVᵀ and x ~ N(0, I), row i contributes

    k(y_i, y_i) − 2 k(y_i, w_i) + k(w_i, w_i),      k(y, w) = E[f(y·x + b'_i) f(w·x + b_i)]

which depends on ‖w_i‖, ‖y_i‖, their correlation and the biases alone (Problem 2.1 of "Algorithms for Efficiently
Learning Low-Rank Neural Networks", for any activation and with biases).
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from snnk_peft.functional.nonlinearity import Nonlinearity, dual_moment
from snnk_peft.low_rank.problem import InputMoments, Problem, check

_CHUNK = 1 << 22  # outputs held at once


def row_risks(
    f: Nonlinearity, norm: Tensor, target: Tensor, rho: Tensor, mean: Tensor | None = None, bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Compute E[(f(mean + norm·u) − f(bias + target·v))²] for correlation ρ, and E[f(bias + target·v)²]."""
    # One call for all three: for short vectors the number of operations determines the cost.
    norm, target, rho = torch.broadcast_tensors(norm, target, rho)
    first, second = torch.stack((norm, norm, target)), torch.stack((norm, target, target))
    one = torch.ones_like(rho)
    correlation = torch.stack((one, rho, one))
    if mean is None or bias is None:
        own, cross, energy = dual_moment(f, first, second, correlation)
    else:
        mean, bias, _ = torch.broadcast_tensors(mean, bias, rho)
        own, cross, energy = dual_moment(
            f, first, second, correlation, torch.stack((mean, mean, bias)), torch.stack((mean, bias, bias))
        )
    return own - 2 * cross + energy, energy


def gaussian_risk(
    f: Nonlinearity, weight: Tensor, product: Tensor, bias: Tensor | None, new_bias: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Compute the risk of `product` = UVᵀ and E‖f(Wx + b)‖² for x ~ N(0, I), two scalars."""
    norm, target = torch.linalg.vector_norm(product, dim=1), torch.linalg.vector_norm(weight, dim=1)
    scale = norm * target
    rho = ((product * weight).sum(1) / torch.where(scale > 0, scale, 1.0)).clamp(-1, 1)
    risks, energies = row_risks(f, norm, target, rho, new_bias, bias)
    return risks.sum(), energies.sum()


def sample_risk(
    f: Nonlinearity,
    weight: Tensor,
    factors: tuple[Tensor, Tensor],
    bias: Tensor | None,
    new_bias: Tensor | None,
    inputs: Tensor,
) -> tuple[Tensor, Tensor]:
    """Average ‖f(UVᵀx + b') − f(Wx + b)‖² and ‖f(Wx + b)‖² over inputs (n, in), two scalars."""
    U, V = factors
    risk, energy = weight.new_zeros(()), weight.new_zeros(())
    for x in inputs.split(max(1, _CHUNK // len(weight))):
        wanted = f.function(torch.nn.functional.linear(x, weight, bias))
        found = f.function(torch.nn.functional.linear(x @ V, U, new_bias))
        risk, energy = risk + (found - wanted).square().sum(), energy + wanted.square().sum()
    return risk / len(inputs), energy / len(inputs)


def problem_risk(problem: Problem, U: Tensor, V: Tensor, new_bias: Tensor | None) -> tuple[float, float]:
    """Compute E‖f(UVᵀx + b') − f(Wx + b)‖² and E‖f(Wx + b)‖² over the inputs of the problem."""
    f, weight, bias, inputs = problem.nonlinearity, problem.weight, problem.bias, problem.inputs
    if isinstance(inputs, Tensor):
        risk, energy = sample_risk(f, weight, (U, V), bias, new_bias, inputs)
    else:
        product = U @ V.T
        if inputs is not None:
            root, _ = inputs.root(centred=True)
            zero = weight.new_zeros(len(weight))
            bias = weight @ inputs.mean + (zero if bias is None else bias)
            new_bias = product @ inputs.mean + (zero if new_bias is None else new_bias)
            weight, product = weight @ root, product @ root
        risk, energy = gaussian_risk(f, weight, product, bias, new_bias)
    return max(float(risk), 0.0), float(energy)


def risk(
    weight: Tensor,
    U: Tensor,
    V: Tensor,
    activation: str | Callable[[Tensor], Tensor] = "identity",
    *,
    bias: Tensor | None = None,
    new_bias: Tensor | None = None,
    inputs: Tensor | InputMoments | None = None,
    relative: bool = False,
) -> float:
    """Compute E‖f(UVᵀx + b') − f(Wx + b)‖² of any factors: exact for Gaussian inputs, without sampling.

    Args:
        weight: W (out, in), as nn.Linear stores it.
        U: (out, rank).
        V: (in, rank).
        activation: f, as in `factorize`.
        bias: b (out,) or None.
        new_bias: b' (out,); None is `bias`.
        inputs: x (n, in), to average over; InputMoments, for Gaussian inputs with these; None for N(0, I).
        relative: divide by E‖f(Wx + b)‖².

    Raises:
        ConfigError: mismatched shapes, an unknown activation: all at once.
        NumericalError: a NaN or infinity among the tensors.
    """
    new_bias = bias if new_bias is None else new_bias
    problem = check(weight, U.shape[-1], activation, bias, inputs, 0, factors=(U, V, new_bias))
    with torch.no_grad():
        wide = None if new_bias is None else new_bias.to(problem.weight)
        if wide is not None and problem.bias is None:
            problem = problem.with_bias(torch.zeros_like(wide))
        found, energy = problem_risk(problem, U.to(problem.weight), V.to(problem.weight), wide)
    return ratio(found, energy) if relative else found


def ratio(risk: float, energy: float) -> float:
    """Return risk/energy; for a layer that is 0 everywhere, 0 if it is matched exactly, else infinity."""
    return risk / energy if energy > 0 else 0.0 if risk == 0 else math.inf
