"""Flash attention in a band: a program per part of the sequence and head sees no key that is out of reach.

Logarithms are to base 2. What is known of far keys, their mean and the logarithm of their weight, is where the running
maximum, denominator and numerator begin; sinks and the band follow. Backward, with the weights p of single keys and P
of all far keys together, and δ_i the mean of g_i·v_j by these weights:

    ∂s_ij = p_ij (g_i·v_j − δ_i)    ∂v_j = Σ_i p_ij g_i    ∂far_i = P_i g_i    ∂log weight_i = P_i (g_i·far_i − δ_i)

δ is g·out, but of the weights themselves, in fp32: ∂s then sums to 0 over keys, and what all keys have in common stays
out of ∂q. The error of a rounded `out` would enter there, times the length of the keys.

Positions are those of the keys: query i stands at i + N − L. A query that sees nothing has the logarithm −NONE, beside
which every weight is 0.
"""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, misc"

from __future__ import annotations

import triton
import triton.language as tl

from snnk_peft.functional.device_kernels.triton_exponential.tiles import (
    ABSENT,
    LOG2E,
    NONE,
    counted,
    dot,
    numbers,
    put,
    tile,
)


@triton.jit
def near(i, j, width, CAUSAL: tl.constexpr):
    """Whether a query at i sees a key at j; shapes that broadcast."""
    if CAUSAL:
        return (i >= j) & (i - j < width)
    return (i - j < width) & (j - i < width)


@triton.jit
def beside(SEEN, row, L, stride, SINKS: tl.constexpr, S: tl.constexpr, C: tl.constexpr):
    """Which of the sinks the queries row .. row + C see, (C, S)."""
    i, c = row + tl.arange(0, C), tl.arange(0, S)
    inside = (i < L)[:, None] & (c < SINKS)[None, :]
    return inside & (tl.load(SEEN + i.to(tl.int64)[:, None] * stride + c[None, :], mask=inside, other=0) != 0)


@triton.jit
def and_these(q, k, v, seen, scale, num, den, most, T: tl.constexpr):
    """Numerators, denominators and the logarithm of their scale with some keys more."""
    logs = tl.where(seen, dot(q, tl.trans(k), T) * scale, NONE)
    higher = tl.maximum(most, tl.max(logs, 1))
    old, w = tl.exp2(most - higher), tl.where(seen, tl.exp2(logs - higher[:, None]), 0.0)
    return num * old[:, None] + dot(w, v, T), den * old + tl.sum(w, 1), higher


@triton.jit
def shares(logs, seen, lse):
    """Weights, as they are in the result."""
    return tl.where(seen, tl.exp2(tl.minimum(logs - lse, 0.0)), 0.0)


@triton.jit
def forward_pass(
    Q, K, V, MASK, SINK_K, SINK_V, SEEN, FAR, WEIGHT, OUT, LSE, qb, qh, ql, kb, kh, kl, vb, vh, vl, ob, oh, ol, fb, fh,
    fl, sb, sl, heads, rep, L, N, width, scaling, SEGMENT,
    d: tl.constexpr, Dk: tl.constexpr, D: tl.constexpr, Dv: tl.constexpr, C: tl.constexpr, T: tl.constexpr,
    SINKS: tl.constexpr, S: tl.constexpr, MASKED: tl.constexpr, CAUSAL: tl.constexpr, AFAR: tl.constexpr,
):  # fmt: skip
    """AFAR: there are FAR (B, H, L, D) and WEIGHT (B·H, L), natural logarithms. LSE (B·H, L), to base 2."""
    bh, part, ahead, scale = tl.program_id(0), tl.program_id(1), N - L, scaling * LOG2E
    b, h, n = (bh // heads).to(tl.int64), (bh % heads).to(tl.int64), (bh // rep).to(tl.int64)
    g, bh = h // rep, bh.to(tl.int64)
    Q += b * qb + h * qh
    K += b * kb + g * kh
    V += b * vb + g * vh
    OUT += b * ob + h * oh
    for row in range(part * SEGMENT, tl.minimum(part * SEGMENT + SEGMENT, L), C):
        i, q = row + tl.arange(0, C), tile(Q, row, L, ql, d, Dk, C)
        num, den, most = tl.zeros([C, Dv], tl.float32), tl.zeros([C], tl.float32), tl.full([C], NONE, tl.float32)
        if AFAR:
            weight = numbers(WEIGHT + bh * L, row, L, C, ABSENT)
            den = tl.where(weight > ABSENT / 2, 1.0, 0.0)
            most = tl.where(weight > ABSENT / 2, weight * LOG2E, NONE)
            num = tile(FAR + b * fb + h * fh, row, L, fl, D, Dv, C).to(tl.float32) * den[:, None]
        if SINKS > 0:
            k, v = (
                tile(SINK_K + n * SINKS * d, 0, SINKS, d, d, Dk, S),
                tile(SINK_V + n * SINKS * D, 0, SINKS, D, D, Dv, S),
            )
            seen = beside(SEEN + b * sb, row, L, sl, SINKS, S, C)
            num, den, most = and_these(q, k, v, seen, scale, num, den, most, T)
        first = tl.maximum(row + ahead - width + 1, 0)
        end = tl.minimum(tl.minimum(row + C, L) + ahead + (0 if CAUSAL else width - 1), N)
        for start in range(first, end, C):
            j, counts = start + tl.arange(0, C), counted(MASK + b * N, start, N, MASKED, C)
            seen = near(i[:, None] + ahead, j[None, :], width, CAUSAL) & counts[None, :]
            k, v = tile(K, start, N, kl, d, Dk, C), tile(V, start, N, vl, D, Dv, C)
            num, den, most = and_these(q, k, v, seen, scale, num, den, most, T)
        total = tl.where(den > 0, den, 1.0)
        put(OUT, row, L, ol, num / total[:, None], D, Dv, C)
        tl.store(LSE + bh * L + i, tl.where(den > 0, most + tl.log2(total), -NONE), mask=i < L)


@triton.jit
def weighed(q, k, v, grad, seen, scale, lse, T: tl.constexpr):
    """Weights of keys, and g_i·v_j."""
    return shares(dot(q, tl.trans(k), T) * scale, seen, lse[:, None]), dot(grad, tl.trans(v), T)


@triton.jit
def query_back(
    Q, K, V, MASK, SINK_K, SINK_V, SEEN, FAR, WEIGHT, G, LSE, DELTA, DQ, DSINKS, DFAR, DWEIGHT, qb, qh, ql, kb, kh, kl,
    vb, vh, vl, gb, gh, gl, fb, fh, fl, sb, sl, heads, rep, L, N, width, scaling, SEGMENT,
    d: tl.constexpr, Dk: tl.constexpr, D: tl.constexpr, Dv: tl.constexpr, C: tl.constexpr, T: tl.constexpr,
    SINKS: tl.constexpr, S: tl.constexpr, MASKED: tl.constexpr, CAUSAL: tl.constexpr, AFAR: tl.constexpr,
):  # fmt: skip
    """Written: DELTA and DWEIGHT (B·H, L), contiguous DQ and DFAR, and DSINKS (B·H, parts, SINKS, d + D)."""
    bh, part, parts = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    ahead, scale = N - L, scaling * LOG2E
    b, h, n = (bh // heads).to(tl.int64), (bh % heads).to(tl.int64), (bh // rep).to(tl.int64)
    g, bh = h // rep, bh.to(tl.int64)
    Q += b * qb + h * qh
    K += b * kb + g * kh
    V += b * vb + g * vh
    G += b * gb + h * gh
    dsk, dsv = tl.zeros([S, Dk], tl.float32), tl.zeros([S, Dv], tl.float32)
    for row in range(part * SEGMENT, tl.minimum(part * SEGMENT + SEGMENT, L), C):
        i, q, grad = row + tl.arange(0, C), tile(Q, row, L, ql, d, Dk, C), tile(G, row, L, gl, D, Dv, C)
        lse = numbers(LSE + bh * L, row, L, C, -NONE)
        delta, total, dq = tl.zeros([C], tl.float32), tl.zeros([C], tl.float32), tl.zeros([C, Dk], tl.float32)
        if AFAR:
            weight = numbers(WEIGHT + bh * L, row, L, C, ABSENT)
            far = tile(FAR + b * fb + h * fh, row, L, fl, D, Dv, C).to(tl.float32)
            total, of_far = shares(weight * LOG2E, weight > ABSENT / 2, lse), tl.sum(grad.to(tl.float32) * far, 1)
            put(DFAR + bh * L * D, row, L, D, total[:, None] * grad.to(tl.float32), D, Dv, C)
            delta = total * of_far
        if SINKS > 0:
            k, v = (
                tile(SINK_K + n * SINKS * d, 0, SINKS, d, d, Dk, S),
                tile(SINK_V + n * SINKS * D, 0, SINKS, D, D, Dv, S),
            )
            beside_p, beside_dp = weighed(q, k, v, grad, beside(SEEN + b * sb, row, L, sl, SINKS, S, C), scale, lse, T)
            delta, total = delta + tl.sum(beside_p * beside_dp, 1), total + tl.sum(beside_p, 1)
        first = tl.maximum(row + ahead - width + 1, 0)
        end = tl.minimum(tl.minimum(row + C, L) + ahead + (0 if CAUSAL else width - 1), N)
        for start in range(first, end, C):
            j, counts = start + tl.arange(0, C), counted(MASK + b * N, start, N, MASKED, C)
            seen = near(i[:, None] + ahead, j[None, :], width, CAUSAL) & counts[None, :]
            k, v = tile(K, start, N, kl, d, Dk, C), tile(V, start, N, vl, D, Dv, C)
            p, dp = weighed(q, k, v, grad, seen, scale, lse, T)
            delta, total = delta + tl.sum(p * dp, 1), total + tl.sum(p, 1)
        delta = delta / tl.where(total > 0, total, 1.0)
        tl.store(DELTA + bh * L + i, delta, mask=i < L)
        if AFAR:
            weight = numbers(WEIGHT + bh * L, row, L, C, ABSENT)
            p = shares(weight * LOG2E, weight > ABSENT / 2, lse)
            tl.store(DWEIGHT + bh * L + i, p * (of_far - delta), mask=i < L)
        if SINKS > 0:
            ds = beside_p * (beside_dp - delta[:, None])
            dq += dot(ds, tile(SINK_K + n * SINKS * d, 0, SINKS, d, d, Dk, S), T)
            dsk += dot(tl.trans(ds), q, T)
            dsv += dot(tl.trans(beside_p), grad, T)
        for start in range(first, end, C):
            j, counts = start + tl.arange(0, C), counted(MASK + b * N, start, N, MASKED, C)
            seen = near(i[:, None] + ahead, j[None, :], width, CAUSAL) & counts[None, :]
            k, v = tile(K, start, N, kl, d, Dk, C), tile(V, start, N, vl, D, Dv, C)
            p, dp = weighed(q, k, v, grad, seen, scale, lse, T)
            dq += dot(p * (dp - delta[:, None]), k, T)
        put(DQ + bh * L * d, row, L, d, dq * scaling, d, Dk, C)
    if SINKS > 0:
        at = (bh * parts + part) * SINKS * (d + D)
        put(DSINKS + at, 0, SINKS, d + D, dsk * scaling, d, Dk, S)
        put(DSINKS + at + d, 0, SINKS, d + D, dsv, D, Dv, S)


@triton.jit
def key_back(
    Q, K, V, MASK, G, LSE, DELTA, DK, DV, qb, qh, ql, kb, kh, kl, vb, vh, vl, gb, gh, gl, groups, rep, L, N, width,
    scaling, SEGMENT,
    d: tl.constexpr, Dk: tl.constexpr, D: tl.constexpr, Dv: tl.constexpr, C: tl.constexpr, T: tl.constexpr,
    MASKED: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    """DK and DV, contiguous, of all `rep` query heads of a key head."""
    bg, part, ahead, scale = tl.program_id(0), tl.program_id(1), N - L, scaling * LOG2E
    b, g = (bg // groups).to(tl.int64), (bg % groups).to(tl.int64)
    bg = bg.to(tl.int64)
    K += b * kb + g * kh
    V += b * vb + g * vh
    for col in range(part * SEGMENT, tl.minimum(part * SEGMENT + SEGMENT, N), C):
        j, counts = col + tl.arange(0, C), counted(MASK + b * N, col, N, MASKED, C)
        k, v = tile(K, col, N, kl, d, Dk, C), tile(V, col, N, vl, D, Dv, C)
        dk, dv = tl.zeros([C, Dk], tl.float32), tl.zeros([C, Dv], tl.float32)
        first = tl.maximum(col - ahead - (0 if CAUSAL else width - 1), 0)
        end = tl.minimum(tl.minimum(col + C, N) - ahead + width - 1, L)
        for r in range(rep):
            h = g * rep + r
            at = (bg * rep + r) * L
            for row in range(first, end, C):
                i = row + tl.arange(0, C)
                q, grad = (
                    tile(Q + b * qb + h * qh, row, L, ql, d, Dk, C),
                    tile(G + b * gb + h * gh, row, L, gl, D, Dv, C),
                )
                seen = near(i[None, :] + ahead, j[:, None], width, CAUSAL) & counts[:, None]
                lse, delta = numbers(LSE + at, row, L, C, -NONE), numbers(DELTA + at, row, L, C, 0.0)
                p = shares(dot(k, tl.trans(q), T) * scale, seen, lse[None, :])
                dv += dot(p, grad, T)
                dk += dot(p * (dot(v, tl.trans(grad), T) - delta[None, :]), q, T)
        put(DK + bg * N * d, col, N, d, dk * scaling, d, Dk, C)
        put(DV + bg * N * D, col, N, D, dv, D, Dv, C)
