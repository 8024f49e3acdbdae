"""Queries that attend to all keys in M and log Z: one softmax over the features.

out_i = p_i M,   p_ir = softmax_r(a_ir + c_r + log Z_r)
∂a = p ∘ (g Mᵀ − rowsum(p ∘ g Mᵀ))      ∂M = pᵀ g      ∂log Z = colsum(∂a)
"""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, misc"

from __future__ import annotations

import triton
import triton.language as tl

from snnk_peft.functional.device_kernels.triton_shared.tiles import (
    ABSENT,
    LOG2E,
    back_to,
    bias_of,
    dot,
    logarithms,
    put,
    rows_of,
    tile,
)


@triton.jit
def bias_and_seen(LOGZ, OFF, m: tl.constexpr, M: tl.constexpr):
    """Return log2 e (c + log Z) of the features, and whether any key counted."""
    bias = bias_of(LOGZ, m, M)
    seen = tl.max(bias, 0) > ABSENT * LOG2E / 2
    return tl.where(tl.arange(0, M) < m, bias + bias_of(OFF, m, M), bias), seen


@triton.jit
def query_pass(
    Q, W, OFF, MEANS, LOGZ, OUT, qb, qh, ql, wb, wh, cb, ch, ob, oh, ol, heads, rep, L, SPLIT,
    m: tl.constexpr, M: tl.constexpr, d: tl.constexpr, Dk: tl.constexpr, D: tl.constexpr, Dv: tl.constexpr,
    BLOCK: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    """`rep` query heads share the keys of one."""
    bh, first = tl.program_id(0), tl.program_id(1) * SPLIT
    b, h, g = (bh // heads).to(tl.int64), (bh % heads).to(tl.int64), (bh // rep).to(tl.int64)
    Q += b * qb + h * qh
    OUT += b * ob + h * oh
    high, low = rows_of(W + b * wb + h // rep * wh, m, d, M, Dk, T)
    bias, seen = bias_and_seen(LOGZ + g * m, OFF + b * cb + h // rep * ch, m, M)
    means = tile(MEANS + g * m * D, 0, m, D, D, Dv, M).to(T)
    for row in range(first, tl.minimum(first + SPLIT, L), BLOCK):
        a = logarithms(tile(Q, row, L, ql, d, Dk, BLOCK), high, low, T) + bias[None, :]
        p = tl.exp2(a - tl.max(a, 1)[:, None])
        out = dot(p, means, T) * (tl.where(seen, 1.0, 0.0) / tl.sum(p, 1))[:, None]
        put(OUT, row, L, ol, out, D, Dv, BLOCK)


@triton.jit
def query_back(
    Q, G, W, OFF, MEANS, LOGZ, DQ, DSUMS, DW, qb, qh, ql, gb, gh, gl, wb, wh, cb, ch, heads, rep, L, SPLIT,
    m: tl.constexpr, M: tl.constexpr, d: tl.constexpr, Dk: tl.constexpr, D: tl.constexpr, Dv: tl.constexpr,
    BLOCK: tl.constexpr, T: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """DQ (B, H, L, d) is contiguous; DSUMS (B·H, parts, m D + m): ∂M and ∂log Z; DW (B·H, parts, m, d)."""
    bh, part, parts = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    b, h, n, g = (bh // heads).to(tl.int64), (bh % heads).to(tl.int64), bh.to(tl.int64), (bh // rep).to(tl.int64)
    Q += b * qb + h * qh
    G += b * gb + h * gh
    high, low = rows_of(W + b * wb + h // rep * wh, m, d, M, Dk, T)
    bias, seen = bias_and_seen(LOGZ + g * m, OFF + b * cb + h // rep * ch, m, M)
    means = tile(MEANS + g * m * D, 0, m, D, D, Dv, M).to(T)
    dm, dz, dw = tl.zeros([M, Dv], tl.float32), tl.zeros([M], tl.float32), tl.zeros([M, Dk], tl.float32)
    first = part * SPLIT
    for row in range(first, tl.minimum(first + SPLIT, L), BLOCK):
        q, grad = tile(Q, row, L, ql, d, Dk, BLOCK), tile(G, row, L, gl, D, Dv, BLOCK)
        a = logarithms(q, high, low, T) + bias[None, :]
        p = tl.exp2(a - tl.max(a, 1)[:, None])
        p = p * (tl.where(seen, 1.0, 0.0) / tl.sum(p, 1))[:, None]
        da = dot(grad, tl.trans(means), T)
        da = p * (da - tl.sum(p * da, 1)[:, None])  # rows beyond the end have gradient 0
        dm += dot(tl.trans(p), grad, T)
        dz += tl.sum(da, 0)
        if ROWS:
            dw += dot(tl.trans(da), q, T)
        put(DQ + n * L * d, row, L, d, back_to(da, high, T), d, Dk, BLOCK)
    r = tl.arange(0, M)
    at = (n * parts + part) * m
    put(DSUMS + at * (D + 1), 0, m, D, dm, D, Dv, M)
    tl.store(DSUMS + at * (D + 1) + m * D + r, dz, mask=r < m)
    if ROWS:
        put(DW + at * d, 0, m, d, dw, d, Dk, M)
