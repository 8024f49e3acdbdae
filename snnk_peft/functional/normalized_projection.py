"""Projections of normalised vectors without ever forming them: LN(x) Wᵀ = rstd(x) · x W̃ᵀ.

LN(x) = (x − mean(x)) · rstd(x) over the last axis, rstd = 1/√(var(x) + ε). Subtracting each row's mean from W, W̃,
replaces subtracting mean(x), so all that remains of the normalisation is one number per vector. A layer norm would
write and read x once more, forward and backward; with a few features that is most of the cost.

Shapes: x (..., dim), W (m, dim) -> (..., m). Gradients flow to x only: W is a frozen random matrix.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from snnk_peft.functional.backend import dispatched

EPSILON = 1e-5


@dispatched
def normalized_linear(x: Tensor, weight: Tensor, eps: float = EPSILON) -> Tensor:
    """Compute LayerNorm (without weights, ε = `eps`) of x (..., dim), times Wᵀ: (..., m), in the dtype of x."""
    weight = weight.to(torch.promote_types(weight.dtype, x.dtype))
    centred = weight - weight.mean(-1, keepdim=True)
    if torch.is_grad_enabled() and x.requires_grad:
        return _NormalizedLinear.apply(x, centred.to(x.dtype), eps)[0]
    return _forward(x, centred.to(x.dtype), eps)[0]


def _forward(x: Tensor, centred: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    # Mean and variance in at least fp32: half precision overflows on the squares. Two passes, because the difference of
    # E x² and (E x)² cancels; not torch.var_mean, which on a CPU takes 20 times as long.
    wide = x.float() if x.dtype.itemsize < 4 else x
    mean = wide.mean(-1, keepdim=True)
    variance = torch.linalg.vector_norm(wide - mean, dim=-1, keepdim=True).square() / x.shape[-1]
    rstd = (variance + eps).rsqrt()
    return (x @ centred.T) * rstd.to(x.dtype), mean, rstd


class _NormalizedLinear(torch.autograd.Function):
    """Compute z, mean and rstd, with a backward pass of one elementwise product and one matrix product.

    With g = rstd · dz and c = −rstd² Σ_i dz_i z_i / dim:  dx = g W̃ + c (x − mean). The mean is computed as one more
    column of g against a row of ones.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, centred: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
        return _forward(x, centred, eps)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, float], output: tuple[Tensor, Tensor, Tensor]) -> None:
        x, centred, _ = inputs
        z, mean, rstd = output
        ctx.mark_non_differentiable(mean, rstd)
        ctx.save_for_backward(x, centred, z, mean, rstd)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dz: Tensor, *unused: Tensor) -> tuple[Tensor, None, None]:
        x, centred, z, mean, rstd = ctx.saved_tensors
        inner = (dz.to(rstd.dtype) * z.to(rstd.dtype)).sum(-1, keepdim=True)
        pull = inner * rstd.square() * (-1.0 / x.shape[-1])
        left = torch.cat(((dz.to(rstd.dtype) * rstd), -pull * mean), -1).to(x.dtype)
        right = torch.cat((centred, torch.ones_like(centred[:1])))
        dx = (x * pull.to(x.dtype)).reshape(-1, x.shape[-1])
        return torch.addmm(dx, left.reshape(-1, left.shape[-1]), right).reshape(x.shape), None, None
