"""Products and scales of features that are loaded.

Operands are widened to fp32 and multiplied as three products of tf32 where features are fp32 (an error of about 2^-21),
and as one in half precision, whose digits tf32 covers: features may be signed, so denominators may be
sums with heavy cancellation. Scales are natural logarithms, NONE for −∞.
"""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, misc"

from __future__ import annotations

import triton
import triton.language as tl

from snnk_peft.functional.device_kernels.triton_shared.tiles import LOG2E, NONE, counted, tile


@triton.jit
def product(a, b, FULL: tl.constexpr):
    """Compute a b in fp32; FULL: in full fp32 precision."""
    if FULL:
        return tl.dot(a, b, input_precision="tf32x3")
    return tl.dot(a, b, input_precision="tf32")


@triton.jit
def wide_tile(P, row, count, stride, width: tl.constexpr, W: tl.constexpr, SIZE: tl.constexpr):
    """Load a `tile` and convert it to fp32."""
    return tile(P, row, count, stride, width, W, SIZE).to(tl.float32)


@triton.jit
def weight(x):
    """Compute e^x, and 0 for NONE whatever was subtracted from it."""
    return tl.where(x > NONE / 2, tl.exp2(x * LOG2E), 0.0)


@triton.jit
def scale_at(P):
    """Load a scale (1,) that may be −∞ in memory."""
    return tl.maximum(tl.load(P + tl.arange(0, 1)), NONE)


@triton.jit
def sums_at(SUMS, n, part, parts, programs, m: tl.constexpr, M: tl.constexpr, D: tl.constexpr, Dv: tl.constexpr):
    """Load top (1,), z (M,) and s (M, Dv) of one part; see `sums.py`."""
    at, r = n * parts + part, tl.arange(0, M)
    SUMS += programs * parts
    z = tl.load(SUMS + at * m + r, mask=r < m, other=0.0)
    s = tile(SUMS + programs * parts * m + at * m * D, 0, m, D, D, Dv, M)
    return tl.load(SUMS - programs * parts + at + tl.arange(0, 1)), z, s


@triton.jit
def keys_of(
    MASK, K, SCALES, row, L, kl, sl, m: tl.constexpr, M: tl.constexpr, C: tl.constexpr, MASKED: tl.constexpr,
    SCALED: tl.constexpr,
):  # fmt: skip
    """Return which keys of a chunk count, their features (C, M) in fp32, and their scales (C,): 0 if not SCALED.

    A key that does not count, e.g. with scale −∞, has features 0 and the scale NONE.
    """
    counts, scales = counted(MASK, row, L, MASKED, C), tl.zeros([C], tl.float32)
    if SCALED:
        r = row + tl.arange(0, C)
        scales = tl.load(SCALES + r.to(tl.int64) * sl, mask=counts, other=NONE).to(tl.float32)
        scales = tl.maximum(scales, NONE)
        counts = counts & (scales > NONE / 2)
    return counts, tl.where(counts[:, None], wide_tile(K, row, L, kl, m, M, C), 0.0), scales
