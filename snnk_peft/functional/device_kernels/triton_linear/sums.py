"""S = Σ_j e^{s_j} ψ_j v_jᵀ and z = Σ_j e^{s_j} ψ_j: per part of the sequence, then over all parts or those before each.

    sums_pass  per part: top = the largest s, z and S divided by e^top
    combine    of all parts, at their largest top; or of the parts before (or after) each of them
    sums_back  ∂ψ = w (∂S v + ∂z)      ∂v = w ∂Sᵀ ψ      ∂s = ψ·∂ψ,      w_j = e^{s_j − log scale}

The parts' results are in one buffer: tops (B·G, parts), then z (B·G, parts, m), then S (B·G, parts, m, D), fp32.
"""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, misc"

from __future__ import annotations

import triton
import triton.language as tl

from snnk_peft.functional.device_kernels.triton_linear.tiles import keys_of, product, scale_at, weight, wide_tile
from snnk_peft.functional.device_kernels.triton_shared.tiles import NONE, numbers, put, tile


@triton.jit
def inverse(den):
    """Return 1/denominator, or 1 where it is 0: the numerator is 0 there too."""
    return 1.0 / tl.where(den == 0, 1.0, den)


@triton.jit
def sums_pass(
    K, V, SCALES, MASK, DEN, WEIGHT, SUMS, kb, kh, kl, vb, vh, vl, sb, sh, sl, heads, N, SPLIT,
    m: tl.constexpr, M: tl.constexpr, D: tl.constexpr, Dv: tl.constexpr, BLOCK: tl.constexpr, FULL: tl.constexpr,
    MASKED: tl.constexpr, SCALED: tl.constexpr, QUERIES: tl.constexpr,
):  # fmt: skip
    """Sum keys (B, heads, N, m), values and scales.

    QUERIES: the same over queries and gradients, for the backward pass of causal attention. SCALES (B, heads, N) are
    then the scales that rows were divided by, gradients are divided by DEN, and z has the weights WEIGHT.
    """
    bh, part, parts = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    b, h, n = (bh // heads).to(tl.int64), (bh % heads).to(tl.int64), bh.to(tl.int64)
    K += b * kb + h * kh
    V += b * vb + h * vh
    SCALES += b * sb + h * sh
    top = tl.full([1], NONE if SCALED else 0.0, tl.float32)
    z, s = tl.zeros([M], tl.float32), tl.zeros([M, Dv], tl.float32)
    first = part * SPLIT
    for row in range(first, tl.minimum(first + SPLIT, N), BLOCK):
        _, k, scales = keys_of(MASK + b * N, K, SCALES, row, N, kl, sl, m, M, BLOCK, MASKED, SCALED)
        v = wide_tile(V, row, N, vl, D, Dv, BLOCK)
        if QUERIES:
            v *= inverse(numbers(DEN + n * N, row, N, BLOCK, 1.0))[:, None]
        if SCALED:
            if QUERIES:
                scales = tl.where(scales > NONE / 2, -scales, NONE)
            higher = tl.maximum(top, tl.max(scales, 0))
            k *= weight(scales - higher)[:, None]
            shrink = weight(top - higher)
            z, s, top = z * shrink, s * shrink[:, None], higher
        if QUERIES:
            z += tl.sum(k * numbers(WEIGHT + n * N, row, N, BLOCK, 0.0)[:, None], 0)
        else:
            z += tl.sum(k, 0)
        s += product(tl.trans(k), v, FULL)
    at, programs, r = n * parts + part, tl.num_programs(0).to(tl.int64), tl.arange(0, M)
    tl.store(SUMS + at + tl.arange(0, 1), top)
    SUMS += programs * parts
    tl.store(SUMS + at * m + r, z, mask=r < m)
    put(SUMS + programs * parts * m + at * m * D, 0, m, D, s, D, Dv, M)


@triton.jit
def combine(
    SUMS, FIRST_S, FIRST_Z, FIRST_SCALE, PREFIXES, S, Z, SCALE, parts, rep,
    m: tl.constexpr, D: tl.constexpr, Dv: tl.constexpr, PARTS: tl.constexpr,
    FIRST: tl.constexpr, SCALED: tl.constexpr, PREFIX: tl.constexpr, REVERSE: tl.constexpr,
):  # fmt: skip
    """One feature and head. PREFIX: PREFIXES, laid out as SUMS, holds the sums before each part (REVERSE: after it).

    FIRST: FIRST_S, FIRST_Z and FIRST_SCALE hold what comes before all parts; REVERSE: with the
    opposite scale, and of `rep` heads that share it, only the first counts it.
    """
    n, r = tl.program_id(0).to(tl.int64), tl.program_id(1)
    programs = tl.num_programs(0).to(tl.int64)
    p, c = tl.arange(0, PARTS), tl.arange(0, Dv)
    at, inside, column = n * parts + p, p < parts, c < D
    both, of_z, of_s = inside[:, None] & column[None, :], programs * parts, programs * parts * (m + 1)
    top = tl.load(SUMS + at, mask=inside, other=NONE)
    z = tl.load(SUMS + of_z + at * m + r, mask=inside, other=0.0)
    s = tl.load(SUMS + of_s + (at * m + r)[:, None] * D + c[None, :], mask=both, other=0.0)
    top0, z0, s0 = tl.full([1], NONE, tl.float32), tl.zeros([1], tl.float32), tl.zeros([Dv], tl.float32)
    if FIRST:
        g, counts = n // rep, n % rep == 0
        z0 = tl.where(counts, tl.load(FIRST_Z + g * m + r + tl.arange(0, 1)), 0.0)
        s0 = tl.where(counts, tl.load(FIRST_S + (g * m + r) * D + c, mask=column, other=0.0), 0.0)
        top0 = tl.zeros([1], tl.float32)
        if SCALED:
            top0 = scale_at(FIRST_SCALE + g)
            if REVERSE:
                top0 = tl.where(top0 > NONE / 2, -top0, NONE)
        top0 = tl.where(counts, top0, NONE)
    first_top, first_z = tl.max(top0, 0), tl.sum(z0, 0)
    most = tl.maximum(tl.max(top, 0), first_top)
    w, old = weight(top - most), weight(first_top - most)
    tl.store(Z + n * m + r, tl.sum(w * z, 0) + old * first_z)
    tl.store(S + (n * m + r) * D + c, tl.sum(w[:, None] * s, 0) + old * s0, mask=column)
    one = tl.arange(0, 1)
    tl.store(SCALE + n + one, tl.where(most > NONE / 2, most, float("-inf")), mask=one + r == 0)
    if PREFIX:
        i = tl.arange(0, PARTS)[:, None]
        earlier = (p[None, :] > i) if REVERSE else (p[None, :] < i)
        logs = tl.where(earlier, top[None, :], NONE)
        u = tl.maximum(tl.max(logs, 1), first_top)
        before, old_before = tl.where(earlier, weight(logs - u[:, None]), 0.0), weight(first_top - u)
        sums = product(before, s, True) + old_before[:, None] * s0[None, :]
        tl.store(PREFIXES + at, u, mask=inside & (p * 0 + r == 0))
        tl.store(PREFIXES + of_z + at * m + r, tl.sum(before * z[None, :], 1) + old_before * first_z, mask=inside)
        tl.store(PREFIXES + of_s + (at * m + r)[:, None] * D + c[None, :], sums, mask=both)


@triton.jit
def sums_back(
    K, V, SCALES, MASK, GS, GZ, SCALE, DK, DV, DSCALES, kb, kh, kl, vb, vh, vl, sb, sh, sl, heads, N, SPLIT,
    m: tl.constexpr, M: tl.constexpr, D: tl.constexpr, Dv: tl.constexpr, BLOCK: tl.constexpr, FULL: tl.constexpr,
    MASKED: tl.constexpr, SCALED: tl.constexpr, GRADIENT: tl.constexpr,
):  # fmt: skip
    """GS, GZ: gradients of S (B·heads, m, D) and z. DK, DV and, if GRADIENT, DSCALES (B·heads, N) are contiguous."""
    bh, first = tl.program_id(0), tl.program_id(1) * SPLIT
    b, h, n = (bh // heads).to(tl.int64), (bh % heads).to(tl.int64), bh.to(tl.int64)
    K += b * kb + h * kh
    V += b * vb + h * vh
    SCALES += b * sb + h * sh
    gs, gz = tile(GS + n * m * D, 0, m, D, D, Dv, M), numbers(GZ + n * m, 0, m, M, 0.0)
    for row in range(first, tl.minimum(first + SPLIT, N), BLOCK):
        counts, k, scales = keys_of(MASK + b * N, K, SCALES, row, N, kl, sl, m, M, BLOCK, MASKED, SCALED)
        w = tl.where(counts, 1.0, 0.0)
        if SCALED:
            w = weight(tl.minimum(scales - scale_at(SCALE + n), 0.0)) * w
        dk = (product(wide_tile(V, row, N, vl, D, Dv, BLOCK), tl.trans(gs), FULL) + gz[None, :]) * w[:, None]
        put(DK + n * N * m, row, N, m, dk, m, M, BLOCK)
        put(DV + n * N * D, row, N, D, product(k * w[:, None], gs, FULL), D, Dv, BLOCK)
        if GRADIENT:
            put(DSCALES + n * N, row, N, 1, tl.sum(k * dk, 1)[:, None], 1, 1, BLOCK)
