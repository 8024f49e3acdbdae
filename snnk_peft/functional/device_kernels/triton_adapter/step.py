"""An adapter step with its gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from snnk_peft.functional.adapter_sum import AdapterForm
from snnk_peft.functional.adapter_sum import adapter_sum as torch_form
from snnk_peft.functional.device_kernels.triton_adapter import launches
from snnk_peft.functional.device_kernels.triton_shared.operating import differentiable


def _rows(x: Tensor) -> Tensor:
    """Return (..., columns) as a contiguous matrix."""
    return x.reshape(-1, x.shape[-1]).contiguous()


class Step(torch.autograd.Function):
    """Compute `adapter_sum` for one component."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, residual: Tensor | None, weight: Tensor, low: Tensor, bias: Tensor | None,
        centres: Tensor | None, matrix: Tensor, form: AdapterForm,
    ) -> Tensor:  # fmt: skip
        """Launch the forward kernel; return (tokens, out)."""
        flat = _rows(x)
        added = flat if residual is None else _rows(residual)
        low = low.contiguous()
        found, *more = launches.forward(flat, added, low, bias, centres, matrix.contiguous(), form)
        ctx.form = form
        ctx.save_for_backward(x, residual, weight, low, bias, centres, matrix, *more)
        return found

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients for x, r, W, b and M."""
        x, residual, weight, low, bias, centres, matrix, z, features, mean, rstd = ctx.saved_tensors
        form, needs = ctx.form, ctx.needs_input_grad
        if torch.is_grad_enabled():
            return differentiable(ctx, (x, residual, weight, low, bias, centres, matrix, form), (g,), _in_torch)
        of_x, of_residual, of_weight, _, of_bias, _, of_matrix, _ = needs
        g, dx, dweight, dbias, dmatrix = g.contiguous(), None, None, None, None
        if of_x or of_weight or of_bias:
            flat, of_z = _rows(x), of_weight or of_bias
            adds = residual is None
            found, dz = launches.backward(
                g, flat, low, bias, matrix.contiguous(), z, mean, rstd, form, adds, of_x, of_z
            )
            dx = found.view(x.shape) if of_x else None
            dweight = launches.product(flat, dz, form.scale, low.dtype).t().to(weight.dtype) if of_weight else None
            dbias = dz.sum(0).to(bias.dtype) if of_bias else None
        if of_matrix:
            dmatrix = launches.product(g, features, form.factor, low.dtype).to(matrix.dtype)
        return dx, g.view(residual.shape) if of_residual else None, dweight, None, dbias, None, dmatrix, None


def _in_torch(x: Tensor, *given: Any) -> tuple[Tensor]:
    out: Tensor = torch_form.__wrapped__(x, *given)  # type: ignore[attr-defined]
    return (out.reshape(-1, out.shape[-1]),)
