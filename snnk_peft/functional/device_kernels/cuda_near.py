"""Attention in a band, with sinks and far keys, in Triton kernels, if Triton is installed."""

from __future__ import annotations

import importlib.util

import torch
from torch import Tensor

from snnk_peft.functional.backend import register_kernel, takes_untried
from snnk_peft.functional.near_field import Sinks, mean_over_all

LARGEST = 128  # columns of keys and of values
MOST_SINKS = 16  # they form one block
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def near_attention(
    q: Tensor, k: Tensor, v: Tensor, width: int, mask: Tensor | None = None, *, causal: bool = False,
    scaling: float = 1.0, sinks: Sinks | None = None, far: tuple[tuple[Tensor, Tensor], ...] = (),
) -> Tensor:  # fmt: skip
    """Compute `near_attention` (near_field.py) on a GPU."""
    from snnk_peft.functional.device_kernels.triton_near import operators

    beside = (None, None, None) if sinks is None else sinks
    others: tuple[Tensor | None, Tensor | None] = far[0] if far else (None, None)
    if len(far) > 1:
        others = mean_over_all(far), torch.stack([weight for _, weight in far], -1).logsumexp(-1)
    out: Tensor = operators.attention(q, k, v, width, mask, causal, float(scaling), *beside, *others)[0]
    return out


def _serves(
    q: Tensor, k: Tensor, v: Tensor, width: int, mask: Tensor | None = None, *, causal: bool = False,
    scaling: float = 1.0, sinks: Sinks | None = None, far: tuple[tuple[Tensor, Tensor], ...] = (),
) -> bool:  # fmt: skip
    given = (q, k, v) if sinks is None else (q, k, v, *sinks[:2])
    same = q.dtype in DTYPES and all(t.dtype == q.dtype for t in given) and q.shape[-2] > 0
    small = max(q.shape[-1], v.shape[-1]) <= LARGEST and (sinks is None or 0 < sinks.keys.shape[-2] <= MOST_SINKS)
    texts = all(t is None or len(t) == len(q) for t in (mask, None if sinks is None else sinks.known))
    return same and small and texts and all(t.dtype == torch.float32 for pair in far for t in pair)


def register(device: str) -> None:
    """Register the kernel for a device type."""
    register_kernel("near_attention", device=device, serves=_serves, differentiable=True)(near_attention)


if importlib.util.find_spec("triton") is not None and takes_untried():
    register("cuda")
