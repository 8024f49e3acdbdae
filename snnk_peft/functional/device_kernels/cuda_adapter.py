"""An adapter step in Triton kernels, if Triton is installed."""

from __future__ import annotations

import importlib.util

import torch
from torch import Tensor

from snnk_peft.functional.adapter_sum import AdapterForm
from snnk_peft.functional.backend import plain_call, register_kernel, takes_untried

LARGEST = 128  # features
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def adapter_sum(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, low: Tensor | None, bias: Tensor | None,
    centres: Tensor | None, matrix: Tensor, form: AdapterForm,
) -> Tensor:  # fmt: skip
    """Compute `adapter_sum` (adapter_sum.py) in one kernel."""
    from snnk_peft.functional.device_kernels.triton_adapter.step import Step

    found: Tensor = Step.apply(x, residual, weight, low, bias, centres, matrix, form)
    return found.view((*x.shape[:-1], found.shape[-1]))


def _serves(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, low: Tensor | None, bias: Tensor | None,
    centres: Tensor | None, matrix: Tensor, form: AdapterForm,
) -> bool:  # fmt: skip
    if weight is None or low is None or form.component is None or not form.component.in_kernels:
        return False
    given = (x, x if residual is None else residual, matrix, low)
    known = low.dtype == form.dtype and all(t.dtype in DTYPES for t in given) and matrix.shape[-1] <= LARGEST
    # LayerNorm(x), a factor in the gradient of W, is not stored.
    return known and x.numel() > 0 and plain_call() and not (form.normalize and weight.requires_grad)


def register(device: str) -> None:
    """Register the kernel for a device type."""
    register_kernel("adapter_sum", device=device, serves=_serves, differentiable=True)(adapter_sum)


if importlib.util.find_spec("triton") is not None and takes_untried():
    register("cuda")
