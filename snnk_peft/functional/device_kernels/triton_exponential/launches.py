"""The launches: tensors in, new tensors out, no gradients.

Shapes: q (B, H, L, d), k (B, G, N, d), v (B, G, N, D), one dtype; rows (m, d), (G, m, d) or (B, G, m, d) and offsets
without the d, fp32; masks (B, N) bool; M (B, G, m, D) and log Z (B, G, m), fp32.
"""

from __future__ import annotations

import torch
from torch import Tensor

from snnk_peft.functional.device_kernels.triton_exponential import causal, key_sums, queries
from snnk_peft.functional.device_kernels.triton_shared.launching import (
    cdiv,
    dense,
    dimensions,
    empty,
    flags,
    launch,
    operand,
    padded,
    part_tokens,
    start,
    strides,
)


def whole(x: Tensor) -> Tensor:
    """Return x in fp32 with contiguous rows (m, d) or offsets (m,)."""
    x = x if x.dtype == torch.float32 else x.float()
    return x if x.stride(-1) == 1 and (x.dim() == 1 or x.stride(-2) == x.shape[-1]) else x.contiguous()


def of_heads(x: Tensor, own: int) -> tuple[int, int]:
    """Return strides of batch and key head of rows (own = 2 dimensions) or offsets (1)."""
    if x.dim() == own:
        return 0, 0
    strides = [0 if size == 1 else stride for size, stride in zip(x.shape[:-own], x.stride(), strict=False)]
    return (0, strides[0]) if len(strides) == 1 else (strides[0], strides[1])


def key_parts(
    k: Tensor, v: Tensor, rows: Tensor, square: float, mask: Tensor | None, size: int, name: str
) -> tuple[Tensor, int]:
    """Return the sums of each part of the keys, and the number of parts."""
    (B, G, N, d), D, m = k.shape, v.shape[-1], rows.shape[-2]
    sizes, parts = dimensions(m, d, D), cdiv(N, size)
    block, options = launch(name, operand(k.dtype), max(sizes["M"], sizes["Dk"], sizes["Dv"]))
    sums = empty(k, B * G * parts * m * (D + 2))
    start(
        key_sums.key_pass, (B * G, parts),
        k, v, rows, flags(mask, k), k, k, sums, *strides(k, v), *of_heads(rows, 2), G, 1, N, square, size,
        **sizes, BLOCK=min(block, size), T=operand(k.dtype), MASKED=mask is not None, QUERIES=False, **options,
    )  # fmt: skip
    return sums, parts


def key_means(
    k: Tensor, v: Tensor, rows: Tensor, square: float, mask: Tensor | None, means: Tensor | None = None,
    log_weight: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return M and log Z of these keys and those of a state."""
    k, v, rows = dense(k), dense(v), whole(rows)
    (B, G, N, _), D, m = k.shape, v.shape[-1], rows.shape[-2]
    sums, parts = key_parts(k, v, rows, square, mask, part_tokens(N, B * G, "plain"), "key_pass")
    first = (sums, sums) if means is None or log_weight is None else (means.contiguous(), log_weight.contiguous())
    found, found_weight = empty(k, B, G, m, D), empty(k, B, G, m)
    start(
        key_sums.combine, (B * G, m),
        sums, *first, sums, found, found_weight, parts, 1, m, D, padded(D), padded(parts),
        FIRST=means is not None, PREFIX=False, REVERSE=False, num_warps=4,
    )  # fmt: skip
    return found, found_weight


def key_means_back(
    g_means: Tensor, g_weight: Tensor, k: Tensor, v: Tensor, rows: Tensor, square: float, mask: Tensor | None,
    means: Tensor, log_weight: Tensor, learned: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return gradients of k, v and each head's rows (B, G, m, d), empty if they are not learned.

    The gradients of M and log Z have contiguous heads.
    """
    k, v, rows = dense(k), dense(v), whole(rows)
    (B, G, N, d), D, m = k.shape, v.shape[-1], rows.shape[-2]
    sizes, size = dimensions(m, d, D), part_tokens(N, B * G, "plain")
    parts, T = cdiv(N, size), operand(k.dtype)
    block, options = launch("key_back", T, max(sizes["M"], sizes["Dk"], sizes["Dv"]))
    dk, dv = empty(k, *k.shape, dtype=k.dtype), empty(v, *v.shape, dtype=v.dtype)
    dw = empty(k, B, G, parts, m, d) if learned else empty(k, 0)
    start(
        key_sums.key_back, (B * G, parts),
        k, v, rows, flags(mask, k), means, log_weight, g_means, g_weight, dk, dv, dw, *strides(k, v),
        *of_heads(rows, 2), *g_means.stride()[:2], *g_weight.stride()[:2], G, N, square, size, **sizes,
        BLOCK=min(block, size), T=T, MASKED=mask is not None, ROWS=learned, **options,
    )  # fmt: skip
    return dk, dv, dw.sum(2) if learned else dw


def attention(
    q: Tensor, k: Tensor, v: Tensor, rows: Tensor, offset: Tensor, key_rows: Tensor, square: float,
    mask: Tensor | None, means: Tensor | None, log_weight: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return outputs in the dtype of v, 0 where no key counts, and M and log Z of these keys and the state's."""
    found, found_weight = key_means(k, v, key_rows, square, mask, means, log_weight)
    q, rows, offset = dense(q), whole(rows), whole(offset)
    (B, H, L, d), (_, G, m, D) = q.shape, found.shape
    sizes, size, T = dimensions(m, d, D), part_tokens(L, B * H, "plain"), operand(q.dtype)
    block, options = launch("query_pass", T, max(sizes["M"], sizes["Dk"], sizes["Dv"]))
    out = empty(q, B, H, L, D, dtype=v.dtype)
    start(
        queries.query_pass, (B * H, cdiv(L, size)),
        q, rows, offset, found, found_weight, out, *strides(q), *of_heads(rows, 2), *of_heads(offset, 1),
        *strides(out), H, H // G, L, size, **sizes, BLOCK=min(block, size), T=T, **options,
    )  # fmt: skip
    return out, found, found_weight


def attention_back(
    g: Tensor, g_means: Tensor | None, g_weight: Tensor | None, q: Tensor, k: Tensor, v: Tensor, rows: Tensor,
    offset: Tensor, key_rows: Tensor, square: float, mask: Tensor | None, means: Tensor | None,
    log_weight: Tensor | None, found: Tensor, found_weight: Tensor, learned: bool, learned_keys: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Return gradients of q, k, v, rows, offset, key rows (per key head), M, log Z; empty if not requested.

    `means` and `log_weight` are the state, or None if it has no gradient; `found` includes it.
    """
    q, g, rows, offset = dense(q), dense(g), whole(rows), whole(offset)
    (B, H, L, d), (_, G, m, D) = q.shape, found.shape
    sizes, size, T = dimensions(m, d, D), part_tokens(L, B * H, "plain"), operand(q.dtype)
    parts = cdiv(L, size)
    block, options = launch("query_back", T, max(sizes["M"], sizes["Dk"], sizes["Dv"]))
    dq, sums = empty(q, *q.shape, dtype=q.dtype), empty(q, B, G, H // G * parts, m * (D + 1))
    dw = empty(q, B, G, H // G * parts, m, d) if learned else empty(q, 0)
    start(
        queries.query_back, (B * H, parts),
        q, g, rows, offset, found, found_weight, dq, sums, dw, *strides(q, g), *of_heads(rows, 2),
        *of_heads(offset, 1), H, H // G, L, size, **sizes, BLOCK=min(block, size), T=T, ROWS=learned, **options,
    )  # fmt: skip
    of_queries, of_offset = sums.sum(2).split((m * D, m), -1)
    dm = of_queries.unflatten(-1, (m, D)) if g_means is None else of_queries.unflatten(-1, (m, D)) + g_means
    dz = of_offset if g_weight is None else of_offset + g_weight
    dk, dv, dwk = key_means_back(dm, dz, k, v, key_rows, square, mask, found, found_weight, learned_keys)
    dm0, dz0 = empty(q, 0), empty(q, 0)
    if means is not None and log_weight is not None:
        share = (log_weight - found_weight).exp()
        dm0, dz0 = share.unsqueeze(-1) * dm, share * ((dm * (means - found)).sum(-1) + dz)
    return dq, dk, dv, dw.sum(2) if learned else dw, of_offset, dwk, dm0, dz0


def causal_attention(
    q: Tensor, k: Tensor, v: Tensor, rows: Tensor, offset: Tensor, key_rows: Tensor, square: float,
    mask: Tensor | None, means: Tensor | None, log_weight: Tensor | None, dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return outputs in `dtype`, logarithms of denominators (B, H, L), and M and log Z after the last key."""
    q, k, v, rows, offset, key_rows = dense(q), dense(k), dense(v), whole(rows), whole(offset), whole(key_rows)
    (B, H, L, d), (_, G, _, D), m = q.shape, v.shape, rows.shape[-2]
    sizes, size, T = dimensions(m, d, D), part_tokens(L, B * H, "causal"), operand(q.dtype)
    prefixes, parts, behind, behind_weight = _prefixes(k, v, key_rows, square, mask, means, log_weight, size)
    block, options = launch("causal_forward", T, max(sizes["M"], sizes["Dk"], sizes["Dv"]))
    out, lse = empty(q, B, H, L, D, dtype=dtype), empty(q, B, H, L)
    start(
        causal.forward_pass, (B * H, parts),
        q, k, v, rows, key_rows, offset, flags(mask, k), prefixes, out, lse, *strides(q, k, v, out),
        *of_heads(rows, 2), *of_heads(key_rows, 2), *of_heads(offset, 1), H, H // G, L, square, size, **sizes, C=block,
        T=T, MASKED=mask is not None, **options,
    )  # fmt: skip
    return out, lse, behind, behind_weight


def _prefixes(
    k: Tensor, v: Tensor, rows: Tensor, square: float, mask: Tensor | None, means: Tensor | None,
    log_weight: Tensor | None, size: int,
) -> tuple[Tensor, int, Tensor, Tensor]:  # fmt: skip
    """Return sums before each part, the number of parts, and M and log Z after the last."""
    (B, G, _, _), D, m = k.shape, v.shape[-1], rows.shape[-2]
    sums, parts = key_parts(k, v, rows, square, mask, size, "causal_sums")
    behind, behind_weight, prefixes = empty(k, B, G, m, D), empty(k, B, G, m), torch.empty_like(sums)
    given = means is not None and log_weight is not None
    first = (means.contiguous(), log_weight.contiguous()) if given else (sums, sums)  # type: ignore[union-attr]
    start(
        key_sums.combine, (B * G, m),
        sums, *first, prefixes, behind, behind_weight, parts, 1, m, D, padded(D), padded(parts),
        FIRST=given, PREFIX=True, REVERSE=False, num_warps=8,
    )  # fmt: skip
    return prefixes, parts, behind, behind_weight


def causal_attention_back(
    g: Tensor, g_lse: Tensor | None, g_means: Tensor | None, g_weight: Tensor | None, q: Tensor, k: Tensor,
    v: Tensor, rows: Tensor, offset: Tensor, key_rows: Tensor, square: float, mask: Tensor | None, means: Tensor | None,
    log_weight: Tensor | None, out: Tensor, lse: Tensor, behind: Tensor, behind_weight: Tensor, learned: bool,
    learned_keys: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return gradients of q, k, v, rows, offset, key rows (per key head), M, log Z; empty if not requested."""
    q, k, v, rows, offset, key_rows = dense(q), dense(k), dense(v), whole(rows), whole(offset), whole(key_rows)
    g, g_lse = dense(g), None if g_lse is None else g_lse.contiguous()
    (B, H, L, d), (_, G, _, D), m, rep = q.shape, v.shape, rows.shape[-2], q.shape[1] // k.shape[1]
    sizes, size, T = dimensions(m, d, D), part_tokens(L, B * H, "causal"), operand(q.dtype)
    prefixes, parts, *_ = _prefixes(k, v, key_rows, square, mask, means, log_weight, size)
    most, masked, counts = max(sizes["M"], sizes["Dk"], sizes["Dv"]), mask is not None, flags(mask, k)
    heads = (*of_heads(rows, 2), *of_heads(key_rows, 2), *of_heads(offset, 1), H, rep, L, square, size)
    dq, delta, doff = empty(q, *q.shape, dtype=q.dtype), empty(q, B, H, L), empty(q, B, G, rep * parts, m)
    dw, dwk = (empty(q, B, G, rep * parts, m, d) if wanted else empty(q, 0) for wanted in (learned, learned_keys))
    block, options = launch("causal_query_back", T, most)
    start(
        causal.query_back, (B * H, parts),
        q, k, v, g, out, lse if g_lse is None else g_lse, rows, key_rows, offset, counts, prefixes, lse, delta, dq,
        doff, dw,
        *strides(q, k, v, g, out), *heads, **sizes, C=block, T=T, MASKED=masked, ROWS=learned,
        WEIGHED=g_lse is not None, **options,
    )  # fmt: skip
    block, options = launch("causal_sums", T, most)
    sums = empty(q, B * H * parts * m * (D + 2))
    start(
        key_sums.key_pass, (B * H, parts),
        q, g, rows, counts, lse, delta, sums, *strides(q, g), *of_heads(rows, 2), H, rep, L, 0.0, size, **sizes,
        BLOCK=block, T=T, MASKED=False, QUERIES=True, **options,
    )  # fmt: skip
    first, last = sums, sums
    if g_means is not None or g_weight is not None:
        # The state after the last key acts as one more query: 2^−log Z [∂M, ∂M·M − ∂log Z] for each feature.
        first = torch.zeros_like(behind) if g_means is None else g_means.contiguous()
        top = -(behind_weight + _expanded(offset, B, G)) * key_sums.LOG2E.value
        of_weight = (first * behind).sum(-1) - (0.0 if g_weight is None else g_weight)
        last = torch.stack((top, of_weight), -2)
    prefixes, whole_s, whole_z = torch.empty_like(sums), empty(q, B, G, rep, m, D), empty(q, B, G, rep, 2, m)
    start(
        key_sums.combine, (B * H, m),
        sums, first, last, prefixes, whole_s, whole_z, parts, rep, m, D, padded(D), padded(parts),
        FIRST=last is not sums, PREFIX=True, REVERSE=True, num_warps=8,
    )  # fmt: skip
    block, options = launch("causal_key_back_rows" if learned_keys else "causal_key_back", T, most)
    dtype = k.dtype if rep == 1 else torch.float32
    dk, dv = empty(k, B, G, rep, L, d, dtype=dtype), empty(v, B, G, rep, L, D, dtype=dtype)
    start(
        causal.key_back, (B * H, parts),
        q, k, v, g, rows, key_rows, offset, counts, prefixes, lse, delta, dk, dv, dwk, *strides(q, k, v, g), *heads,
        **sizes, C=block, T=T, MASKED=masked, ROWS=learned_keys, **options,
    )  # fmt: skip
    dk, dv = (x.squeeze(2) if rep == 1 else x.sum(2).to(k.dtype) for x in (dk, dv))
    dm, dz = empty(q, 0), empty(q, 0)
    if means is not None and log_weight is not None:
        exponent = whole_z[..., 0, :] + (log_weight + _expanded(offset, B, G)).unsqueeze(2) * key_sums.LOG2E.value
        scale = torch.where(exponent > key_sums.NONE.value / 2, exponent.clamp_max(0.0).exp2(), 0.0)
        dm = (scale.unsqueeze(-1) * whole_s).sum(2)
        dz = (means * dm).sum(-1) - (scale * whole_z[..., 1, :]).sum(2)
    return (
        dq, dk, dv, dw.sum(2) if learned else dw, doff.sum(2), dwk.sum(2) if learned_keys else dwk, dm, dz
    )  # fmt: skip


def _expanded(offset: Tensor, batch: int, groups: int) -> Tensor:
    return offset.expand(batch, groups, offset.shape[-1])
