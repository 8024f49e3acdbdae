"""Causal attention, chunk by chunk: a program per part of the sequence and head carries the sums of earlier keys.

Within a chunk one scale u per feature, the largest key so far or in the chunk: out = num / den with φ = 2^{a + u − A},
ψ = 2^{b − u}, all <= 1. A row whose keys vanish next to later ones of its chunk has den < 2^-60; then the chunk
is recomputed pair by pair, in the kernel, without the host. Backward, with P_ij = Σ_r e^{a_ir + b_jr − lse_i},
dP_ij = g_i·v_j − δ_i and δ_i = g_i·out_i − ∂lse_i:

    ∂a_ir = Σ_{j<=i} e^{a_ir + b_jr − lse_i} dP_ij      ∂b_jr = the same over i >= j      ∂v_j = Σ_{i>=j} P_ij g_i

so keys see later queries through Σ_i e^{a_ir − lse_i} [g_i, δ_i]: sums like those of keys, from the other end
(`key_sums.py`). Every exponential is at most 1, except 2^{A − lse} <= 2^60.
"""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, misc"

from __future__ import annotations

import triton
import triton.language as tl

from snnk_peft.functional.device_kernels.triton_shared.tiles import (
    ABSENT,
    LEAST,
    LOG2E,
    NONE,
    back_to,
    bias_of,
    counted,
    dot,
    key_logarithms,
    logarithms,
    numbers,
    power,
    put,
    rows_of,
    tile,
)


@triton.jit
def sums_at(SUMS, n, part, parts, count, m: tl.constexpr, M: tl.constexpr, D: tl.constexpr, Dv: tl.constexpr):
    """Load top, z and s of one part; see `key_sums.py`."""
    at, r = n * parts + part, tl.arange(0, M)
    top = tl.load(SUMS + at * m + r, mask=r < m, other=NONE)
    z = tl.load(SUMS + count + at * m + r, mask=r < m, other=0.0)
    return top, z, tile(SUMS + 2 * count + at * m * D, 0, m, D, D, Dv, M)


@triton.jit
def lower(C: tl.constexpr):
    """Return j <= i, (C, C)."""
    return tl.arange(0, C)[:, None] >= tl.arange(0, C)[None, :]


@triton.jit
def scaled(a, b, top):
    """Compute φ, A and ψ at the scale u = max(top, largest of the chunk), and u."""
    u = tl.maximum(top, tl.max(b, 0))
    e = a + u[None, :]
    A = tl.max(e, 1)[:, None]
    return tl.exp2(e - A), A, tl.where(b > NONE / 2, tl.exp2(b - u[None, :]), 0.0), u


@triton.jit
def row_of(x, i, C: tl.constexpr):
    """Return row i of x (C, m)."""
    return tl.sum(tl.where(tl.arange(0, C)[:, None] == i, x, 0.0), 0)


@triton.jit
def column_of(x, j, C: tl.constexpr):
    """Return column j of x (m, C)."""
    return tl.sum(tl.where(tl.arange(0, C)[None, :] == j, x, 0.0), 1)


@triton.jit
def by_pairs(a, b, v, top, z, s, T: tl.constexpr, C: tl.constexpr):
    """Compute numerators, denominators and log2 of their scale, exact for any keys."""
    e = a + top[None, :]
    A = tl.max(e, 1)[:, None]
    phi = tl.exp2(e - A)
    num, den = dot(phi, s, T), tl.sum(phi * z[None, :], 1)[:, None]
    pairs = tl.full([C, C], NONE, tl.float32)
    for j in range(C):
        x = a + row_of(b, j, C)[None, :]
        most = tl.max(x, 1)
        found = most + tl.log2(tl.sum(tl.exp2(x - most[:, None]), 1))
        pairs = tl.where((tl.arange(0, C)[None, :] == j) & lower(C), found[:, None], pairs)
    higher = tl.maximum(A, tl.max(pairs, 1)[:, None])
    w, old = power(pairs - higher), power(A - higher)
    return num * old + dot(w, v, T), den * old + tl.sum(w, 1)[:, None], higher


@triton.jit
def forward_pass(
    Q, K, V, W, WK, OFF, MASK, PREFIXES, OUT, LSE, qb, qh, ql, kb, kh, kl, vb, vh, vl, ob, oh, ol, wb, wh, xb, xh,
    cb, ch, heads, rep, L, square, SEGMENT,
    m: tl.constexpr, M: tl.constexpr, d: tl.constexpr, Dk: tl.constexpr, D: tl.constexpr, Dv: tl.constexpr,
    C: tl.constexpr, T: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """PREFIXES: of the keys before each part. LSE (B·H, L): natural log of the denominators, ABSENT without a key."""
    bh, part, parts = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    b, h, n = (bh // heads).to(tl.int64), (bh % heads).to(tl.int64), (bh // rep).to(tl.int64)
    g = h // rep
    count = (tl.num_programs(0) // rep).to(tl.int64) * parts * m
    Q += b * qb + h * qh
    K += b * kb + g * kh
    V += b * vb + g * vh
    OUT += b * ob + h * oh
    LSE += bh.to(tl.int64) * L
    high, low = rows_of(W + b * wb + g * wh, m, d, M, Dk, T)
    key_high, key_low = rows_of(WK + b * xb + g * xh, m, d, M, Dk, T)
    off = bias_of(OFF + b * cb + g * ch, m, M)
    top, z, s = sums_at(PREFIXES, n, part, parts, count, m, M, D, Dv)
    for row in range(part * SEGMENT, tl.minimum(part * SEGMENT + SEGMENT, L), C):
        a = logarithms(tile(Q, row, L, ql, d, Dk, C), high, low, T) + off[None, :]
        counts = counted(MASK + b * L, row, L, MASKED, C)
        logs = key_logarithms(tile(K, row, L, kl, d, Dk, C), key_high, key_low, counts, square, m, M, T)
        v = tile(V, row, L, vl, D, Dv, C)
        phi, A, psi, u = scaled(a, logs, top)
        shrink = power(top - u)
        w = tl.where(lower(C), dot(phi, tl.trans(psi), T), 0.0)
        den = tl.sum(phi * (z * shrink)[None, :], 1)[:, None] + tl.sum(w, 1)[:, None]
        num = dot(phi, s * shrink[:, None], T) + dot(w, v, T)
        i = tl.arange(0, C)
        first = tl.minimum(tl.min(tl.where(counts, i, C), 0), tl.min(tl.where(top > NONE / 2, 0, C), 0))
        seen = ((i >= first) & (row + i < L))[:, None]
        if tl.min(tl.where(seen, den, 1.0)) < tl.exp2(-LEAST):
            # Recompute everything from memory: keeping values here would fill the registers.
            a = logarithms(tile(Q, row, L, ql, d, Dk, C), high, low, T) + off[None, :]
            logs = key_logarithms(tile(K, row, L, kl, d, Dk, C), key_high, key_low, counts, square, m, M, T)
            num, den, A = by_pairs(a, logs, tile(V, row, L, vl, D, Dv, C), top, z, s, T, C)
        put(OUT, row, L, ol, tl.where(seen, num / tl.where(seen, den, 1.0), 0.0), D, Dv, C)
        lse = tl.where(seen, (A + tl.log2(tl.where(seen, den, 1.0))) / LOG2E, ABSENT)
        put(LSE, row, L, 1, lse, 1, 1, C)
        z = z * shrink + tl.sum(psi, 0)
        s = s * shrink[:, None] + dot(tl.trans(psi), v, T)
        top = u


@triton.jit
def query_back(
    Q, K, V, G, OUT, GLSE, W, WK, OFF, MASK, PREFIXES, LSE, DELTA, DQ, DOFF, DW, qb, qh, ql, kb, kh, kl, vb, vh, vl,
    gb, gh, gl, ob, oh, ol, wb, wh, xb, xh, cb, ch, heads, rep, L, square, SEGMENT,
    m: tl.constexpr, M: tl.constexpr, d: tl.constexpr, Dk: tl.constexpr, D: tl.constexpr, Dv: tl.constexpr,
    C: tl.constexpr, T: tl.constexpr, MASKED: tl.constexpr, ROWS: tl.constexpr, WEIGHED: tl.constexpr,
):  # fmt: skip
    """WEIGHED: lse has a gradient GLSE. Writes DELTA (B·H, L), contiguous DQ, DOFF (B·H, parts, m), DW (…, d)."""
    bh, part, parts = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    b, h, n = (bh // heads).to(tl.int64), (bh % heads).to(tl.int64), (bh // rep).to(tl.int64)
    g, bh = h // rep, bh.to(tl.int64)
    count = (tl.num_programs(0) // rep).to(tl.int64) * parts * m
    Q += b * qb + h * qh
    K += b * kb + g * kh
    V += b * vb + g * vh
    G += b * gb + h * gh
    OUT += b * ob + h * oh
    high, low = rows_of(W + b * wb + g * wh, m, d, M, Dk, T)
    key_high, key_low = rows_of(WK + b * xb + g * xh, m, d, M, Dk, T)
    off = bias_of(OFF + b * cb + g * ch, m, M)
    top, z, s = sums_at(PREFIXES, n, part, parts, count, m, M, D, Dv)
    doff, dw = tl.zeros([M], tl.float32), tl.zeros([M, Dk], tl.float32)
    for row in range(part * SEGMENT, tl.minimum(part * SEGMENT + SEGMENT, L), C):
        q, v, grad = tile(Q, row, L, ql, d, Dk, C), tile(V, row, L, vl, D, Dv, C), tile(G, row, L, gl, D, Dv, C)
        delta = tl.sum(grad.to(tl.float32) * tile(OUT, row, L, ol, D, Dv, C).to(tl.float32), 1)
        if WEIGHED:
            delta -= numbers(GLSE + bh * L, row, L, C, 0.0)
        r = row + tl.arange(0, C)
        tl.store(DELTA + bh * L + r, delta, mask=r < L)
        delta = delta[:, None]
        a = logarithms(q, high, low, T) + off[None, :]
        counts = counted(MASK + b * L, row, L, MASKED, C)
        logs = key_logarithms(tile(K, row, L, kl, d, Dk, C), key_high, key_low, counts, square, m, M, T)
        lse = numbers(LSE + bh * L, row, L, C, ABSENT)[:, None]
        lse = tl.where(lse > ABSENT / 2, lse * LOG2E, -NONE)
        da = dot(grad, tl.trans(s), T) - delta * z[None, :]
        da *= tl.exp2(tl.minimum(a + top[None, :] - lse, 0.0))
        dp = tl.where(lower(C) & counts[None, :], dot(grad, tl.trans(v), T) - delta, 0.0)
        phi, A, psi, most = scaled(a, logs, tl.full([M], NONE, tl.float32))
        if tl.max(tl.where(lse < -NONE / 2, A - lse, 0.0)) > LEAST:
            for j in range(C):
                x = tl.exp2(tl.minimum(a + row_of(logs, j, C)[None, :] - lse, 0.0))
                da += x * column_of(dp, j, C)[:, None]
        else:
            da += phi * dot(dp * tl.exp2(A - lse), psi, T)
        put(DQ + bh * L * d, row, L, d, back_to(da, high, T), d, Dk, C)
        doff += tl.sum(da, 0)
        if ROWS:
            dw += dot(tl.trans(da), q, T)
        u = tl.maximum(top, most)
        shrink, own = power(top - u), psi * power(most - u)[None, :]
        z = z * shrink + tl.sum(own, 0)
        s = s * shrink[:, None] + dot(tl.trans(own), v, T)
        top = u
    at, f = (bh * parts + part) * m, tl.arange(0, M)
    tl.store(DOFF + at + f, doff, mask=f < m)
    if ROWS:
        put(DW + at * d, 0, m, d, dw, d, Dk, M)


@triton.jit
def key_back(
    Q, K, V, G, W, WK, OFF, MASK, PREFIXES, LSE, DELTA, DK, DV, DW, qb, qh, ql, kb, kh, kl, vb, vh, vl, gb, gh, gl,
    wb, wh, xb, xh, cb, ch, heads, rep, L, square, SEGMENT,
    m: tl.constexpr, M: tl.constexpr, d: tl.constexpr, Dk: tl.constexpr, D: tl.constexpr, Dv: tl.constexpr,
    C: tl.constexpr, T: tl.constexpr, MASKED: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """PREFIXES: of the queries after each part, without offset. DK, DV: of each query head, contiguous."""
    bh, part, parts = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    b, h, g = (bh // heads).to(tl.int64), (bh % heads).to(tl.int64), (bh % heads // rep).to(tl.int64)
    bh = bh.to(tl.int64)
    count = tl.num_programs(0).to(tl.int64) * parts * m
    Q += b * qb + h * qh
    K += b * kb + g * kh
    V += b * vb + g * vh
    G += b * gb + h * gh
    high, low = rows_of(W + b * wb + g * wh, m, d, M, Dk, T)
    key_high, key_low = rows_of(WK + b * xb + g * xh, m, d, M, Dk, T)
    off = bias_of(OFF + b * cb + g * ch, m, M)
    top, z, s = sums_at(PREFIXES, bh, part, parts, count, m, M, D, Dv)
    top += off
    dw = tl.zeros([M, Dk], tl.float32)
    chunks = tl.cdiv(tl.minimum(SEGMENT, L - part * SEGMENT), C)
    for step in range(chunks):
        row = part * SEGMENT + (chunks - 1 - step) * C
        k, v, grad = tile(K, row, L, kl, d, Dk, C), tile(V, row, L, vl, D, Dv, C), tile(G, row, L, gl, D, Dv, C)
        a = logarithms(tile(Q, row, L, ql, d, Dk, C), high, low, T) + off[None, :]
        counts = counted(MASK + b * L, row, L, MASKED, C)
        logs = key_logarithms(k, key_high, key_low, counts, square, m, M, T)
        lse = numbers(LSE + bh * L, row, L, C, ABSENT)[:, None]
        lse = tl.where(lse > ABSENT / 2, lse * LOG2E, -NONE)
        delta = numbers(DELTA + bh * L, row, L, C, 0.0)[:, None]
        x = tl.exp2(tl.minimum(logs + top[None, :], 0.0))
        dv, db = dot(x, s, T), x * (dot(v, tl.trans(s), T) - z[None, :])
        dp = tl.where(lower(C) & counts[None, :], dot(grad, tl.trans(v), T) - delta, 0.0)
        phi, A, psi, _ = scaled(a, logs, tl.full([M], NONE, tl.float32))
        if tl.max(tl.where(lse < -NONE / 2, A - lse, 0.0)) > LEAST:
            for i in range(C):
                x = tl.exp2(tl.minimum(logs + row_of(a - lse, i, C)[None, :], 0.0))
                share = tl.where(tl.arange(0, C) <= i, tl.sum(x, 1), 0.0)
                dv += share[:, None] * row_of(grad.to(tl.float32), i, C)[None, :]
                db += x * row_of(dp, i, C)[:, None]
        else:
            weight = tl.exp2(A - lse)
            p = tl.where(lower(C), dot(phi, tl.trans(psi), T), 0.0) * weight
            dv += dot(tl.trans(p), grad, T)
            db += psi * dot(tl.trans(dp * weight), phi, T)
        put(DV + bh * L * D, row, L, D, dv, D, Dv, C)
        dk = back_to(db, key_high, T) - 2 * square * tl.sum(db, 1)[:, None] * k.to(tl.float32)
        put(DK + bh * L * d, row, L, d, dk, d, Dk, C)
        if ROWS:
            dw += dot(tl.trans(db), k, T)
        c = a - lse
        higher = tl.maximum(top, tl.max(c, 0))
        shrink, y = power(top - higher), tl.where(c > NONE / 2, tl.exp2(c - higher[None, :]), 0.0)
        s, z, top = s * shrink[:, None] + dot(tl.trans(y), grad, T), z * shrink + tl.sum(y * delta, 0), higher
    if ROWS:
        put(DW + (bh * parts + part) * m * d, 0, m, d, dw, d, Dk, M)
