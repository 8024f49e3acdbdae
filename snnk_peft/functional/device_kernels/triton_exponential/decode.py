"""A few new tokens after a state, as in generation: one launch, in which every query head loops over the tokens.

    log Z' = logaddexp(log Z, b)      M' = M + e^{b − log Z'} (v − M)      out = softmax_r(a + c + log Z') M'

Sums are fp32 without matrix units, which one row would leave idle. The new state has its own memory; of the
query heads that share a key head, each computes it and the first writes it. There are no gradients.
"""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, misc"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from snnk_peft.functional.device_kernels.triton_exponential.launches import of_heads, whole
from snnk_peft.functional.device_kernels.triton_shared.launching import dense, dimensions, empty, start, strides
from snnk_peft.functional.device_kernels.triton_shared.tiles import ABSENT, LOG2E, NONE, bias_of, put, tile

FEW = 8  # tokens: one after another they take less time than the three launches for many


@triton.jit
def token_pass(
    Q, K, V, W, WK, OFF, OFFK, MASK, MEANS, LOGZ, OUT, NEXT_MEANS, NEXT_LOGZ, qb, qh, ql, kb, kh, kl, vb, vh, vl,
    wb, wh, xb, xh, cb, ch, eb, eh, fb, heads, rep, L, square,
    m: tl.constexpr, M: tl.constexpr, d: tl.constexpr, Dk: tl.constexpr, D: tl.constexpr, Dv: tl.constexpr,
    MASKED: tl.constexpr, FIRST: tl.constexpr, WEIGHED: tl.constexpr,
):  # fmt: skip
    """FIRST: MEANS and LOGZ are a state. WEIGHED: OUT has the logarithms of the denominators as a last column."""
    bh = tl.program_id(0)
    b, h, n = (bh // heads).to(tl.int64), (bh % heads).to(tl.int64), (bh // rep).to(tl.int64)
    g, r, i, j = h // rep, tl.arange(0, M), tl.arange(0, Dk), tl.arange(0, Dv)
    Q += b * qb + h * qh
    K += b * kb + g * kh
    V += b * vb + g * vh
    W += b * wb + g * wh
    WK += b * xb + g * xh
    OUT += bh.to(tl.int64) * L * (D + WEIGHED)
    offset = bias_of(OFF + b * cb + g * ch, m, M)
    offset = tl.where(r < m, offset + bias_of(OFFK + b * eb + g * eh, m, M), NONE)
    means, log_z = tl.zeros([M, Dv], tl.float32), tl.full([M], ABSENT * LOG2E, tl.float32)
    if FIRST:
        means, log_z = tile(MEANS + n * m * D, 0, m, D, D, Dv, M), bias_of(LOGZ + n * m, m, M)
    for t in range(L):
        of_k, of_v, of_logs = i < d, j < D, r < m
        if MASKED:
            counts = tl.load(MASK + b * fb + t + tl.arange(0, 1)) != 0
            of_k, of_v, of_logs = of_k & counts, of_v & counts, of_logs & counts
        k = tl.load(K + t * kl + i, mask=of_k, other=0.0).to(tl.float32)
        v = tl.load(V + t * vl + j, mask=of_v, other=0.0).to(tl.float32)
        logs = (tl.sum(tile(WK, 0, m, d, d, Dk, M) * k[None, :], 1) - tl.sum(k * k, 0) * square) * LOG2E
        logs = tl.where(of_logs, logs, NONE)
        higher = tl.maximum(log_z, logs)
        log_z = higher + tl.log2(tl.exp2(log_z - higher) + tl.exp2(logs - higher))
        means += tl.exp2(logs - log_z)[:, None] * (v[None, :] - means)
        q = tl.load(Q + t * ql + i, mask=i < d, other=0.0).to(tl.float32)
        a = tl.sum(tile(W, 0, m, d, d, Dk, M) * q[None, :], 1) * LOG2E + offset + log_z
        top = tl.max(a, 0)
        p = tl.exp2(a - top)
        total, seen = tl.sum(p, 0), tl.max(log_z, 0) > ABSENT * LOG2E / 2
        out = tl.where(seen, tl.sum(p[:, None] * means, 0) / total, 0.0)
        tl.store(OUT + t * (D + WEIGHED) + j, out.to(OUT.dtype.element_ty), mask=j < D)
        if WEIGHED:
            tl.store(OUT + t * (D + WEIGHED) + D, tl.where(seen, (top + tl.log2(total)) / LOG2E, ABSENT))
    if h % rep == 0:
        put(NEXT_MEANS + n * m * D, 0, m, D, means, D, Dv, M)
        tl.store(NEXT_LOGZ + n * m + r, tl.maximum(log_z / LOG2E, ABSENT), mask=r < m)


def few_tokens(
    q: Tensor, k: Tensor, v: Tensor, rows: Tensor, offset: Tensor, key_rows: Tensor, key_offset: Tensor,
    square: float, mask: Tensor | None, means: Tensor | None, log_weight: Tensor | None, weighed: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return outputs, with log denominators as a last column if `weighed`, and M and log Z after the tokens."""
    q, k, v = dense(q), dense(k), dense(v)
    rows, offset, key_rows, key_offset = whole(rows), whole(offset), whole(key_rows), whole(key_offset)
    (B, H, L, d), (_, G, _, D), m = q.shape, v.shape, rows.shape[-2]
    sizes, first = dimensions(m, d, D), means is not None and log_weight is not None
    out = empty(q, B, H, L, D + weighed, dtype=torch.float32 if weighed else v.dtype)
    behind, behind_weight = empty(q, B, G, m, D), empty(q, B, G, m)
    counts = k if mask is None else dense(mask)
    start(
        token_pass, (B * H,),
        q, k, v, rows, key_rows, offset, key_offset, counts,
        behind if means is None else means.contiguous(),
        behind_weight if log_weight is None else log_weight.contiguous(), out, behind, behind_weight,
        *strides(q, k, v), *of_heads(rows, 2), *of_heads(key_rows, 2), *of_heads(offset, 1), *of_heads(key_offset, 1),
        counts.stride(0), H, H // G, L, square, **sizes, MASKED=mask is not None, FIRST=first, WEIGHED=weighed,
        num_warps=4 if sizes["M"] * max(sizes["Dk"], sizes["Dv"]) <= 4096 else 8,
    )  # fmt: skip
    return out, behind, behind_weight


# Defined without torch.library.custom_op, whose wrapper takes as long as all other host work of a step.
LIBRARY = torch.library.Library("snnk_peft", "FRAGMENT")
LIBRARY.define(
    "exponential_few_tokens(Tensor q, Tensor k, Tensor v, Tensor rows, Tensor offset, Tensor key_rows, "
    "Tensor key_offset, float square, Tensor? mask, Tensor? means, Tensor? log_weight, bool weighed) -> "
    "(Tensor, Tensor, Tensor)"
)
LIBRARY.impl("exponential_few_tokens", few_tokens, "CompositeExplicitAutograd")
step = torch.ops.snnk_peft.exponential_few_tokens.default


@torch.library.register_fake("snnk_peft::exponential_few_tokens", lib=LIBRARY)
def _(
    q: Tensor, k: Tensor, v: Tensor, rows: Tensor, offset: Tensor, key_rows: Tensor, key_offset: Tensor,
    square: float, mask: Tensor | None, means: Tensor | None, log_weight: Tensor | None, weighed: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    (B, G, _, D), m = v.shape, rows.shape[-2]
    dtype = torch.float32 if weighed else v.dtype
    return empty(q, *q.shape[:-1], D + int(weighed), dtype=dtype), empty(q, B, G, m, D), empty(q, B, G, m)
