"""Sums over keys and values: per part of the sequence, then over all parts, or over those before each part.

    key_pass   per part and feature: top = log2 of the largest weight, z = Σ_j 2^{b_jr − top}, s the same sum of v_j
    combine    of all parts: M = s / z and log Z = top + log z; or of the parts before (or after) each of them
    key_back   ∂b = w ∘ (v ∂Mᵀ − diag(M ∂Mᵀ) + ∂log Z)      ∂v = w ∂M,      w_jr = e^{b_jr} / Z_r

The parts' results are in one buffer: tops (B·G, parts, m), then z (B·G, parts, m), then s (B·G, parts, m, D), fp32.
"""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, misc"

from __future__ import annotations

import triton
import triton.language as tl

from snnk_peft.functional.device_kernels.triton_shared.tiles import (
    ABSENT,
    LOG2E,
    NONE,
    back_to,
    bias_of,
    counted,
    dot,
    key_logarithms,
    numbers,
    power,
    put,
    rows_of,
    tile,
)


@triton.jit
def key_pass(
    K, V, W, MASK, LESS, WEIGHT, SUMS, kb, kh, kl, vb, vh, vl, wb, wh, heads, rep, N, square, SPLIT,
    m: tl.constexpr, M: tl.constexpr, d: tl.constexpr, Dk: tl.constexpr, D: tl.constexpr, Dv: tl.constexpr,
    BLOCK: tl.constexpr, T: tl.constexpr, MASKED: tl.constexpr, QUERIES: tl.constexpr,
):  # fmt: skip
    """Sum keys (B, heads, N, d) and values; `rep` heads share the rows of one.

    QUERIES: the same over queries and gradients, for the backward pass of causal attention: LESS (B·heads, N), natural
    logarithms, is subtracted from the exponents, and z is summed with the weights WEIGHT (B·heads, N) instead of ones.
    """
    bh, part, parts = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    b, h = (bh // heads).to(tl.int64), (bh % heads).to(tl.int64)
    K += b * kb + h * kh
    V += b * vb + h * vh
    high, low = rows_of(W + b * wb + h // rep * wh, m, d, M, Dk, T)
    top, z, s = tl.full([M], NONE, tl.float32), tl.zeros([M], tl.float32), tl.zeros([M, Dv], tl.float32)
    first = part * SPLIT
    for row in range(first, tl.minimum(first + SPLIT, N), BLOCK):
        k, v = tile(K, row, N, kl, d, Dk, BLOCK), tile(V, row, N, vl, D, Dv, BLOCK)
        logs = key_logarithms(k, high, low, counted(MASK + b * N, row, N, MASKED, BLOCK), square, m, M, T)
        if QUERIES:
            less = numbers(LESS + bh.to(tl.int64) * N, row, N, BLOCK, 0.0)[:, None]
            logs -= tl.where(less > ABSENT / 2, less * LOG2E, -NONE)
        higher = tl.maximum(top, tl.max(logs, 0))
        shrink = tl.exp2(top - higher)
        w = tl.where(logs > NONE / 2, tl.exp2(logs - higher[None, :]), 0.0)
        if QUERIES:
            z = z * shrink + tl.sum(w * numbers(WEIGHT + bh.to(tl.int64) * N, row, N, BLOCK, 0.0)[:, None], 0)
        else:
            z = z * shrink + tl.sum(w, 0)
        s = s * shrink[:, None] + dot(tl.trans(w), v, T)
        top = higher
    at, count, r = (bh * parts + part).to(tl.int64), tl.num_programs(0).to(tl.int64) * parts * m, tl.arange(0, M)
    tl.store(SUMS + at * m + r, top, mask=r < m)
    tl.store(SUMS + count + at * m + r, z, mask=r < m)
    put(SUMS + 2 * count + at * m * D, 0, m, D, s, D, Dv, M)


@triton.jit
def combine(
    SUMS, FIRST_M, FIRST_Z, PREFIXES, MEANS, LOGZ, parts, rep,
    m: tl.constexpr, D: tl.constexpr, Dv: tl.constexpr, PARTS: tl.constexpr,
    FIRST: tl.constexpr, PREFIX: tl.constexpr, REVERSE: tl.constexpr,
):  # fmt: skip
    """One feature and head. PREFIX: PREFIXES, laid out as SUMS, holds the sums before each part (REVERSE: after it).

    FIRST: FIRST_M and FIRST_Z are M and log Z of what comes before all parts. REVERSE: FIRST_M and MEANS are s and not
    M, FIRST_Z and LOGZ (..., 2, m) hold top and z; of `rep` heads that share a beginning, only the first counts it.
    """
    n, r = tl.program_id(0), tl.program_id(1)
    count = tl.num_programs(0).to(tl.int64) * parts * m
    p, c = tl.arange(0, PARTS), tl.arange(0, Dv)
    at, inside, column = (n * parts + p).to(tl.int64) * m + r, p < parts, c < D
    both = inside[:, None] & column[None, :]
    top = tl.load(SUMS + at, mask=inside, other=NONE)
    z = tl.load(SUMS + count + at, mask=inside, other=0.0)
    s = tl.load(SUMS + 2 * count + at[:, None] * D + c[None, :], mask=both, other=0.0)
    here = n.to(tl.int64) * m + r
    top0, z0, s0 = tl.full([1], NONE, tl.float32), tl.zeros([1], tl.float32), tl.zeros([Dv], tl.float32)
    if FIRST:
        if REVERSE:
            if n % rep == 0:
                group = (n // rep).to(tl.int64) * m
                top0 = tl.load(FIRST_Z + 2 * group + r + tl.arange(0, 1))
                z0 = tl.load(FIRST_Z + 2 * group + m + r + tl.arange(0, 1))
                s0 = tl.load(FIRST_M + (group + r) * D + c, mask=column, other=0.0)
        else:
            given = tl.load(FIRST_Z + here + tl.arange(0, 1))
            z0 = tl.where(given > ABSENT / 2, 1.0, 0.0)
            top0 = tl.where(given > ABSENT / 2, given * LOG2E, NONE)
            s0 = tl.load(FIRST_M + here * D + c, mask=column, other=0.0) * tl.sum(z0, 0)
    first_top, first_z = tl.max(top0, 0), tl.sum(z0, 0)
    most = tl.maximum(tl.max(top, 0), first_top)
    w, old = power(top - most), power(first_top - most)
    all_z, all_s = tl.sum(w * z, 0) + old * first_z, tl.sum(w[:, None] * s, 0) + old * s0
    if REVERSE:
        tl.store(LOGZ + 2 * n.to(tl.int64) * m + r, most)
        tl.store(LOGZ + 2 * n.to(tl.int64) * m + m + r, all_z)
        tl.store(MEANS + here * D + c, all_s, mask=column)
    else:
        total = tl.where(all_z > 0, all_z, 1.0)
        tl.store(LOGZ + here, tl.where(all_z > 0, (most + tl.log2(total)) / LOG2E, ABSENT))
        tl.store(MEANS + here * D + c, all_s / total, mask=column)
    if PREFIX:
        i = tl.arange(0, PARTS)[:, None]
        earlier = (p[None, :] > i) if REVERSE else (p[None, :] < i)
        logs = tl.where(earlier, top[None, :], NONE)
        u = tl.maximum(tl.max(logs, 1), first_top)
        before, old_before = tl.where(earlier, power(logs - u[:, None]), 0.0), power(first_top - u)
        sums = tl.dot(before, s, input_precision="tf32x3") + old_before[:, None] * s0[None, :]
        tl.store(PREFIXES + at, u, mask=inside)
        tl.store(PREFIXES + count + at, tl.sum(before * z[None, :], 1) + old_before * first_z, mask=inside)
        tl.store(PREFIXES + 2 * count + at[:, None] * D + c[None, :], sums, mask=both)


@triton.jit
def key_back(
    K, V, W, MASK, MEANS, LOGZ, GM, GZ, DK, DV, DW, kb, kh, kl, vb, vh, vl, wb, wh, gb, gh, zb, zh, heads, N, square,
    SPLIT,
    m: tl.constexpr, M: tl.constexpr, d: tl.constexpr, Dk: tl.constexpr, D: tl.constexpr, Dv: tl.constexpr,
    BLOCK: tl.constexpr, T: tl.constexpr, MASKED: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """GM, GZ: gradients of M (B, heads, m, D) and log Z. DK, DV are contiguous; DW (B·heads, parts, m, d)."""
    bh, part, parts = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    b, h, n = (bh // heads).to(tl.int64), (bh % heads).to(tl.int64), bh.to(tl.int64)
    K += b * kb + h * kh
    V += b * vb + h * vh
    high, low = rows_of(W + b * wb + h * wh, m, d, M, Dk, T)
    bias, wide = bias_of(LOGZ + n * m, m, M), tile(GM + b * gb + h * gh, 0, m, D, D, Dv, M)
    common = numbers(GZ + b * zb + h * zh, 0, m, M, 0.0) - tl.sum(wide * tile(MEANS + n * m * D, 0, m, D, D, Dv, M), 1)
    gm = wide.to(T)
    dw = tl.zeros([M, Dk], tl.float32)
    first = part * SPLIT
    for row in range(first, tl.minimum(first + SPLIT, N), BLOCK):
        k, v = tile(K, row, N, kl, d, Dk, BLOCK), tile(V, row, N, vl, D, Dv, BLOCK)
        logs = key_logarithms(k, high, low, counted(MASK + b * N, row, N, MASKED, BLOCK), square, m, M, T)
        share = tl.where(logs > NONE / 2, tl.exp2(tl.minimum(logs - bias[None, :], 0.0)), 0.0)
        put(DV + n * N * D, row, N, D, dot(share, gm, T), D, Dv, BLOCK)
        db = share * (dot(v, tl.trans(gm), T) + common[None, :])
        if ROWS:
            dw += dot(tl.trans(db), k, T)
        dk = back_to(db, high, T) - 2 * square * tl.sum(db, 1)[:, None] * k.to(tl.float32)
        put(DK + n * N * d, row, N, d, dk, d, Dk, BLOCK)
    if ROWS:
        put(DW + (n * parts + part) * m * d, 0, m, d, dw, d, Dk, M)
