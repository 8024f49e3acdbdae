"""Linear attention over features of any kind in Triton kernels, if Triton is installed."""

from __future__ import annotations

import importlib.util

import torch
from torch import Tensor

from snnk_peft.functional.backend import register_kernel, takes_untried, wants_gradient
from snnk_peft.functional.device_kernels.cuda_exponential import padded
from snnk_peft.functional.linear_attention import CHUNK, AttentionState

LARGEST = 128  # features, and columns of values
ROOM = 8192  # features times columns: shared memory
DTYPES = torch.float32, torch.bfloat16, torch.float16
NONE = None, None, None


def key_sums(
    k: Tensor, v: Tensor, mask: Tensor | None = None, *, log_scale: Tensor | None = None,
    state: AttentionState | None = None, overwrite: bool = False,
) -> AttentionState:  # fmt: skip
    """Compute `key_sums` (linear_attention.py) on a GPU; with a state, the scale is −∞ where no key counts."""
    from snnk_peft.functional.device_kernels.triton_linear import operators

    if log_scale is None and state is not None:
        log_scale = k.new_zeros((), dtype=torch.float32)
    values, normaliser, scale = operators.sums(k, v, mask, _scales(k, log_scale), *(state or NONE))
    return AttentionState(values, normaliser, scale.detach())


def causal_linear_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, *, chunk: int = CHUNK,
    state: AttentionState | None = None, log_scale: Tensor | None = None,
) -> tuple[Tensor, AttentionState]:  # fmt: skip
    """Compute `causal_linear_attention` (linear_attention.py) on a GPU."""
    from snnk_peft.functional.device_kernels.triton_exponential.decode import FEW
    from snnk_peft.functional.device_kernels.triton_linear import decode, operators

    given = q, k, v, mask, _scales(k, log_scale), *(state or NONE)
    if q.shape[-2] <= FEW and not wants_gradient(given):
        out, *behind = decode.step(*given)
        return out, AttentionState(*behind)
    out, _, _, values, normaliser, scale = operators.causal_attention(*given)
    return out, AttentionState(values, normaliser, scale.detach())


def _scales(k: Tensor, log_scale: Tensor | None) -> Tensor | None:
    """Return (B, G, N) in fp32."""
    return None if log_scale is None else log_scale.float().expand(*k.shape[:-1], 1).squeeze(-1)


def _serves(*features: Tensor, v: Tensor, state: AttentionState | None, log_scale: Tensor | None) -> bool:
    """Return True if the kernels support these features, values and state."""
    dtype, m, D = features[0].dtype, features[0].shape[-1], v.shape[-1]
    small = max(m, D) <= LARGEST and padded(m) * padded(D) <= ROOM
    same = all(x.dtype == dtype for x in features) and {dtype, v.dtype} <= set(DTYPES)
    whole = all(x.dim() == 4 and x.shape[-2] > 0 for x in (*features, v))
    kept = state is None or (all(x.dtype == torch.float32 for x in state) and not state.log_scale.requires_grad)
    return small and same and whole and kept and (log_scale is None or log_scale.dtype in DTYPES)


def _serves_sums(
    k: Tensor, v: Tensor, mask: Tensor | None = None, *, log_scale: Tensor | None = None,
    state: AttentionState | None = None, overwrite: bool = False,
) -> bool:  # fmt: skip
    return _serves(k, v=v, state=state, log_scale=log_scale)


def _serves_causal(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, *, chunk: int = CHUNK,
    state: AttentionState | None = None, log_scale: Tensor | None = None,
) -> bool:  # fmt: skip
    return _serves(q, k, v=v, state=state, log_scale=log_scale)


def register(device: str) -> None:
    """Register the kernels of both operations."""
    register_kernel("key_sums", device=device, serves=_serves_sums, differentiable=True)(key_sums)
    register_kernel("causal_linear_attention", device=device, serves=_serves_causal, differentiable=True)(
        causal_linear_attention
    )


if importlib.util.find_spec("triton") is not None and takes_untried():
    register("cuda")
