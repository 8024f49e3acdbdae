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

    Raises:
        ValueError: a weight without values. The fused product would return whatever its memory holds.
    """
    if weight.is_meta and not x.is_meta:
        raise ValueError(
            "a readout is on the meta device, so it has no values yet, and its inputs are not; load its checkpoint "
            "(peft.set_peft_model_state_dict(model, state_dict, low_cpu_mem_usage=True)), or make the adapter without "
            "low_cpu_mem_usage"
        )
    same = x.dtype == features.dtype == weight.dtype
    device = x.device.type
    # Where there is no autocast ("meta"), asking whether it is on is an error.
    if same and not (torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)):
        # Mᵀ as rows, not as a view of M: autograd would take the gradient as gᵀz, (dim, tokens) times (tokens, m), of
        # for which CPU libraries need up to seven times the time of zᵀg; M itself is small.
        rows = weight.T.contiguous()
        flat = torch.addmm(x.reshape(-1, x.shape[-1]), features.reshape(-1, features.shape[-1]), rows)
        return flat.reshape(x.shape)
    # Under autocast a fused sum would round x; the product alone may be of low precision.
    return x + torch.nn.functional.linear(features, weight).to(x.dtype)
