"""The launches: tensors in, new tensors out, no gradients.

Shapes: q (B, H, L, d), k (B, G, N, d), v (B, G, N, D), of one dtype as the sinks' keys (B, G, s, d) and values (B, G,
s, D); mask (B, N) bool; known (B, L or 1) integers; far (B, H, L, D) and weight (B, H, L) fp32.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from snnk_peft.functional.device_kernels.triton_near import kernels
from snnk_peft.functional.device_kernels.triton_shared.launching import (
    cdiv,
    dense,
    empty,
    flags,
    launch,
    operand,
    padded,
    part_tokens,
    start,
    strides,
)


def _sizes(name: str, q: Tensor, v: Tensor, mask: Tensor | None, causal: bool) -> dict[str, Any]:
    """Return the constants that every kernel accepts."""
    d, D, T = q.shape[-1], v.shape[-1], operand(q.dtype)
    block, options = launch(name, T, max(padded(d), padded(D)))
    options |= {"d": d, "Dk": padded(d), "D": D, "Dv": padded(D), "C": block, "T": T}
    return {**options, "MASKED": mask is not None, "CAUSAL": causal}


def _beside(
    q: Tensor, keys: Tensor | None, values: Tensor | None, known: Tensor | None
) -> tuple[list[Tensor], list[int], int]:  # fmt: skip
    """Return the sinks' memory (any tensor if none), strides of the count that each query sees, and their number."""
    if keys is None or values is None or known is None:
        return [q, q, q], [0, 0], 0
    steps = [0 if size == 1 else stride for size, stride in zip(known.shape, known.stride(), strict=True)]
    return [keys.contiguous(), values.contiguous(), known], steps, keys.shape[-2]


def _far(q: Tensor, far: Tensor | None, weight: Tensor | None) -> tuple[list[Tensor], list[int], bool]:
    """Return the far field's memory (any tensor if there is none), its strides, and whether there is one."""
    if far is None or weight is None:
        return [q, q], [0, 0, 0], False
    far = dense(far)
    return [far, weight.contiguous()], strides(far), True


def near_attention(
    q: Tensor, k: Tensor, v: Tensor, width: int, mask: Tensor | None, causal: bool, scaling: float,
    keys: Tensor | None, values: Tensor | None, known: Tensor | None, far: Tensor | None, weight: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return outputs in the dtype of v, and logarithms of denominators to base 2, (B, H, L)."""
    q, k, v = dense(q), dense(k), dense(v)
    (B, H, L, _), (_, G, N, D) = q.shape, v.shape
    (sinks, of_sinks, s), (others, of_others, there) = _beside(q, keys, values, known), _far(q, far, weight)
    out, lse, size = empty(q, B, H, L, D, dtype=v.dtype), empty(q, B, H, L), part_tokens(L, B * H, "plain")
    start(
        kernels.forward_pass, (B * H, cdiv(L, size)),
        q, k, v, flags(mask, q), *sinks, *others, out, lse, *strides(q, k, v, out), *of_others, *of_sinks, H, H // G, L,
        N, min(width, N), scaling, size, SINKS=s, AFAR=there, **_sizes("near_forward", q, v, mask, causal),
    )  # fmt: skip
    return out, lse


def near_attention_back(
    g: Tensor, q: Tensor, k: Tensor, v: Tensor, width: int, mask: Tensor | None, causal: bool, scaling: float,
    keys: Tensor | None, values: Tensor | None, known: Tensor | None, far: Tensor | None, weight: Tensor | None,
    lse: Tensor,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Return gradients of q, k, v, sinks (B, G, s, d + D), far and weight; the last three empty if absent."""
    q, k, v, g = dense(q), dense(k), dense(v), dense(g)
    (B, H, L, d), (_, G, N, D), width = q.shape, v.shape, min(width, k.shape[-2])
    (sinks, of_sinks, s), (others, of_others, there) = _beside(q, keys, values, known), _far(q, far, weight)
    dq, dk, dv = (empty(x, *x.shape, dtype=x.dtype) for x in (q, k, v))
    dfar, dweight = (empty(q, *(x.shape if x is not None else (0,))) for x in (far, weight))
    delta, size = empty(q, B, H, L), part_tokens(L, B * H, "plain")
    start(
        kernels.query_back, (B * H, cdiv(L, size)),
        q, k, v, flags(mask, q), *sinks, *others, g, lse, delta, dq, dfar, dweight, *strides(q, k, v, g), *of_others,
        *of_sinks, H, H // G, L, N, width, scaling, size, SINKS=s, AFAR=there,
        **_sizes("near_query_back", q, v, mask, causal),
    )  # fmt: skip
    size = part_tokens(N, B * G, "plain")
    parts = cdiv(L, size) if s else 0
    dsinks = empty(q, *((B, G, parts, s, d + D) if s else (0,)))
    start(
        kernels.key_back, (B * G, cdiv(N, size) + parts),
        q, k, v, flags(mask, q), *sinks, g, lse, delta, dk, dv, dsinks, *strides(q, k, v, g), *of_sinks, G, H // G, L,
        N, width, scaling, size, SINKS=s, **_sizes("near_key_back", q, v, mask, causal),
    )  # fmt: skip
    return dq, dk, dv, dsinks.sum(2) if s else dsinks, dfar, dweight
