"""Activations under Gaussian inputs: the dual kernel E[f(m₁ + s₁u) f(m₂ + s₂v)] of correlated normal u and v.

    relu          s₁s₂ κ(ρ)/2,  κ(ρ) = (√(1−ρ²) + (π − arccos ρ)ρ)/π            (half the arc-cosine kernel of order 1)
    leaky_relu    a·s₁s₂ρ + (1−a)² s₁s₂ κ(ρ)/2, with slope a below zero
    identity      s₁s₂ρ + m₁m₂

Source: Definition 2.5 of "Algorithms for Efficiently Learning Low-Rank Neural Networks"; its Definition 4.1 is twice
that. All shapes broadcast; gradients are finite everywhere, also at |ρ| = 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from snnk_peft.errors import ConfigError
from snnk_peft.functional.arccos import arccos_from_cosine
from snnk_peft.options import closest

Kernel = Callable[[Tensor, Tensor, Tensor], Tensor]
LEAKY_SLOPE = 0.01


class _Arccosine(torch.autograd.Function):
    """κ(ρ), whose derivative (π − arccos ρ)/π is finite where those of its terms are not."""

    @staticmethod
    def forward(ctx: Any, rho: Tensor) -> Tensor:
        ctx.save_for_backward(rho)
        return arccos_from_cosine(rho, 1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (rho,) = ctx.saved_tensors
        return grads[0] * torch.acos(-rho.clamp(-1, 1)) / math.pi


def relu_similarity(rho: Tensor) -> Tensor:
    """κ(ρ) = (√(1−ρ²) + (π − arccos ρ)ρ)/π of correlations in [−1, 1]; 2 E[relu(u) relu(v)]."""
    return _Arccosine.apply(rho)


def _relu(s1: Tensor, s2: Tensor, rho: Tensor) -> Tensor:
    return s1 * s2 * relu_similarity(rho) / 2


def _leaky_relu(s1: Tensor, s2: Tensor, rho: Tensor) -> Tensor:
    return s1 * s2 * (LEAKY_SLOPE * rho + (1 - LEAKY_SLOPE) ** 2 * relu_similarity(rho) / 2)


def _identity(s1: Tensor, s2: Tensor, rho: Tensor) -> Tensor:
    return s1 * s2 * rho


class Nonlinearity(NamedTuple):
    """An elementwise function and what is known of it.

    Attributes:
        function: tensor -> tensor of the same shape.
        kernel: closed form (s₁, s₂, ρ) -> E[f(s₁u) f(s₂v)], or None.
        homogeneous: f(cz) = c f(z) for c > 0.
    """

    function: Callable[[Tensor], Tensor]
    kernel: Kernel | None = None
    homogeneous: bool = False


NONLINEARITIES: dict[str, Nonlinearity] = {
    "identity": Nonlinearity(lambda z: z, _identity, True),
    "relu": Nonlinearity(torch.relu, _relu, True),
    "leaky_relu": Nonlinearity(lambda z: torch.nn.functional.leaky_relu(z, LEAKY_SLOPE), _leaky_relu, True),
}


def nonlinearity(activation: str | Callable[[Tensor], Tensor]) -> Nonlinearity:
    """The nonlinearity of a name, or of any elementwise function.

    Raises:
        ConfigError: an unknown name.
    """
    if callable(activation):
        return Nonlinearity(activation)
    if activation not in NONLINEARITIES:
        close = closest(activation, list(NONLINEARITIES))
        hint = f"; did you mean {close!r}?" if close else "."
        raise ConfigError(
            f"unknown activation {activation!r}{hint} Available: {', '.join(NONLINEARITIES)} (or any function)"
        )
    return NONLINEARITIES[activation]
