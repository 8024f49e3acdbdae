"""The launches: tensors in, new tensors out, no gradients.

Shapes: q (B, H, L, d), k (B, G, N, d), v (B, G, N, D), of one dtype as the sinks' keys (B, G, s, d) and values (B, G,
s, D); mask (B, N) and seen (B, L or 1, s) bool; far (B, H, L, D) and weight (B, H, L) fp32.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from snnk_peft.functional.device_kernels.triton_exponential.launches import cdiv, dense, empty, flags, strides
from snnk_peft.functional.device_kernels.triton_exponential.sizes import launch, operand, padded, part_tokens
from snnk_peft.functional.device_kernels.triton_near import kernels


def _sizes(name: str, q: Tensor, v: Tensor, mask: Tensor | None, causal: bool) -> dict[str, Any]:
    """The constants that every kernel takes."""
    d, D, T = q.shape[-1], v.shape[-1], operand(q.dtype)
    block, options = launch(name, T, max(padded(d), padded(D)))
    options |= {"d": d, "Dk": padded(d), "D": D, "Dv": padded(D), "C": block, "T": T}
    return {**options, "MASKED": mask is not None, "CAUSAL": causal}


def _beside(q: Tensor, keys: Tensor | None, values: Tensor | None, seen: Tensor | None, far: Tensor | None,
            weight: Tensor | None) -> tuple[list[Tensor], list[int], dict[str, Any]]:  # fmt: skip
    """Sinks and far keys: their memory, or any, which is not read; strides; and constants."""
    memory, steps = [q] * 5, [0] * 5
    count = 0
    if keys is not None and values is not None and seen is not None:
        count = keys.shape[-2]
        memory[:3] = keys.contiguous(), values.contiguous(), seen.contiguous()
        steps[3:] = seen.shape[-2] * count, count if seen.shape[-2] > 1 else 0
    if far is not None and weight is not None:
        memory[3:] = dense(far), weight.contiguous()
        steps[:3] = strides(memory[3])
    return memory, steps, {"SINKS": count, "S": padded(max(1, count)), "AFAR": far is not None}


def near_attention(
    q: Tensor, k: Tensor, v: Tensor, width: int, mask: Tensor | None, causal: bool, scaling: float,
    *more: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Outputs in the dtype of v, and logarithms of denominators to base 2, (B, H, L)."""
    q, k, v = dense(q), dense(k), dense(v)
    (B, H, L, _), (_, G, N, D) = q.shape, v.shape
    memory, steps, constants = _beside(q, *more)
    out, lse, size = empty(q, B, H, L, D, dtype=v.dtype), empty(q, B, H, L), part_tokens(L, B * H, "plain")
    kernels.forward_pass[(B * H, cdiv(L, size))](
        q, k, v, flags(mask, q), *memory, out, lse, *strides(q, k, v, out), *steps, H, H // G, L, N, min(width, N),
        scaling, size, **constants, **_sizes("near_forward", q, v, mask, causal),
    )  # fmt: skip
    return out, lse


def near_attention_back(
    g: Tensor, q: Tensor, k: Tensor, v: Tensor, width: int, mask: Tensor | None, causal: bool, scaling: float,
    keys: Tensor | None, values: Tensor | None, seen: Tensor | None, far: Tensor | None, weight: Tensor | None,
    lse: Tensor,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Gradients of q, k, v, sinks (B, G, s, d + D), far and weight; the last three empty where there is none."""
    q, k, v, g = dense(q), dense(k), dense(v), dense(g)
    (B, H, L, d), (_, G, N, D), width = q.shape, v.shape, min(width, k.shape[-2])
    memory, steps, constants = _beside(q, keys, values, seen, far, weight)
    size = part_tokens(L, B * H, "plain")
    parts, count = cdiv(L, size), constants["SINKS"]
    dq, dk, dv = (empty(x, *x.shape, dtype=x.dtype) for x in (q, k, v))
    delta, dsinks = empty(q, B, H, L), empty(q, B, G, H // G * parts, count, d + D) if count else empty(q, 0)
    dfar, dweight = (empty(q, *(x.shape if x is not None else (0,))) for x in (far, weight))
    kernels.query_back[(B * H, parts)](
        q, k, v, flags(mask, q), *memory, g, lse, delta, dq, dsinks, dfar, dweight, *strides(q, k, v, g),
        *steps, H, H // G, L, N, width, scaling, size, **constants, **_sizes("near_query_back", q, v, mask, causal),
    )  # fmt: skip
    size = part_tokens(N, B * G, "plain")
    kernels.key_back[(B * G, cdiv(N, size))](
        q, k, v, flags(mask, q), g, lse, delta, dk, dv, *strides(q, k, v, g), G, H // G, L, N, width, scaling, size,
        **_sizes("near_key_back", q, v, mask, causal),
    )  # fmt: skip
    return dq, dk, dv, dsinks.sum(2) if count else dsinks, dfar, dweight
