"""r + β (f(z) − γ c) Mᵀ with z = α x̂ Wᵀ + b, and its gradients; see functional/adapter_sum.py.

A program handles C tokens and loops over their columns in blocks of K. z and its moments stay in fp32; operands of
products are rounded to T. With dx̂ = α dz W, LayerNorm's backward pass needs no further pass over the columns:

    Σ_k dx̂_k = α Σ_r dz_r Σ_k W_rk        Σ_k dx̂_k x̂_k = Σ_r dz_r (z_r − b_r)
"""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, misc"

from __future__ import annotations

import triton
import triton.language as tl

from snnk_peft.functional.device_kernels.triton_shared.tiles import dot, numbers
from snnk_peft.functional.normalized_projection import EPSILON as _EPSILON

EPSILON = tl.constexpr(_EPSILON)
KNOWN = ("relu", "gelu", "elu")


@triton.jit
def block(P, row, column, rows, width, R: tl.constexpr, K: tl.constexpr):
    """Load (R, K) of a contiguous (rows, width) matrix; 0 beyond its ends."""
    r, c = row + tl.arange(0, R), column + tl.arange(0, K)
    inside = (r < rows)[:, None] & (c < width)[None, :]
    return tl.load(P + r.to(tl.int64)[:, None] * width + c[None, :], mask=inside, other=0.0)


@triton.jit
def put(P, row, column, rows, width, x, R: tl.constexpr, K: tl.constexpr):
    """Write x where `block` would read."""
    r, c = row + tl.arange(0, R), column + tl.arange(0, K)
    inside = (r < rows)[:, None] & (c < width)[None, :]
    tl.store(P + r.to(tl.int64)[:, None] * width + c[None, :], x.to(P.dtype.element_ty), mask=inside)


@triton.jit
def function(z, F: tl.constexpr):
    """Compute f(z); NaN stays NaN."""
    if F == "relu":
        return tl.where(z < 0, 0.0, z)
    if F == "gelu":
        return z * 0.5 * (1.0 + tl.math.erf(z * 0.7071067811865476))
    return tl.where(z > 0, z + 1.0, tl.exp(tl.where(z > 0, 0.0, z)))


@triton.jit
def slope(z, F: tl.constexpr):
    """Compute the derivative f′(z)."""
    if F == "relu":
        return tl.where(z > 0, 1.0, 0.0)
    if F == "gelu":
        return 0.5 * (1.0 + tl.math.erf(z * 0.7071067811865476)) + z * tl.exp(-0.5 * z * z) * 0.3989422804014327
    return tl.exp(tl.where(z > 0, 0.0, z))


@triton.jit
def forward_pass(
    X, R, W, B, CENTRES, MATRIX, OUT, Z, FEATURES, MEAN, RSTD, n, dim, out, scale, centring, factor,
    m: tl.constexpr, M: tl.constexpr, K: tl.constexpr, C: tl.constexpr, T: tl.constexpr, F: tl.constexpr,
    NORMALIZE: tl.constexpr, BIAS: tl.constexpr, CENTRED: tl.constexpr,
):  # fmt: skip
    """BIAS, CENTRED: whether B and CENTRES are given."""
    row, c = tl.program_id(0) * C, tl.arange(0, K)
    mean, rstd = tl.zeros([C], tl.float32), tl.zeros([C], tl.float32)
    if NORMALIZE:
        for k in range(0, dim, K):
            mean += tl.sum(block(X, row, k, n, dim, C, K).to(tl.float32), 1)
        mean = mean / dim
        for k in range(0, dim, K):
            apart = block(X, row, k, n, dim, C, K).to(tl.float32) - mean[:, None]
            rstd += tl.sum(tl.where((k + c < dim)[None, :], apart * apart, 0.0), 1)
        rstd = 1.0 / tl.sqrt(rstd / dim + EPSILON)
    z = tl.zeros([C, M], tl.float32)
    for k in range(0, dim, K):
        x = block(X, row, k, n, dim, C, K).to(tl.float32)
        if NORMALIZE:
            x = (x - mean[:, None]) * rstd[:, None]  # W is 0 beyond dim
        z += dot(x, tl.trans(block(W, 0, k, m, dim, M, K).to(tl.float32)), T)
    z = z * scale
    if BIAS:
        z += numbers(B, 0, m, M, 0.0)[None, :]
    values = function(z, F)
    if CENTRED:
        values -= centring * numbers(CENTRES, 0, m, M, 0.0)[None, :]
    put(Z, row, 0, n, m, z, C, M)
    put(FEATURES, row, 0, n, m, values, C, M)
    if NORMALIZE:
        r = row + tl.arange(0, C)
        tl.store(MEAN + r, mean, mask=r < n)
        tl.store(RSTD + r, rstd, mask=r < n)
    for k in range(0, out, K):
        added = dot(values, tl.trans(block(MATRIX, k, 0, out, m, K, M).to(tl.float32)), T)
        put(OUT, row, k, n, out, block(R, row, k, n, out, C, K).to(tl.float32) + factor * added, C, K)


@triton.jit
def backward_pass(
    G, X, W, B, MATRIX, Z, MEAN, RSTD, DX, DZ, n, dim, out, scale, factor,
    m: tl.constexpr, M: tl.constexpr, K: tl.constexpr, C: tl.constexpr, T: tl.constexpr, F: tl.constexpr,
    NORMALIZE: tl.constexpr, BIAS: tl.constexpr, ADDS: tl.constexpr, OF_X: tl.constexpr, OF_Z: tl.constexpr,
):  # fmt: skip
    """Compute dx if OF_X, plus the gradient of r if ADDS; dz if OF_Z."""
    row = tl.program_id(0) * C
    dz = tl.zeros([C, M], tl.float32)
    for k in range(0, out, K):
        g = block(G, row, k, n, out, C, K).to(tl.float32)
        dz += dot(g, block(MATRIX, k, 0, out, m, K, M).to(tl.float32), T)
    z = block(Z, row, 0, n, m, C, M)
    dz = dz * factor * slope(z, F)
    if OF_Z:
        put(DZ, row, 0, n, m, dz, C, M)
    if OF_X:
        mean, rstd = tl.zeros([C], tl.float32), tl.zeros([C], tl.float32)
        first, second = tl.zeros([C], tl.float32), tl.zeros([C], tl.float32)
        if NORMALIZE:
            mean, rstd = numbers(MEAN, row, n, C, 0.0), numbers(RSTD, row, n, C, 0.0)
            of_w = tl.zeros([M], tl.float32)
            for k in range(0, dim, K):
                of_w += tl.sum(block(W, 0, k, m, dim, M, K).to(tl.float32), 1)
            first = scale * tl.sum(dz * of_w[None, :], 1) / dim
            if BIAS:
                z -= numbers(B, 0, m, M, 0.0)[None, :]
            second = tl.sum(dz * z, 1) / dim
        for k in range(0, dim, K):
            dx = scale * dot(dz, block(W, 0, k, m, dim, M, K).to(tl.float32), T)
            if NORMALIZE:
                seen = (block(X, row, k, n, dim, C, K).to(tl.float32) - mean[:, None]) * rstd[:, None]
                dx = rstd[:, None] * (dx - first[:, None] - seen * second[:, None])
            if ADDS:
                dx += block(G, row, k, n, dim, C, K).to(tl.float32)
            put(DX, row, k, n, dim, dx, C, K)


@triton.jit
def product_pass(
    A, B, OUT, n, width, factor, size,
    m: tl.constexpr, M: tl.constexpr, K: tl.constexpr, C: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    """Form factor · Aᵀ B for tokens size·p to size·(p + 1) of part p; A (n, width), B (n, m) -> (parts, width, m)."""
    column, part = tl.program_id(0) * K, tl.program_id(1)
    found = tl.zeros([K, M], tl.float32)
    for t in range(part * size, tl.minimum(part * size + size, n), C):
        a = block(A, t, column, n, width, C, K).to(tl.float32)
        found += dot(tl.trans(a), block(B, t, 0, n, m, C, M).to(tl.float32), T)
    put(OUT + part.to(tl.int64) * width * m, column, 0, width, m, factor * found, K, M)
