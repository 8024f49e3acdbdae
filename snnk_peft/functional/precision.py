"""Full precision where a rounding error would be multiplied: exponents, norms, denominators."""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager

import torch


def wide(x: torch.Tensor) -> torch.Tensor:
    """Return x in fp32 if it is narrower, else unchanged."""
    return x.float() if x.dtype.itemsize < 4 else x


def full_precision(x: torch.Tensor) -> AbstractContextManager[object]:
    """Switch autocast off for the device of x: a bf16 product before an exponential is off by several per cent."""
    if x.device.type == "meta" or not torch.is_autocast_enabled(x.device.type):
        return contextlib.nullcontext()  # torch.export cannot read back one inside another
    return torch.autocast(x.device.type, enabled=False)


def as_a_linear(out: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Cast to the dtype that a Linear would return for input x: that of x, or autocast's."""
    if x.device.type != "meta" and torch.is_autocast_enabled(x.device.type):
        return out
    return out.to(x.dtype)
