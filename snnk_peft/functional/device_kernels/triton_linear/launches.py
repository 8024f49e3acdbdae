"""The launches: tensors in, new tensors out, no gradients.

Shapes: features q (B, H, L, m) and k (B, G, N, m) of one dtype, v (B, G, N, D); masks (B, N) bool; scales of keys
(B, G, N), S (B, G, m, D), z (B, G, m) and the scale of both (B, G, 1), fp32.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from snnk_peft.functional.device_kernels.triton_linear import causal, sums
from snnk_peft.functional.device_kernels.triton_shared.launching import (
    Launch,
    cdiv,
    dense,
    empty,
    flags,
    padded,
    part_tokens,
    start,
    strides,
)

NOTHING = None, None, None  # in place of S, z and scale


@functools.cache
def dimensions(m: int, D: int) -> dict[str, int]:
    """Return the constants that every kernel accepts."""
    return {"m": m, "M": padded(m), "D": D, "Dv": padded(D)}


# Chosen by the compilers' register counts, for 64 features and 64 columns; not yet timed on a card.
TABLE = {
    "sums_pass": Launch(64, 4, 2),
    "sums_back": Launch(32, 8, 1),
    "forward_pass": Launch(32, 4, 2),
    "query_back": Launch(16, 8, 1),
    "key_back": Launch(16, 8, 2),
    "token_pass": Launch(1, 4, 1),
}


def launch(kernel: str, m: int, D: int, features: torch.dtype) -> tuple[int, dict[str, int]]:
    """Return rows per block and launch options for a kernel in TABLE, for m features of a dtype and D columns of
    values.

    Products in full fp32 precision take three times the registers.
    """
    block, warps, stages = TABLE[kernel]
    if padded(m) * padded(D) > 4096:
        block, warps, stages = 16, 8, 1
    elif features == torch.float32:
        block, warps, stages = min(block, 32), 8, 1
    return block, {"num_warps": warps, "num_stages": stages}


def scale_strides(scales: Tensor | None) -> tuple[int, int, int]:
    """Return strides of batch, head and token; zeros without scales."""
    return (0, 0, 0) if scales is None else scales.stride()  # type: ignore[return-value]


def _parts(
    k: Tensor, v: Tensor, mask: Tensor | None, scales: Tensor | None, size: int, den: Tensor | None = None,
    delta: Tensor | None = None,
) -> tuple[Tensor, int]:  # fmt: skip
    """Return the sums of each part and the number of parts; with `den` and `delta`, over queries and gradients."""
    (B, G, N, m), D = k.shape, v.shape[-1]
    parts, (block, options) = cdiv(N, size), launch("sums_pass", m, D, k.dtype)
    found = empty(k, B * G * parts * (1 + m + m * D))
    start(
        sums.sums_pass, (B * G, parts),
        k, v, k if scales is None else scales, flags(mask, k), k if den is None else den, k if delta is None else delta,
        found, *strides(k, v), *scale_strides(scales), G, N, size, **dimensions(m, D), BLOCK=min(block, size),
        FULL=k.dtype == torch.float32, MASKED=mask is not None, SCALED=scales is not None, QUERIES=den is not None,
        **options,
    )  # fmt: skip
    return found, parts


def _combined(
    found: Tensor, shape: tuple[int, int, int, int], parts: int, first: tuple[Tensor | None, ...], scaled: bool,
    rep: int = 0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return sums before each part (for `rep` > 0 heads per group: after it), and S, z and scale of all."""
    B, G, m, D = shape
    values, normaliser, scale = (empty(found, B, G, *size) for size in ((m, D), (m,), (1,)))
    prefixes = torch.empty_like(found)
    given = [found if x is None else x.contiguous() for x in first]
    start(
        sums.combine, (B * G, m),
        found, *given, prefixes, values, normaliser, scale, parts, max(rep, 1), m, D, padded(D), padded(parts),
        FIRST=first[0] is not None, SCALED=scaled, PREFIX=True, REVERSE=rep > 0, num_warps=8,
    )  # fmt: skip
    return prefixes, values, normaliser, scale


def key_sums(
    k: Tensor, v: Tensor, mask: Tensor | None, scales: Tensor | None, values: Tensor | None, normaliser: Tensor | None,
    log_scale: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return S, z and scale of these keys and those of a state; without scales there is no scale."""
    k, v = dense(k), dense(v)
    (B, G, N, m), D = k.shape, v.shape[-1]
    found, parts = _parts(k, v, mask, scales, part_tokens(N, B * G, "plain"))
    return _combined(found, (B, G, m, D), parts, (values, normaliser, log_scale), scales is not None)[1:]


def key_sums_back(
    g_values: Tensor, g_normaliser: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scales: Tensor | None,
    scale: Tensor, of_scales: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return gradients of k, v and scales, empty if not requested."""
    k, v = dense(k), dense(v)
    (B, G, N, m), D = k.shape, v.shape[-1]
    size, (block, options) = part_tokens(N, B * G, "plain"), launch("sums_back", m, D, k.dtype)
    dk, dv = empty(k, *k.shape, dtype=k.dtype), empty(v, *v.shape, dtype=v.dtype)
    ds = empty(k, *((B, G, N) if of_scales else (0,)))
    start(
        sums.sums_back, (B * G, cdiv(N, size)),
        k, v, k if scales is None else scales, flags(mask, k), g_values.contiguous(), g_normaliser.contiguous(), scale,
        dk, dv, ds, *strides(k, v), *scale_strides(scales), G, N, size, **dimensions(m, D), BLOCK=min(block, size),
        FULL=k.dtype == torch.float32, MASKED=mask is not None, SCALED=scales is not None, GRADIENT=of_scales,
        **options,
    )  # fmt: skip
    return dk, dv, ds


def causal_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scales: Tensor | None, values: Tensor | None,
    normaliser: Tensor | None, log_scale: Tensor | None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Return outputs, denominators and ρ (B, H, L), empty without scales, and S, z and scale after the last key."""
    q, k, v = dense(q), dense(k), dense(v)
    (B, H, L, m), (_, G, _, D) = q.shape, v.shape
    size, scaled, (block, options) = (
        part_tokens(L, B * H, "causal"),
        scales is not None,
        launch("forward_pass", m, D, q.dtype),
    )
    found, parts = _parts(k, v, mask, scales, size)
    prefixes, *behind = _combined(found, (B, G, m, D), parts, (values, normaliser, log_scale), scaled)
    out, den = empty(q, B, H, L, D, dtype=v.dtype), empty(q, B, H, L)
    rho = empty(q, *((B, H, L) if scaled else (0,)))
    start(
        causal.forward_pass, (B * H, parts),
        q, k, v, k if scales is None else scales, flags(mask, k), prefixes, out, den, rho, *strides(q, k, v),
        *scale_strides(scales), H, H // G, L, size, **dimensions(m, D), C=block, FULL=q.dtype == torch.float32,
        MASKED=mask is not None, SCALED=scaled, **options,
    )  # fmt: skip
    return out, den, rho, *behind


def causal_attention_back(
    g: Tensor, g_values: Tensor | None, g_normaliser: Tensor | None, q: Tensor, k: Tensor, v: Tensor,
    mask: Tensor | None, scales: Tensor | None, values: Tensor | None, normaliser: Tensor | None,
    log_scale: Tensor | None, out: Tensor, den: Tensor, rho: Tensor, scale: Tensor, of_scales: bool, of_state: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return gradients of q, k, v, scales, S and z; the last three are empty if not requested."""
    q, k, v, g = dense(q), dense(k), dense(v), dense(g)
    (B, H, L, m), (_, G, _, D), rep = q.shape, v.shape, q.shape[1] // k.shape[1]
    size, scaled, sizes = part_tokens(L, B * H, "causal"), scales is not None, dimensions(m, D)
    told = {"FULL": q.dtype == torch.float32, "MASKED": mask is not None, "SCALED": scaled}
    given, counts = k if scales is None else scales, flags(mask, k)
    found, parts = _parts(k, v, mask, scales, size)
    prefixes, *_ = _combined(found, (B, G, m, D), parts, (values, normaliser, log_scale), scaled)
    dq, delta = empty(q, *q.shape, dtype=q.dtype), empty(q, B, H, L)
    block, options = launch("query_back", m, D, q.dtype)
    start(
        causal.query_back, (B * H, parts),
        k, v, g, out, given, counts, prefixes, den, delta, dq, *strides(k, v, g), *scale_strides(scales), H, rep, L,
        size, **sizes, C=block, **told, **options,
    )  # fmt: skip
    first: tuple[Tensor | None, ...] = NOTHING
    if g_values is not None or g_normaliser is not None:  # the state after the last key acts as one more query
        dS = torch.zeros(B, G, m, D, device=q.device) if g_values is None else g_values
        first = dS, torch.zeros(B, G, m, device=q.device) if g_normaliser is None else g_normaliser, scale
    found, _ = _parts(q, g, None, rho if scaled else None, size, den, delta)
    prefixes, whole_s, whole_z, top = _combined(found, (B, H, m, D), parts, first, scaled, rep)
    block, options = launch("key_back", m, D, q.dtype)
    of_k, of_v = (x.dtype if rep == 1 else torch.float32 for x in (k, v))
    dk, dv = empty(k, B, G, rep, L, m, dtype=of_k), empty(v, B, G, rep, L, D, dtype=of_v)
    ds = empty(k, *((B, G, rep, L) if of_scales else (0,)))
    start(
        causal.key_back, (B * H, parts),
        q, k, v, g, given, counts, prefixes, den, rho, delta, dk, dv, ds, *strides(q, k, v, g), *scale_strides(scales),
        H, rep, L, size, **sizes, C=block, **told, GRADIENT=of_scales, **options,
    )  # fmt: skip
    dk, dv = (x.squeeze(2) if rep == 1 else x.sum(2).to(like.dtype) for x, like in ((dk, k), (dv, v)))
    dS0, dz0 = empty(q, 0), empty(q, 0)
    if of_state and log_scale is not None:
        share = (log_scale.unsqueeze(2) + top.view(B, G, rep, 1)).exp() if scaled else torch.ones_like(top)
        share = share.view(B, G, rep, 1)
        dS0 = (share.unsqueeze(-1) * whole_s.view(B, G, rep, m, D)).sum(2)
        dz0 = (share * whole_z.view(B, G, rep, m)).sum(2)
    return dq, dk, dv, ds.sum(2) if of_scales else ds, dS0, dz0
