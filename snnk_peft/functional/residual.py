"""x + z Mᵀ in one pass: the residual sum of an adapter, fused into its matrix product.

With a few features the product is cheap and the sum is not: it would read and write every hidden state once more.
Shapes: x (..., dim), z (..., m), M (dim, m) -> (..., dim), in the dtype of x.
"""

from __future__ import annotations

import torch
from torch import Tensor


def residual_linear(x: Tensor, features: Tensor, weight: Tensor) -> Tensor:
    """x + features · weightᵀ.

    Args:
        x: (..., dim).
        features: (..., m).
        weight: (dim, m).
    """
    same = x.dtype == features.dtype == weight.dtype
    if same and not torch.is_autocast_enabled(x.device.type):
        flat = torch.addmm(x.reshape(-1, x.shape[-1]), features.reshape(-1, features.shape[-1]), weight.T)
        return flat.reshape(x.shape)
    # Under autocast a fused sum would round x; the product alone may be of low precision.
    return x + torch.nn.functional.linear(features, weight).to(x.dtype)
