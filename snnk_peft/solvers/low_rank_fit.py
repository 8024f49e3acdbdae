"""The best low-rank layer for the inputs that it really gets, from their second moment alone.

    min over U, V, b' of  E‖(U Vᵀ x + b') − (W x + b)‖²,        S = Cov x with a bias, E x xᵀ without

U Vᵀ = Q Qᵀ W with Q the leading eigenvectors of W S Wᵀ (the principal components of the output, for which no inverse
of S is needed), b' = b + (W − U Vᵀ) E x. Memory in², whatever the number of inputs.
"""

from __future__ import annotations

import torch
from torch import Tensor


def principal_factors(weight: Tensor, moment: Tensor, rank: int) -> tuple[Tensor, Tensor]:
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
