"""Keys and values of a cache in 8 or 4 bits: a byte or half a byte per number, and two half-precision ones per group.

x ≈ low + step · code, where step = (greatest − least) / (2^bits − 1), for each group of numbers of a vector.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

GROUP = 32  # numbers of a vector that share low and step, at 4 bits; at 8, the whole vector does
BITS = (8, 4)
LARGEST = 65504.0  # the largest half-precision number


class Rounded(NamedTuple):
    """Vectors (..., d) in few bits.

    Attributes:
        codes: uint8, (..., d), or (..., d / 2) with two codes of 4 bits in each.
        low, step: float16, (..., groups).
    """

    codes: Tensor
    low: Tensor
    step: Tensor

    def and_then(self, other: Rounded) -> Rounded:
        """Append other vectors along the second-to-last dimension."""
        return Rounded(*(torch.cat(pair, -2) for pair in zip(self, other, strict=True)))


def rounded(x: Tensor, bits: int) -> Rounded:
    """Round x (..., d), in any dtype; at 4 bits d must be even."""
    groups = number_groups(x, bits)
    least, greatest = groups.aminmax(dim=-1)
    low = least.clamp(min=-LARGEST, max=LARGEST).half()
    step = ((greatest - low.float()) / (2**bits - 1)).clamp(min=0.0, max=LARGEST).half()
    codes = (groups - low.float().unsqueeze(-1)) / step.float().clamp_min(torch.finfo(torch.float16).tiny).unsqueeze(-1)
    codes = codes.round().clamp(0, 2**bits - 1).flatten(-2)[..., : x.shape[-1]]
    if bits == 4:
        first, second = codes.chunk(2, -1)
        codes = first + 16 * second
    codes = codes.to(torch.uint8)
    return Rounded(codes, low, step)


def restored(given: Rounded, bits: int, dtype: torch.dtype) -> Tensor:
    """Return the values that the codes stand for, (..., d)."""
    codes = given.codes
    if bits == 4:
        second = (codes.float() / 16).floor()  # ONNX Runtime has bit operations on bytes only in part
        codes = torch.cat((codes.float() - 16 * second, second), -1)
    count = codes.shape[-1]
    groups = number_groups(codes, bits)
    found = torch.addcmul(given.low.float().unsqueeze(-1), groups, given.step.float().unsqueeze(-1))
    return found.flatten(-2)[..., :count].to(dtype)


def number_groups(x: Tensor, bits: int) -> Tensor:
    """Split (..., d) -> (..., groups, numbers), in float32; the last group is padded with its last number."""
    size = x.shape[-1] if bits == 8 else min(GROUP, x.shape[-1])
    missing = -x.shape[-1] % size
    x = x.float()
    if missing:
        x = torch.cat((x, x[..., -1:].expand(*x.shape[:-1], missing)), -1)
    return x.unflatten(-1, (-1, size))


def as_rounded(x: Tensor, bits: int | None) -> Tensor:
    """Round x and convert it back; the gradient is that of x itself."""
    if bits is None:
        return x
    return x + (restored(rounded(x.detach(), bits), bits, x.dtype) - x).detach()
