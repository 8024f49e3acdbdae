"""Causal linear attention, chunk by chunk: a program per part of the sequence and head carries the sums before it.

Row i has the scale ρ_i, the largest of the keys that it sees, with P that of the prefix:

    num_i = Σ_{j<=i} φ_i·ψ_j e^{s_j − ρ_i} v_j + e^{P − ρ_i} φ_i S      den_i likewise      out = num / den

Backward, with g'_i = g_i / den_i, δ_i = −g'_i·out_i and dP_ij = g'_i·v_j + δ_i, tops and ρ constant:

    ∂φ_i = Σ_{j<=i} dP_ij e^{s_j − ρ_i} ψ_j + e^{P − ρ_i} (S g'_i + z δ_i)
    ∂ψ_j = Σ_{i>=j} dP_ij e^{s_j − ρ_i} φ_i      ∂v_j = Σ_{i>=j} φ_i·ψ_j e^{s_j − ρ_i} g'_i      ∂s_j = ψ_j·∂ψ_j

so keys see later queries through Σ_i e^{−ρ_i} φ_i [g'_i, δ_i]: sums like those of keys, from the other end (`sums.py`).
ρ grows with i, so every exponential is at most 1.
"""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, misc"

from __future__ import annotations

import triton
import triton.language as tl

from snnk_peft.functional.device_kernels.triton_exponential.causal import lower
from snnk_peft.functional.device_kernels.triton_linear.sums import inverse
from snnk_peft.functional.device_kernels.triton_linear.tiles import keys_of, product, sums_at, weight, wide_tile
from snnk_peft.functional.device_kernels.triton_shared.tiles import NONE, numbers, put


@triton.jit
def factors(scales, top, C: tl.constexpr, SCALED: tl.constexpr):
    """Return ρ (C,), e^{s_j − ρ_i} for j <= i (C, C), and e^{P − ρ_i} (C,)."""
    if not SCALED:
        return tl.zeros([C], tl.float32), tl.where(lower(C), 1.0, 0.0), tl.full([C], 1.0, tl.float32)
    rho = tl.maximum(tl.max(tl.where(lower(C), scales[None, :], NONE), 1), top)
    return rho, tl.where(lower(C), weight(tl.minimum(scales[None, :] - rho[:, None], 0.0)), 0.0), weight(top - rho)


@triton.jit
def behind(top, z, s, k, v, scales, FULL: tl.constexpr, SCALED: tl.constexpr):
    """Add the keys of a chunk to the sums."""
    if SCALED:
        higher = tl.maximum(top, tl.max(scales, 0))
        k *= weight(scales - higher)[:, None]
        shrink = weight(top - higher)
        z, s, top = z * shrink, s * shrink[:, None], higher
    return top, z + tl.sum(k, 0), s + product(tl.trans(k), v, FULL)


@triton.jit
def forward_pass(
    Q, K, V, SCALES, MASK, PREFIXES, OUT, DEN, RHO, qb, qh, ql, kb, kh, kl, vb, vh, vl, sb, sh, sl, heads, rep, L,
    SEGMENT,
    m: tl.constexpr, M: tl.constexpr, D: tl.constexpr, Dv: tl.constexpr, C: tl.constexpr, FULL: tl.constexpr,
    MASKED: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """Write, contiguous: OUT (B·H, L, D), denominators DEN (B·H, L) and, if SCALED, ρ as RHO (B·H, L)."""
    bh, part, parts = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    b, h, n = (bh // heads).to(tl.int64), (bh % heads).to(tl.int64), (bh // rep).to(tl.int64)
    g, bh, programs = h // rep, bh.to(tl.int64), (tl.num_programs(0) // rep).to(tl.int64)
    Q += b * qb + h * qh
    K += b * kb + g * kh
    V += b * vb + g * vh
    SCALES += b * sb + g * sh
    top, z, s = sums_at(PREFIXES, n, part, parts, programs, m, M, D, Dv)
    for row in range(part * SEGMENT, tl.minimum(part * SEGMENT + SEGMENT, L), C):
        q, v = wide_tile(Q, row, L, ql, m, M, C), wide_tile(V, row, L, vl, D, Dv, C)
        _, k, scales = keys_of(MASK + b * L, K, SCALES, row, L, kl, sl, m, M, C, MASKED, SCALED)
        rho, within, carry = factors(scales, top, C, SCALED)
        w, far = product(q, tl.trans(k), FULL) * within, q * carry[:, None]
        den = tl.sum(w, 1) + tl.sum(far * z[None, :], 1)
        num = product(w, v, FULL) + product(far, s, FULL)
        put(OUT + bh * L * D, row, L, D, num * inverse(den)[:, None], D, Dv, C)
        put(DEN + bh * L, row, L, 1, den[:, None], 1, 1, C)
        if SCALED:
            put(RHO + bh * L, row, L, 1, rho[:, None], 1, 1, C)
        top, z, s = behind(top, z, s, k, v, scales, FULL, SCALED)


@triton.jit
def query_back(
    K, V, G, OUT, SCALES, MASK, PREFIXES, DEN, DELTA, DQ, kb, kh, kl, vb, vh, vl, gb, gh, gl, sb, sh, sl, heads, rep,
    L, SEGMENT,
    m: tl.constexpr, M: tl.constexpr, D: tl.constexpr, Dv: tl.constexpr, C: tl.constexpr, FULL: tl.constexpr,
    MASKED: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """OUT is contiguous, as are the outputs: DELTA (B·H, L) and DQ."""
    bh, part, parts = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    b, h, n = (bh // heads).to(tl.int64), (bh % heads).to(tl.int64), (bh // rep).to(tl.int64)
    g, bh, programs = h // rep, bh.to(tl.int64), (tl.num_programs(0) // rep).to(tl.int64)
    K += b * kb + g * kh
    V += b * vb + g * vh
    G += b * gb + h * gh
    SCALES += b * sb + g * sh
    top, z, s = sums_at(PREFIXES, n, part, parts, programs, m, M, D, Dv)
    for row in range(part * SEGMENT, tl.minimum(part * SEGMENT + SEGMENT, L), C):
        den, v = numbers(DEN + bh * L, row, L, C, 1.0), wide_tile(V, row, L, vl, D, Dv, C)
        grad = wide_tile(G, row, L, gl, D, Dv, C) * inverse(den)[:, None]
        delta = -tl.sum(grad * wide_tile(OUT + bh * L * D, row, L, D, D, Dv, C), 1)
        delta = tl.where(den == 0, 0.0, delta)
        put(DELTA + bh * L, row, L, 1, delta[:, None], 1, 1, C)
        _, k, scales = keys_of(MASK + b * L, K, SCALES, row, L, kl, sl, m, M, C, MASKED, SCALED)
        _, within, carry = factors(scales, top, C, SCALED)
        dq = (product(grad, tl.trans(s), FULL) + delta[:, None] * z[None, :]) * carry[:, None]
        dq += product((product(grad, tl.trans(v), FULL) + delta[:, None]) * within, k, FULL)
        put(DQ + bh * L * m, row, L, m, dq, m, M, C)
        top, z, s = behind(top, z, s, k, v, scales, FULL, SCALED)


@triton.jit
def key_back(
    Q, K, V, G, SCALES, MASK, PREFIXES, DEN, RHO, DELTA, DK, DV, DSCALES, qb, qh, ql, kb, kh, kl, vb, vh, vl,
    gb, gh, gl, sb, sh, sl, heads, rep, L, SEGMENT,
    m: tl.constexpr, M: tl.constexpr, D: tl.constexpr, Dv: tl.constexpr, C: tl.constexpr, FULL: tl.constexpr,
    MASKED: tl.constexpr, SCALED: tl.constexpr, GRADIENT: tl.constexpr,
):  # fmt: skip
    """PREFIXES: of the queries after each part. DK, DV and, if GRADIENT, DSCALES: of each query head, contiguous."""
    bh, part, parts = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    b, h, g = (bh // heads).to(tl.int64), (bh % heads).to(tl.int64), (bh % heads // rep).to(tl.int64)
    bh, programs = bh.to(tl.int64), tl.num_programs(0).to(tl.int64)
    Q += b * qb + h * qh
    K += b * kb + g * kh
    V += b * vb + g * vh
    G += b * gb + h * gh
    SCALES += b * sb + g * sh
    top, z, s = sums_at(PREFIXES, bh, part, parts, programs, m, M, D, Dv)
    chunks = tl.cdiv(tl.minimum(SEGMENT, L - part * SEGMENT), C)
    for step in range(chunks):
        row = part * SEGMENT + (chunks - 1 - step) * C
        q, v = wide_tile(Q, row, L, ql, m, M, C), wide_tile(V, row, L, vl, D, Dv, C)
        counts, k, scales = keys_of(MASK + b * L, K, SCALES, row, L, kl, sl, m, M, C, MASKED, SCALED)
        grad = wide_tile(G, row, L, gl, D, Dv, C) * inverse(numbers(DEN + bh * L, row, L, C, 1.0))[:, None]
        delta = numbers(DELTA + bh * L, row, L, C, 0.0)
        within, far, rows = tl.where(lower(C), 1.0, 0.0), tl.full([C], 1.0, tl.float32), scales
        if SCALED:
            rows = numbers(RHO + bh * L, row, L, C, NONE)
            within *= weight(tl.minimum(scales[None, :] - rows[:, None], 0.0))
            far, rows = weight(tl.minimum(scales + top, 0.0)), tl.where(rows > NONE / 2, -rows, NONE)
        dp = (product(grad, tl.trans(v), FULL) + delta[:, None]) * within
        dk = (product(v, tl.trans(s), FULL) + z[None, :]) * far[:, None] + product(tl.trans(dp), q, FULL)
        dk = tl.where(counts[:, None], dk, 0.0)
        w = product(q, tl.trans(k), FULL) * within
        dv = product(k * far[:, None], s, FULL) + product(tl.trans(w), grad, FULL)
        put(DK + bh * L * m, row, L, m, dk, m, M, C)
        put(DV + bh * L * D, row, L, D, dv, D, Dv, C)
        if GRADIENT:
            put(DSCALES + bh * L, row, L, 1, tl.sum(k * dk, 1)[:, None], 1, 1, C)
        if SCALED:
            higher = tl.maximum(top, tl.max(rows, 0))
            q *= weight(rows - higher)[:, None]
            shrink = weight(top - higher)
            z, s, top = z * shrink, s * shrink[:, None], higher
        z, s = z + tl.sum(q * delta[:, None], 0), s + product(tl.trans(q), grad, FULL)
