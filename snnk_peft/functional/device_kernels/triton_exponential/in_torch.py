"""The operators in torch's own operations: where a gradient is itself to be differentiated."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from snnk_peft.functional.exponential_attention import KeyMeans
from snnk_peft.functional.exponential_attention import exponential_attention as torch_attention
from snnk_peft.functional.exponential_attention import key_means as torch_means
from snnk_peft.functional.exponential_causal import causal_exponential_attention as torch_causal
from snnk_peft.functional.log_linear import LogLinear


def differentiable(
    ctx: Any, given: Sequence[Any], gradients: Sequence[Tensor], function: Callable[..., Any]
) -> tuple[Any, ...]:
    """Gradients of the inputs that have one, through torch's own operations, as far as they are asked for."""
    wanted = [x for x, needed in zip(given, ctx.needs_input_grad, strict=True) if needed]
    found = iter(torch.autograd.grad(function(*given), wanted, gradients, create_graph=True))
    return tuple(next(found) if needed else None for needed in ctx.needs_input_grad)


def means_in_torch(k: Tensor, v: Tensor, rows: Tensor, square: float, mask: Tensor | None) -> KeyMeans:
    """Torch form of `operators.key_means`."""
    plain = torch_means.__wrapped__  # type: ignore[attr-defined]
    found: KeyMeans = plain(k, v, LogLinear(rows, rows.new_zeros(()), square), mask)
    return found


def attention_in_torch(
    q: Tensor, k: Tensor, v: Tensor, rows: Tensor, offset: Tensor, key_rows: Tensor, square: float,
    mask: Tensor | None, means: Tensor | None, log_weight: Tensor | None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Torch form of `operators.attention`."""
    plain = torch_attention.__wrapped__  # type: ignore[attr-defined]
    out, found = plain(q, k, v, *_maps(rows, offset, key_rows, square), mask, _kept(means, log_weight))
    return out, *found


def causal_in_torch(*given: Any) -> tuple[Tensor, ...]:
    """Torch form of `operators.causal`."""
    q, k, v, rows, offset, key_rows, square, mask, means, log_weight, dtype = given
    plain = torch_causal.__wrapped__  # type: ignore[attr-defined]
    maps = _maps(rows, offset, key_rows, square)
    out, behind = plain(q, k, v, *maps, mask, _kept(means, log_weight), weighed=True)
    return out[..., :-1].to(dtype), out[..., -1], *behind


def _maps(rows: Tensor, offset: Tensor, key_rows: Tensor, square: float) -> tuple[LogLinear, LogLinear]:
    return LogLinear(rows, offset, 0.0), LogLinear(key_rows, offset.new_zeros(offset.shape[-1:]), square)


def _kept(means: Tensor | None, log_weight: Tensor | None) -> KeyMeans | None:
    return None if means is None or log_weight is None else KeyMeans(means, log_weight)
