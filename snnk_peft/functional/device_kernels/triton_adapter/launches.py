"""The launches: tensors in, new tensors out, no gradients.

Shapes: x and g (tokens, dim or out), r (tokens, out), W (m, dim), b and c (m,), M (out, m), all contiguous.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from snnk_peft.functional.adapter_sum import AdapterForm
from snnk_peft.functional.device_kernels.triton_adapter import kernels
from snnk_peft.functional.device_kernels.triton_shared.launching import cdiv, empty, operand, padded, start

COLUMNS = 64  # per block
FEWEST, MOST_PARTS = 512, 16  # minimum tokens per part and maximum number of parts of a product over tokens


def _sizes(m: int, dtype: torch.dtype, tokens: int) -> dict[str, Any]:
    """Return the constants of all kernels, and the compiler options."""
    rows = 16 if tokens < 4096 or padded(m) > 64 else 32
    warps = 4 if padded(m) <= 64 else 8
    return {"m": m, "M": padded(m), "K": COLUMNS, "C": rows, "T": operand(dtype), "num_warps": warps, "num_stages": 2}


def _name(form: AdapterForm) -> str:
    assert form.component is not None
    return form.component.in_kernels


def forward(
    x: Tensor, residual: Tensor, low: Tensor, bias: Tensor | None, centres: Tensor | None, matrix: Tensor,
    form: AdapterForm,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the sum (tokens, out); z in fp32, features; mean and 1/deviation of x, empty if not normalised."""
    (n, dim), (out, m) = x.shape, matrix.shape
    found, z, features = torch.empty_like(residual), empty(x, n, m), empty(x, n, m, dtype=low.dtype)
    mean, rstd = (empty(x, n if form.normalize else 0) for _ in range(2))
    sizes = _sizes(m, low.dtype, n)
    start(
        kernels.forward_pass, (cdiv(n, sizes["C"]),),
        x, residual, low, x if bias is None else bias, x if centres is None else centres, matrix, found, z, features,
        mean, rstd, n, dim, out, float(form.scale), float(form.centring), float(form.factor), **sizes,
        F=_name(form), NORMALIZE=form.normalize, BIAS=bias is not None, CENTRED=centres is not None,
    )  # fmt: skip
    return found, z, features, mean, rstd


def backward(
    g: Tensor, x: Tensor, low: Tensor, bias: Tensor | None, matrix: Tensor, z: Tensor, mean: Tensor, rstd: Tensor,
    form: AdapterForm, adds: bool, of_x: bool, of_z: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return dx, plus g if `adds`, and dz; empty if not requested."""
    (n, dim), (out, m) = x.shape, matrix.shape
    dx = torch.empty_like(x) if of_x else empty(x, 0)
    dz = empty(x, *((n, m) if of_z else (0,)))
    sizes = _sizes(m, low.dtype, n)
    start(
        kernels.backward_pass, (cdiv(n, sizes["C"]),),
        g, x, low, x if bias is None else bias, matrix, z, mean, rstd, dx, dz, n, dim, out, float(form.scale),
        float(form.factor), **sizes, F=_name(form), NORMALIZE=form.normalize, BIAS=bias is not None,
        ADDS=adds, OF_X=of_x, OF_Z=of_z,
    )  # fmt: skip
    return dx, dz


def product(a: Tensor, b: Tensor, factor: float, operands: torch.dtype) -> Tensor:
    """Compute factor · aᵀ b in fp32: (tokens, width), (tokens, m) -> (width, m)."""
    (n, width), m = a.shape, b.shape[-1]
    parts = min(max(n // FEWEST, 1), MOST_PARTS)
    found, sizes = empty(a, parts, width, m), _sizes(m, operands, n)
    start(
        kernels.product_pass, (cdiv(width, COLUMNS), parts),
        a, b, found, n, width, float(factor), cdiv(cdiv(n, parts), 16) * 16, **sizes,
    )  # fmt: skip
    return found[0] if parts == 1 else found.sum(0)
