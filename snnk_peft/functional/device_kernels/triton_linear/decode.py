"""A few new tokens after sums: one launch, in which every query head loops over the tokens.

    S' = S e^{P − P'} + e^{s − P'} ψ vᵀ      z' likewise      out = φ S' / φ z',      P' = max(P, s)

The new sums have their own memory, and there are no gradients, as in `triton_exponential/decode.py`.
"""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, misc"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from snnk_peft.functional.device_kernels.triton_linear.launches import dimensions, launch, scale_strides
from snnk_peft.functional.device_kernels.triton_linear.sums import inverse
from snnk_peft.functional.device_kernels.triton_linear.tiles import scale_at, weight
from snnk_peft.functional.device_kernels.triton_shared.launching import dense, empty, start, strides
from snnk_peft.functional.device_kernels.triton_shared.tiles import NONE, put, tile


@triton.jit
def token_pass(
    Q, K, V, SCALES, MASK, S, Z, SCALE, OUT, NEXT_S, NEXT_Z, NEXT_SCALE, qb, qh, ql, kb, kh, kl, vb, vh, vl,
    sb, sh, sl, fb, heads, rep, L,
    m: tl.constexpr, M: tl.constexpr, D: tl.constexpr, Dv: tl.constexpr,
    MASKED: tl.constexpr, SCALED: tl.constexpr, FIRST: tl.constexpr,
):  # fmt: skip
    """FIRST: S, Z and SCALE are a state."""
    bh = tl.program_id(0)
    b, h, n = (bh // heads).to(tl.int64), (bh % heads).to(tl.int64), (bh // rep).to(tl.int64)
    g, r, j = h // rep, tl.arange(0, M), tl.arange(0, Dv)
    Q += b * qb + h * qh
    K += b * kb + g * kh
    V += b * vb + g * vh
    SCALES += b * sb + g * sh
    OUT += bh.to(tl.int64) * L * D
    top = tl.full([1], NONE if SCALED else 0.0, tl.float32)
    z, s = tl.zeros([M], tl.float32), tl.zeros([M, Dv], tl.float32)
    if FIRST:
        s, z = tile(S + n * m * D, 0, m, D, D, Dv, M), tl.load(Z + n * m + r, mask=r < m, other=0.0)
        if SCALED:
            top = scale_at(SCALE + n)
    for t in range(L):
        of_k, of_v = r < m, j < D
        if MASKED:
            counts = tl.load(MASK + b * fb + t + tl.arange(0, 1)) != 0
            of_k, of_v = of_k & counts, of_v & counts
        k = tl.load(K + t * kl + r, mask=of_k, other=0.0).to(tl.float32)
        v = tl.load(V + t * vl + j, mask=of_v, other=0.0).to(tl.float32)
        if SCALED:
            scale = scale_at(SCALES + t * sl)
            if MASKED:
                scale = tl.where(counts, scale, NONE)
            higher = tl.maximum(top, scale)
            shrink = weight(top - higher)
            z, s, k, top = (
                z * shrink,
                s * shrink[:, None],
                k * tl.where(scale > NONE / 2, weight(scale - higher), 0.0),
                higher,
            )
        z, s = z + k, s + k[:, None] * v[None, :]
        q = tl.load(Q + t * ql + r, mask=r < m, other=0.0).to(tl.float32)
        out = tl.sum(q[:, None] * s, 0) * inverse(tl.sum(q * z, 0))
        tl.store(OUT + t * D + j, out.to(OUT.dtype.element_ty), mask=j < D)
    if h % rep == 0:
        put(NEXT_S + n * m * D, 0, m, D, s, D, Dv, M)
        tl.store(NEXT_Z + n * m + r, z, mask=r < m)
        tl.store(NEXT_SCALE + n + tl.arange(0, 1), tl.where(top > NONE / 2, top, float("-inf")))


def few_tokens(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scales: Tensor | None, values: Tensor | None,
    normaliser: Tensor | None, log_scale: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return outputs, and S, z and scale after the tokens."""
    q, k, v = dense(q), dense(k), dense(v)
    (B, H, L, m), (_, G, _, D) = q.shape, v.shape
    out, behind = empty(q, B, H, L, D, dtype=v.dtype), (empty(q, B, G, m, D), empty(q, B, G, m), empty(q, B, G, 1))
    counts = k if mask is None else dense(mask)
    state = values, normaliser, log_scale
    before = [new if x is None else x.contiguous() for x, new in zip(state, behind, strict=True)]
    start(
        token_pass, (B * H,),
        q, k, v, k if scales is None else scales, counts, *before, out, *behind, *strides(q, k, v),
        *scale_strides(scales), counts.stride(0), H, H // G, L, **dimensions(m, D), MASKED=mask is not None,
        SCALED=scales is not None, FIRST=values is not None,
        num_warps=launch("token_pass", m, D, q.dtype)[1]["num_warps"],
    )  # fmt: skip
    return out, *behind


# See triton_exponential/decode.py for why this is not a torch.library.custom_op.
LIBRARY = torch.library.Library("snnk_peft", "FRAGMENT")
LIBRARY.define(
    "linear_few_tokens(Tensor q, Tensor k, Tensor v, Tensor? mask, Tensor? scales, Tensor? values, Tensor? normaliser, "
    "Tensor? log_scale) -> (Tensor, Tensor, Tensor, Tensor)"
)
LIBRARY.impl("linear_few_tokens", few_tokens, "CompositeExplicitAutograd")
step = torch.ops.snnk_peft.linear_few_tokens.default


@torch.library.register_fake("snnk_peft::linear_few_tokens", lib=LIBRARY)
def _(q: Tensor, k: Tensor, v: Tensor, *more: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    (B, G, _, m), D = k.shape, v.shape[-1]
    return empty(q, *q.shape[:-1], D, dtype=v.dtype), empty(q, B, G, m, D), empty(q, B, G, m), empty(q, B, G, 1)
