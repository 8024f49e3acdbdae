"""Attention over positive exponential features in Triton kernels, if Triton is installed."""

from __future__ import annotations

import importlib.util
from typing import Any

import torch
from torch import Tensor

from snnk_peft.functional.backend import register_kernel, takes_untried, wants_gradient
from snnk_peft.functional.exponential_attention import KeyMeans, together
from snnk_peft.functional.hadamard import next_power_of_two
from snnk_peft.functional.log_linear import LogLinear, both_offsets

LARGEST = 128  # features, and columns of keys and of values
ROOM = {torch.bfloat16: 8192, torch.float16: 4096, torch.float32: 4096}  # features times columns: shared memory
DECODES = takes_untried()  # whether to process a few new tokens in one launch


def key_means(
    k: Tensor, v: Tensor, features: LogLinear, mask: Tensor | None = None, state: KeyMeans | None = None,
    memory: Any = None,
) -> KeyMeans:  # fmt: skip
    """Compute `key_means` (exponential_attention.py) on a GPU."""
    from snnk_peft.functional.device_kernels.triton_exponential import operators

    found = KeyMeans(*operators.key_means_here(k, v, features.rows, float(features.square), mask))
    return together(state, found)


def exponential_attention(
    q: Tensor, k: Tensor, v: Tensor, queries: LogLinear, keys: LogLinear, mask: Tensor | None = None,
    state: KeyMeans | None = None,
) -> tuple[Tensor, KeyMeans]:  # fmt: skip
    """Compute `exponential_attention` (exponential_attention.py) on a GPU; 0 where no key counts."""
    from snnk_peft.functional.device_kernels.triton_exponential import operators

    given = (q, k, v, queries.rows, both_offsets(queries, keys), keys.rows, float(keys.square), mask)
    out, *means = operators.attention_here(*given, *((None, None) if state is None else state))
    return out, KeyMeans(*means)


def causal_exponential_attention(
    q: Tensor, k: Tensor, v: Tensor, queries: LogLinear, keys: LogLinear, mask: Tensor | None = None,
    state: KeyMeans | None = None, *, weighed: bool = False,
) -> tuple[Tensor, KeyMeans]:  # fmt: skip
    """Compute `causal_exponential_attention` (exponential_causal.py) on a GPU."""
    from snnk_peft.functional.device_kernels.triton_exponential import decode, operators

    before = (None, None) if state is None else state
    if DECODES and q.shape[-2] <= decode.FEW and not wants_gradient((q, k, v, queries, keys, state)):
        out, *behind = decode.step(q, k, v, *queries[:2], *keys[:3], mask, *before, weighed)
        return out, KeyMeans(*behind)
    dtype = torch.float32 if weighed else v.dtype
    given = (q, k, v, queries.rows, both_offsets(queries, keys), keys.rows, float(keys.square), mask)
    out, lse, *behind = operators.causal_here(*given, *before, dtype)
    return torch.cat((out, lse.unsqueeze(-1)), -1) if weighed else out, KeyMeans(*behind)


def padded(size: int) -> int:
    """Round up to a tile size, a power of two >= 16."""
    return max(16, next_power_of_two(size))


def serves(*tensors: Tensor, features: LogLinear, state: KeyMeans | None) -> bool:
    """Return True if the kernels support these queries, keys, values and key features."""
    dtype, m, columns = tensors[0].dtype, features.rows.shape[-2], max(t.shape[-1] for t in tensors)
    small = max(m, columns) <= LARGEST and padded(m) * padded(columns) <= ROOM.get(dtype, 0)
    same = all(t.dtype == dtype and t.dim() == 4 and t.shape[-2] > 0 for t in tensors)
    whole = features.rows.dtype == torch.float32 and features.rows.dim() <= 4
    kept = state is None or all(t.dtype == torch.float32 for t in state)
    return small and same and whole and kept and features.signs is None and not isinstance(features.square, Tensor)


def _serves_means(
    k: Tensor, v: Tensor, features: LogLinear, mask: Tensor | None = None, state: KeyMeans | None = None,
    memory: Any = None,
) -> bool:  # fmt: skip
    return serves(k, v, features=features, state=state)


def _serves_attention(
    q: Tensor, k: Tensor, v: Tensor, queries: LogLinear, keys: LogLinear, mask: Tensor | None = None,
    state: KeyMeans | None = None, *, weighed: bool = False,
) -> bool:  # fmt: skip
    return serves(q, k, v, features=keys, state=state) and queries.rows.dtype == torch.float32


def register(device: str) -> None:
    """Register the kernels of all three operations."""
    register_kernel("key_means", device=device, serves=_serves_means, differentiable=True)(key_means)
    register_kernel("exponential_attention", device=device, serves=_serves_attention, differentiable=True)(
        exponential_attention
    )
    register_kernel("causal_exponential_attention", device=device, serves=_serves_attention, differentiable=True)(
        causal_exponential_attention
    )


if importlib.util.find_spec("triton") is not None:
    register("cuda")
