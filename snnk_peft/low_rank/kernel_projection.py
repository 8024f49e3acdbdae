"""Algorithm 1 of "Algorithms for Efficiently Learning Low-Rank Neural Networks": nonlinear kernel projection."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from snnk_peft.errors import ConfigError
from snnk_peft.functional.gauss_hermite import dual_kernel
from snnk_peft.functional.nonlinearity import Nonlinearity, quadrature_nodes, unit_coefficients
from snnk_peft.low_rank.problem import Problem, check, unit_scale


def nonlinearity_kernel(f: Nonlinearity, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute K_ij = E[f(w_i·x + b_i) f(w_j·x + b_j)], x ~ N(0, I) (Definition 2.5), (out, out) in fp64."""
    norm = torch.linalg.vector_norm(weight, dim=1)
    unit = weight / unit_scale(norm).unsqueeze(1)
    rho = (unit @ unit.T).clamp(-1, 1)
    if bias is None and f.kernel is not None:
        return f.kernel(norm.unsqueeze(1), norm, rho)
    # Closed forms with biases hold many values per pair; the series needs one.
    mean = torch.zeros_like(norm) if bias is None else bias
    coefficients, energy = unit_coefficients(f, norm, mean, quadrature_nodes(f, norm))
    kernel = dual_kernel(coefficients, coefficients, rho)
    kernel.diagonal().copy_(energy)
    return kernel


def kernel_projection(
    weight: Tensor,
    rank: int,
    activation: str | Callable[[Tensor], Tensor] = "relu",
    *,
    bias: Tensor | None = None,
    kernel: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return U = Q (out, rank), V = WᵀQ with Q the leading eigenvectors of K: W's rows, projected in the feature space
    of f.

    A baseline. The paper's Theorem 2.10 says that UVᵀ minimises the ReLU risk; it does not, and is usually worse than
    the SVD (W = [[1, 0], [−1, 0], [0, 1]] at rank 1: 1.0249, the SVD .5, the optimum .4414).

    `kernel` is K (out, out), for example estimated from samples (Algorithm 2); None: the exact one, of `activation`.

    Raises:
        ConfigError: mismatched shapes, a rank above full rank, an unknown activation.
    """
    problem = check(weight, rank, activation, bias, None, 0)
    if kernel is not None and kernel.shape != (len(weight),) * 2:
        raise ConfigError(
            f"kernel is {tuple(kernel.shape)}; expected one row and column for each output, {(len(weight),) * 2}"
        )
    with torch.no_grad():
        U, V = project(problem, None if kernel is None else kernel.detach().to(problem.weight))
    return U.to(weight), V.to(weight)


def project(problem: Problem, kernel: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Apply `kernel_projection` to a problem, in fp64."""
    if kernel is None:
        kernel = nonlinearity_kernel(problem.nonlinearity, problem.weight, problem.bias)
    leading = torch.linalg.eigh(kernel).eigenvectors[:, -problem.rank :].flip(1)
    return leading, problem.weight.T @ leading
