"""Flash attention in a band: a program per part of the sequence and head skips keys that are out of reach.

Logarithms are to base 2. The far keys' mean and the logarithm of their weight initialise the running
maximum, denominator and numerator. Then come blocks of keys: first the sinks, then the band.
Backward, with weights p of single keys, P of all far keys together, and δ_i the mean of g_i·v_j by these weights:

    ∂s_ij = p_ij (g_i·v_j − δ_i)    ∂v_j = Σ_i p_ij g_i    ∂far_i = P_i g_i    ∂log weight_i = P_i (g_i·far_i − δ_i)

δ is g·out, but from the weights themselves, in fp32: ∂s then sums to 0 over keys, and anything common to all keys stays
out of ∂q. The error of a rounded `out` would enter there, times the length of the keys.

Positions are those of the keys: query i is at i + N − L, and sees KNOWN_i of the sinks. A query that sees nothing
has the logarithm −NONE, relative to which every weight is 0.
"""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, misc"

from __future__ import annotations

import triton
import triton.language as tl

from snnk_peft.functional.device_kernels.triton_shared.tiles import ABSENT, LOG2E, NONE, dot, numbers, put, tile


@triton.jit
def keys_at(
    K, V, MASK, SINK_K, SINK_V, start, N, kl, vl, beside,
    d: tl.constexpr, Dk: tl.constexpr, D: tl.constexpr, Dv: tl.constexpr, C: tl.constexpr, MASKED: tl.constexpr,
    SINKS: tl.constexpr,
):  # fmt: skip
    """Load C keys from `start` on, or with `beside` the sinks: also values, places, and whether they count."""
    total = N
    if SINKS > 0:
        start, total = tl.where(beside, 0, start), tl.where(beside, SINKS, N)
        K, kl = tl.where(beside, SINK_K, K), tl.where(beside, d, kl)
        V, vl = tl.where(beside, SINK_V, V), tl.where(beside, D, vl)
    j = start + tl.arange(0, C)
    counts = j < total
    if MASKED:
        counts = counts & (beside | (tl.load(MASK + j, mask=counts & (j < N), other=0) != 0))
    return tile(K, start, total, kl, d, Dk, C), tile(V, start, total, vl, D, Dv, C), j, counts


@triton.jit
def known_by(KNOWN, row, L, stride, SINKS: tl.constexpr, C: tl.constexpr):
    """Return the number of sinks visible to each of the queries row .. row + C."""
    i = row + tl.arange(0, C)
    known = i
    if SINKS > 0:
        known = tl.load(KNOWN + i.to(tl.int64) * stride, mask=i < L, other=0).to(tl.int32)
    return known


@triton.jit
def seen_from(i, j, counts, known, beside, width, CAUSAL: tl.constexpr, SINKS: tl.constexpr):
    """Return True where queries at i see keys at j, or see sinks with `beside`; shapes broadcast."""
    if CAUSAL:
        near = (i >= j) & (i - j < width)
    else:
        near = (i - j < width) & (j - i < width)
    if SINKS > 0:
        near = tl.where(beside, j < known, near)
    return near & counts


@triton.jit
def shares(logs, seen, lse):
    """Compute the weights as used in the result."""
    return tl.where(seen, tl.exp2(tl.minimum(logs - lse, 0.0)), 0.0)


@triton.jit
def reach(row, ahead, L, N, width, C: tl.constexpr, CAUSAL: tl.constexpr):
    """Return the first key that the queries row .. row + C see, and the end after the last one."""
    end = tl.minimum(row + C, L) + ahead
    if not CAUSAL:
        end += width - 1
    return tl.maximum(row + ahead - width + 1, 0), tl.minimum(end, N)


@triton.jit
def forward_pass(
    Q, K, V, MASK, SINK_K, SINK_V, KNOWN, FAR, WEIGHT, OUT, LSE, qb, qh, ql, kb, kh, kl, vb, vh, vl, ob, oh, ol, fb, fh,
    fl, sb, sl, heads, rep, L, N, width, scaling, SEGMENT,
    d: tl.constexpr, Dk: tl.constexpr, D: tl.constexpr, Dv: tl.constexpr, C: tl.constexpr, T: tl.constexpr,
    SINKS: tl.constexpr, MASKED: tl.constexpr, CAUSAL: tl.constexpr, AFAR: tl.constexpr,
):  # fmt: skip
    """AFAR: given FAR (B, H, L, D) and WEIGHT (B·H, L), natural logarithms. LSE (B·H, L), to base 2."""
    bh, part, ahead, scale = tl.program_id(0), tl.program_id(1), N - L, scaling * LOG2E
    b, h, n = (bh // heads).to(tl.int64), (bh % heads).to(tl.int64), (bh // rep).to(tl.int64)
    g, bh = h // rep, bh.to(tl.int64)
    Q += b * qb + h * qh
    K += b * kb + g * kh
    V += b * vb + g * vh
    MASK += b * N
    SINK_K += n * SINKS * d
    SINK_V += n * SINKS * D
    OUT += b * ob + h * oh
    for row in range(part * SEGMENT, tl.minimum(part * SEGMENT + SEGMENT, L), C):
        i, q, known = (
            row + tl.arange(0, C),
            tile(Q, row, L, ql, d, Dk, C),
            known_by(KNOWN + b * sb, row, L, sl, SINKS, C),
        )
        num, den, most = tl.zeros([C, Dv], tl.float32), tl.zeros([C], tl.float32), tl.full([C], NONE, tl.float32)
        if AFAR:
            weight = numbers(WEIGHT + bh * L, row, L, C, ABSENT)
            den = tl.where(weight > ABSENT / 2, 1.0, 0.0)
            most = tl.where(weight > ABSENT / 2, weight * LOG2E, NONE)
            num = tile(FAR + b * fb + h * fh, row, L, fl, D, Dv, C).to(tl.float32) * den[:, None]
        first, end = reach(row, ahead, L, N, width, C, CAUSAL)
        for start in range(first - (C if SINKS > 0 else 0), end, C):
            k, v, j, counts = keys_at(
                K, V, MASK, SINK_K, SINK_V, start, N, kl, vl, start < first, d, Dk, D, Dv, C, MASKED, SINKS
            )
            seen = seen_from(
                i[:, None] + ahead, j[None, :], counts[None, :], known[:, None], start < first, width, CAUSAL, SINKS
            )
            logs = tl.where(seen, dot(q, tl.trans(k), T) * scale, NONE)
            higher = tl.maximum(most, tl.max(logs, 1))
            old, w = tl.exp2(most - higher), tl.where(seen, tl.exp2(logs - higher[:, None]), 0.0)
            num, den, most = num * old[:, None] + dot(w, v, T), den * old + tl.sum(w, 1), higher
        total = tl.where(den > 0, den, 1.0)
        put(OUT, row, L, ol, num / total[:, None], D, Dv, C)
        tl.store(LSE + bh * L + i, tl.where(den > 0, most + tl.log2(total), -NONE), mask=i < L)


@triton.jit
def query_back(
    Q, K, V, MASK, SINK_K, SINK_V, KNOWN, FAR, WEIGHT, G, LSE, DELTA, DQ, DFAR, DWEIGHT, qb, qh, ql, kb, kh, kl, vb, vh,
    vl, gb, gh, gl, fb, fh, fl, sb, sl, heads, rep, L, N, width, scaling, SEGMENT,
    d: tl.constexpr, Dk: tl.constexpr, D: tl.constexpr, Dv: tl.constexpr, C: tl.constexpr, T: tl.constexpr,
    SINKS: tl.constexpr, MASKED: tl.constexpr, CAUSAL: tl.constexpr, AFAR: tl.constexpr,
):  # fmt: skip
    """Written: DELTA and DWEIGHT (B·H, L), and contiguous DQ and DFAR."""
    bh, part, ahead, scale = tl.program_id(0), tl.program_id(1), N - L, scaling * LOG2E
    b, h, n = (bh // heads).to(tl.int64), (bh % heads).to(tl.int64), (bh // rep).to(tl.int64)
    g, bh = h // rep, bh.to(tl.int64)
    Q += b * qb + h * qh
    K += b * kb + g * kh
    V += b * vb + g * vh
    MASK += b * N
    SINK_K += n * SINKS * d
    SINK_V += n * SINKS * D
    G += b * gb + h * gh
    for row in range(part * SEGMENT, tl.minimum(part * SEGMENT + SEGMENT, L), C):
        i, q, known = (
            row + tl.arange(0, C),
            tile(Q, row, L, ql, d, Dk, C),
            known_by(KNOWN + b * sb, row, L, sl, SINKS, C),
        )
        grad, lse = tile(G, row, L, gl, D, Dv, C), numbers(LSE + bh * L, row, L, C, -NONE)
        delta, total, dq = tl.zeros([C], tl.float32), tl.zeros([C], tl.float32), tl.zeros([C, Dk], tl.float32)
        if AFAR:
            weight = numbers(WEIGHT + bh * L, row, L, C, ABSENT)
            far = tile(FAR + b * fb + h * fh, row, L, fl, D, Dv, C).to(tl.float32)
            far_p, far_dp = shares(weight * LOG2E, weight > ABSENT / 2, lse), tl.sum(grad.to(tl.float32) * far, 1)
            put(DFAR + bh * L * D, row, L, D, far_p[:, None] * grad.to(tl.float32), D, Dv, C)
            delta, total = far_p * far_dp, far_p
        first, end = reach(row, ahead, L, N, width, C, CAUSAL)
        # Two passes: a block's part in δ, and with δ its part in ∂q.
        for start in range(first - (C if SINKS > 0 else 0), end, C):
            k, v, j, counts = keys_at(
                K, V, MASK, SINK_K, SINK_V, start, N, kl, vl, start < first, d, Dk, D, Dv, C, MASKED, SINKS
            )
            seen = seen_from(
                i[:, None] + ahead, j[None, :], counts[None, :], known[:, None], start < first, width, CAUSAL, SINKS
            )
            p = shares(dot(q, tl.trans(k), T) * scale, seen, lse[:, None])
            delta, total = delta + tl.sum(p * dot(grad, tl.trans(v), T), 1), total + tl.sum(p, 1)
        delta = delta / tl.where(total > 0, total, 1.0)
        for start in range(first - (C if SINKS > 0 else 0), end, C):
            k, v, j, counts = keys_at(
                K, V, MASK, SINK_K, SINK_V, start, N, kl, vl, start < first, d, Dk, D, Dv, C, MASKED, SINKS
            )
            seen = seen_from(
                i[:, None] + ahead, j[None, :], counts[None, :], known[:, None], start < first, width, CAUSAL, SINKS
            )
            p = shares(dot(q, tl.trans(k), T) * scale, seen, lse[:, None])
            dq += dot(p * (dot(grad, tl.trans(v), T) - delta[:, None]), k, T)
        tl.store(DELTA + bh * L + i, delta, mask=i < L)
        put(DQ + bh * L * d, row, L, d, dq * scaling, d, Dk, C)
        if AFAR:
            tl.store(DWEIGHT + bh * L + i, far_p * (far_dp - delta), mask=i < L)


@triton.jit
def key_back(
    Q, K, V, MASK, SINK_K, SINK_V, KNOWN, G, LSE, DELTA, DK, DV, DSINKS, qb, qh, ql, kb, kh, kl, vb, vh, vl, gb, gh, gl,
    sb, sl, groups, rep, L, N, width, scaling, SEGMENT,
    d: tl.constexpr, Dk: tl.constexpr, D: tl.constexpr, Dv: tl.constexpr, C: tl.constexpr, T: tl.constexpr,
    SINKS: tl.constexpr, MASKED: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    """DK and DV, contiguous, of all `rep` query heads of a key head; DSINKS (B·G, parts of the queries, SINKS, d + D).

    Programs after those of the keys' parts handle the sinks, each with one part of the queries.
    """
    bg, part, ahead, scale = tl.program_id(0), tl.program_id(1), N - L, scaling * LOG2E
    b, g = (bg // groups).to(tl.int64), (bg % groups).to(tl.int64)
    own, bg = part - tl.cdiv(N, SEGMENT), bg.to(tl.int64)
    beside = own >= 0
    K += b * kb + g * kh
    V += b * vb + g * vh
    MASK += b * N
    SINK_K += bg * SINKS * d
    SINK_V += bg * SINKS * D
    begin, stop = part * SEGMENT, tl.minimum(part * SEGMENT + SEGMENT, N)
    if SINKS > 0:
        begin, stop = tl.where(beside, 0, begin), tl.where(beside, 1, stop)
    for col in range(begin, stop, C):
        k, v, j, counts = keys_at(K, V, MASK, SINK_K, SINK_V, col, N, kl, vl, beside, d, Dk, D, Dv, C, MASKED, SINKS)
        dk, dv = tl.zeros([C, Dk], tl.float32), tl.zeros([C, Dv], tl.float32)
        first, end = (
            tl.maximum(col - ahead - (0 if CAUSAL else width - 1), 0),
            tl.minimum(col + C, N) - ahead + width - 1,
        )
        if SINKS > 0:
            first, end = tl.where(beside, own * SEGMENT, first), tl.where(beside, own * SEGMENT + SEGMENT, end)
        for r in range(rep):
            h, at = g * rep + r, (bg * rep + r) * L
            for row in range(first, tl.minimum(end, L), C):
                i, known = row + tl.arange(0, C), known_by(KNOWN + b * sb, row, L, sl, SINKS, C)
                q, grad = (
                    tile(Q + b * qb + h * qh, row, L, ql, d, Dk, C),
                    tile(G + b * gb + h * gh, row, L, gl, D, Dv, C),
                )
                lse, delta = numbers(LSE + at, row, L, C, -NONE), numbers(DELTA + at, row, L, C, 0.0)
                seen = seen_from(
                    i[None, :] + ahead, j[:, None], counts[:, None], known[None, :], beside, width, CAUSAL, SINKS
                )
                p = shares(dot(k, tl.trans(q), T) * scale, seen, lse[None, :])
                dv += dot(p, grad, T)
                dk += dot(p * (dot(v, tl.trans(grad), T) - delta[None, :]), q, T)
        if beside:
            if SINKS > 0:
                to = DSINKS + (bg * tl.cdiv(L, SEGMENT) + own) * SINKS * (d + D)
                put(to, 0, SINKS, d + D, dk * scaling, d, Dk, C)
                put(to + d, 0, SINKS, d + D, dv, D, Dv, C)
        else:
            put(DK + bg * N * d, col, N, d, dk * scaling, d, Dk, C)
            put(DV + bg * N * D, col, N, D, dv, D, Dv, C)
