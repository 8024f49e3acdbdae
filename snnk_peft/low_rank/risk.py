"""The risk of low-rank factors, E‖f(UVᵀx + b') − f(Wx + b)‖² for x ~ N(0, I): exact, without samples.

Outputs enter one by one: with w_i and y_i the rows of W and UVᵀ, row i contributes

    k(y_i, y_i) − 2 k(y_i, w_i) + k(w_i, w_i),      k(y, w) = E[f(y·x) f(w·x)]

which depends on ‖w_i‖, ‖y_i‖ and their correlation alone (Problem 2.1 of "Algorithms for Efficiently Learning Low-Rank
Neural Networks", with any activation).
"""

from __future__ import annotations

import torch
from torch import Tensor

from snnk_peft.functional.nonlinearity import Nonlinearity


def row_risks(f: Nonlinearity, norm: Tensor, target_norm: Tensor, rho: Tensor) -> Tensor:
    """E[(f(s u) − f(t v))²] per output, (out,), for s = `norm`, t = `target_norm` and correlation ρ."""
    assert f.kernel is not None
    one = torch.ones_like(rho)
    own, target = f.kernel(norm, norm, one), f.kernel(target_norm, target_norm, one)
    return own - 2 * f.kernel(norm, target_norm, rho) + target


def gaussian_risk(f: Nonlinearity, weight: Tensor, U: Tensor, V: Tensor) -> Tensor:
    """The sum of the risks of all outputs, a scalar."""
    product = U @ V.T
    norm, target_norm = torch.linalg.vector_norm(product, dim=1), torch.linalg.vector_norm(weight, dim=1)
    scale = norm * target_norm
    rho = ((product * weight).sum(1) / torch.where(scale > 0, scale, 1.0)).clamp(-1, 1)
    return row_risks(f, norm, target_norm, rho).sum()


def energy(f: Nonlinearity, weight: Tensor) -> Tensor:
    """E‖f(Wx)‖², a scalar."""
    assert f.kernel is not None
    norm = torch.linalg.vector_norm(weight, dim=1)
    return f.kernel(norm, norm, torch.ones_like(norm)).sum()
