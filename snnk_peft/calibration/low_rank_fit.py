"""The best low-rank layer for the inputs that it really gets, from their second moment alone.

    min over U, V, b' of  E‖(U Vᵀ x + b') − (W x + b)‖²,        S = Cov x with a bias, E x xᵀ without

U Vᵀ = Q Qᵀ W with Q the leading eigenvectors of W S Wᵀ (the principal components of the output, for which no inverse
of S is needed), b' = b + (W − U Vᵀ) E x. A kernel that is the product of a k × 1 and a 1 × k one has no closed form:
its risk is a polynomial of S and the factors, which L-BFGS minimises. Memory columns², whatever the number of inputs.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Factors = tuple[Tensor, Tensor]


def principal_factors(weight: Tensor, moment: Tensor, rank: int) -> Factors:
    """U (out, rank) and V (in, rank) that minimise tr (U Vᵀ − W) S (U Vᵀ − W)ᵀ, balanced (UᵀU = VᵀV); fp64.

    Args:
        weight: W (out, in).
        moment: S (in, in), symmetric and positive semi-definite.
        rank: at most min(out, in).
    """
    weight, moment = weight.double(), moment.double()
    out, columns = weight.shape
    if out <= columns:
        components = torch.linalg.eigh(weight @ moment @ weight.T).eigenvectors[:, out - rank :]
    else:  # the same from the smaller matrix: left singular vectors of W S^½
        values, vectors = torch.linalg.eigh(moment)
        scaled = weight @ (vectors * values.clamp_min(0).sqrt())
        right = torch.linalg.eigh(scaled.T @ scaled).eigenvectors[:, columns - rank :]
        components = torch.linalg.qr(scaled @ right).Q
    left, values, right = torch.linalg.svd(components.T @ weight, full_matrices=False)
    root = values.sqrt()
    return components @ left * root, right.T * root


def separable_factors(
    weight: Tensor, moment: Tensor, start: Factors, product: Callable[[Tensor, Tensor], Tensor], steps: int = 100
) -> Factors:
    """Factors of a kernel whose product with its weights is not U Vᵀ itself but a rearrangement of it; fp64.

    Args:
        weight: W (out, columns).
        moment: S (columns, columns).
        start: U, V to start from; what is returned is no worse.
        product: (U, V) -> (out, columns), the weight that they stand for.
        steps: of L-BFGS.
    """
    weight, moment = weight.double(), moment.double()
    scale = float(((weight @ moment) * weight).sum().clamp_min(1e-300))
    U, V = (factor.detach().double().clone().requires_grad_() for factor in start)
    settings = {"tolerance_grad": 1e-9, "tolerance_change": 1e-12, "line_search_fn": "strong_wolfe"}
    optimizer = torch.optim.LBFGS([U, V], max_iter=steps, history_size=20, **settings)  # type: ignore[arg-type]

    def risk() -> Tensor:
        difference = product(U, V) - weight
        return ((difference @ moment) * difference).sum() / scale

    def closure() -> Tensor:
        optimizer.zero_grad()
        value = risk()
        value.backward()
        return value

    with torch.enable_grad():
        optimizer.step(closure)
    found = U.detach(), V.detach()
    return found if all(torch.isfinite(factor).all() for factor in found) else start
