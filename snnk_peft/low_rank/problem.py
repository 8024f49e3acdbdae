"""What an init is asked: the layer f(Wx + b), a rank, and the inputs over which factors should match it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from snnk_peft.functional.nonlinearity import Nonlinearity
from snnk_peft.registry import Registry


class Solution(NamedTuple):
    """U (out, rank), V (in, rank), bias (out,) or None, in fp64."""

    U: Tensor
    V: Tensor
    bias: Tensor | None


@dataclass(frozen=True)
class Problem:
    """The layer in fp64, without gradients.

    Attributes:
        weight: W (out, in).
        rank: columns of U and V.
        nonlinearity: f.
        bias: b (out,) or None.
        inputs: (n, in), or None for N(0, I).
        seed: of what is drawn.
    """

    weight: Tensor
    rank: int
    nonlinearity: Nonlinearity
    bias: Tensor | None
    inputs: Tensor | None
    seed: int

    @functools.cached_property
    def svd(self) -> tuple[Tensor, Tensor, Tensor]:
        """A (out, k), σ (k,), B (in, k) with W = A diag(σ) Bᵀ and k = min(out, in)."""
        left, values, right = torch.linalg.svd(self.weight, full_matrices=False)
        return left, values, right.T


LOW_RANK_INITS: Registry[Callable[[Problem], Solution]] = Registry("low-rank init", "snnk_peft.low_rank.inits")


def balanced(left: Tensor, values: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    """U = A√σ and V = B√σ (Definition 3.1), so that both factors have the same singular values."""
    root = values.sqrt()
    return left * root, right * root


def rebalanced(U: Tensor, V: Tensor) -> tuple[Tensor, Tensor]:
    """Balanced factors of the same product, by the singular values of a small matrix."""
    q_left, r_left = torch.linalg.qr(U)
    q_right, r_right = torch.linalg.qr(V)
    left, values, right = torch.linalg.svd(r_left @ r_right.T)
    return balanced(q_left @ left, values, q_right @ right.T)
