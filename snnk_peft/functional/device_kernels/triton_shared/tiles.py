"""Device functions shared by the kernels: tiles, products, logarithms of features.

Exponents are to base 2 inside kernels, since exp2 is an instruction: rows are multiplied by log2 e when they are
loaded. Queries and keys in half precision are exact operands; rows are split into two parts of half precision, high +
low, so that q·ω has nearly the error of fp32 at the speed of the matrix units. Weights in [0, 1] and values are rounded
once, as flash attention does; sums are fp32. In fp32 a product is three of tf32, with an error of about 2^-21.
Dimensions are padded to powers of two >= 16 (m to M, d to Dk, D to Dv): features beyond m have the logarithm
NONE, columns beyond d and D are 0.
"""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, misc"

from __future__ import annotations

import os

import triton
import triton.language as tl

# The interpreter multiplies the bit patterns of bf16 operands (triton 3.6 to 3.9), so they are widened there first.
INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")
LOG2E = tl.constexpr(1.4426950408889634)
NONE = tl.constexpr(-1.0e30)  # the logarithm of nothing: finite, so that differences are finite too
ABSENT = tl.constexpr(-1.0e9)  # its counterpart in states; see log_linear.py
LEAST = tl.constexpr(60.0)  # −log2 of a denominator over its largest possible; above, a chunk is done pair by pair


@triton.jit
def dot(a, b, T: tl.constexpr):
    """Compute a b, operands rounded to T, sums in fp32; tf32 replaces fp16: same digits, and room for sums."""
    if T == tl.float32:
        return tl.dot(a, b, input_precision="tf32x3")
    if T == tl.float16:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="tf32")
    a, b = a.to(T), b.to(T)
    if INTERPRETED:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b)


@triton.jit
def tile(P, row, count, stride, width: tl.constexpr, W: tl.constexpr, SIZE: tl.constexpr):
    """Load rows row .. row + SIZE of a (count, width) matrix as (SIZE, W); 0 beyond its ends."""
    r, c = row + tl.arange(0, SIZE), tl.arange(0, W)
    inside = ((r >= 0) & (r < count))[:, None]
    if width < W:
        inside = inside & (c < width)[None, :]
    return tl.load(P + r.to(tl.int64)[:, None] * stride + c[None, :], mask=inside, other=0.0)


@triton.jit
def put(P, row, count, stride, x, width: tl.constexpr, W: tl.constexpr, SIZE: tl.constexpr):
    """Write x (SIZE, W) where `tile` would read."""
    r, c = row + tl.arange(0, SIZE), tl.arange(0, W)
    inside = ((r >= 0) & (r < count))[:, None]
    if width < W:
        inside = inside & (c < width)[None, :]
    tl.store(P + r.to(tl.int64)[:, None] * stride + c[None, :], x.to(P.dtype.element_ty), mask=inside)


@triton.jit
def numbers(P, at, count, SIZE: tl.constexpr, other):
    """Load numbers at .. at + SIZE of a vector of `count`."""
    r = at + tl.arange(0, SIZE)
    return tl.load(P + r, mask=(r >= 0) & (r < count), other=other).to(tl.float32)


@triton.jit
def counted(MASK, row, count, HAS: tl.constexpr, SIZE: tl.constexpr):
    """Return which of the keys row .. row + SIZE count."""
    r = row + tl.arange(0, SIZE)
    inside = (r >= 0) & (r < count)
    if HAS:
        inside = inside & (tl.load(MASK + r, mask=inside, other=0) != 0)
    return inside


@triton.jit
def rows_of(W, m: tl.constexpr, d: tl.constexpr, M: tl.constexpr, Dk: tl.constexpr, T: tl.constexpr):
    """Load rows (m, d) in fp32, times log2 e, as two parts (M, Dk) in T; the second is unused in fp32."""
    rows = tile(W, 0, m, d, d, Dk, M) * LOG2E
    high = rows.to(T)
    return high, (rows - high.to(tl.float32)).to(T)


@triton.jit
def bias_of(P, m: tl.constexpr, M: tl.constexpr):
    """Load numbers (m,) of features times log2 e, (M,); NONE beyond m."""
    r = tl.arange(0, M)
    return tl.where(r < m, tl.load(P + r, mask=r < m, other=0.0) * LOG2E, NONE)


@triton.jit
def logarithms(x, high, low, T: tl.constexpr):
    """Multiply x (B, Dk) by rows: (B, M)."""
    high, low = tl.trans(high), tl.trans(low)
    if T == tl.float32:
        return tl.dot(x, high, input_precision="tf32x3")
    if INTERPRETED:
        x, high, low = x.to(tl.float32), high.to(tl.float32), low.to(tl.float32)
    return tl.dot(x, low, tl.dot(x, high))


@triton.jit
def key_logarithms(k, high, low, counts, square, m: tl.constexpr, M: tl.constexpr, T: tl.constexpr):
    """Compute log2 of the features of keys (B, Dk): (B, M), NONE where a key does not count."""
    wide = k.to(tl.float32)
    logs = logarithms(k, high, low, T) - tl.sum(wide * wide, 1)[:, None] * (square * LOG2E)
    counts = counts[:, None]
    if m < M:
        counts = counts & (tl.arange(0, M) < m)[None, :]
    return tl.where(counts, logs, NONE)


@triton.jit
def back_to(x, high, T: tl.constexpr):
    """Multiply x (B, M) by rows, without log2 e: (B, Dk)."""
    return dot(x, high, T) / LOG2E


@triton.jit
def power(x):
    """Compute 2^x, and 0 for NONE whatever was subtracted from it."""
    return tl.where(x > NONE / 2, tl.exp2(x), 0.0)
