"""The launches as torch operators, with shapes for compilers and with gradients.

A gradient that is itself to be differentiated comes from the torch form.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from snnk_peft.functional.device_kernels.triton_exponential import launches
from snnk_peft.functional.exponential_attention import KeyMeans
from snnk_peft.functional.exponential_attention import attend_means as torch_attend
from snnk_peft.functional.exponential_attention import key_means as torch_means
from snnk_peft.functional.exponential_causal import causal_exponential_attention as torch_causal
from snnk_peft.functional.log_linear import LogLinear

Shape = Sequence[int]


def operator(name: str, schema: str) -> Callable[[Callable[..., Any]], Any]:
    """Decorator: the function is the operator snnk_peft::exponential_{name} on every device that the kernels take."""
    return torch.library.custom_op(f"snnk_peft::exponential_{name}", mutates_args=(), schema=schema)


def narrow(x: Tensor, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """What an operator says it gives."""
    return x.new_empty(shape, dtype=dtype)


def differentiable(
    ctx: Any, given: Sequence[Any], gradients: Sequence[Tensor], function: Callable[..., Any]
) -> tuple[Any, ...]:
    """Gradients of the inputs that have one, through torch's own operations, as far as they are asked for."""
    wanted = [x for x, needed in zip(given, ctx.needs_input_grad, strict=True) if needed]
    found = iter(torch.autograd.grad(function(*given), wanted, gradients, create_graph=True))
    return tuple(next(found) if needed else None for needed in ctx.needs_input_grad)


def to_shape(gradient: Tensor, of: Tensor) -> Tensor:
    """Of what each head had its own copy of, (B, G, ...)."""
    return gradient.sum_to_size(of.shape).to(of.dtype)


# --- M and log Z of keys ----------------------------------------------------------------------------------------------


@operator("key_means", "(Tensor k, Tensor v, Tensor rows, float square, Tensor? mask) -> (Tensor, Tensor)")
def key_means(k: Tensor, v: Tensor, rows: Tensor, square: float, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """(B, G, m, D) and (B, G, m)."""
    return launches.key_means(k, v, rows, square, mask)


@key_means.register_fake
def _(k: Tensor, v: Tensor, rows: Tensor, square: float, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    shape = (*k.shape[:2], rows.shape[-2])
    return narrow(k, *shape, v.shape[-1]), narrow(k, *shape)


@operator(
    "key_means_back",
    "(Tensor g_means, Tensor g_weight, Tensor k, Tensor v, Tensor rows, float square, Tensor? mask, Tensor means, "
    "Tensor log_weight, bool learned) -> (Tensor, Tensor, Tensor)",
)
def key_means_back(*given: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Of k, v and the rows of each head."""
    return launches.key_means_back(*given)


@key_means_back.register_fake
def _(
    g_means: Tensor, g_weight: Tensor, k: Tensor, v: Tensor, rows: Tensor, square: float, mask: Tensor | None,
    means: Tensor, log_weight: Tensor, learned: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    of_rows = (*k.shape[:2], *rows.shape[-2:]) if learned else (0,)
    return narrow(k, *k.shape, dtype=k.dtype), narrow(v, *v.shape, dtype=v.dtype), narrow(k, *of_rows)


def _save_means(ctx: Any, inputs: Any, output: Any) -> None:
    k, v, rows, ctx.square, mask = inputs
    ctx.save_for_backward(k, v, rows, mask, *output)


def _back_of_means(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
    k, v, rows, mask, means, log_weight = ctx.saved_tensors
    if torch.is_grad_enabled():
        plain = torch_means.__wrapped__  # type: ignore[attr-defined]

        def again(k: Tensor, v: Tensor, rows: Tensor, square: float, mask: Tensor | None) -> Any:
            return plain(k, v, LogLinear(rows, rows.new_zeros(()), square), mask)

        return differentiable(ctx, (k, v, rows, ctx.square, mask), gradients, again)
    learned = ctx.needs_input_grad[2]
    dk, dv, dw = key_means_back(*gradients, k, v, rows, ctx.square, mask, means, log_weight, learned)
    return dk, dv, to_shape(dw, rows) if learned else None, None, None


key_means.register_autograd(_back_of_means, setup_context=_save_means)


# --- queries over M and log Z -----------------------------------------------------------------------------------------


@operator("attend_means", "(Tensor q, Tensor rows, Tensor offset, Tensor means, Tensor log_weight) -> Tensor")
def attend_means(q: Tensor, rows: Tensor, offset: Tensor, means: Tensor, log_weight: Tensor) -> Tensor:
    """(B, H, L, D) in the dtype of q, 0 where no key counted."""
    return launches.attend_means(q, rows, offset, means, log_weight)


@attend_means.register_fake
def _(q: Tensor, rows: Tensor, offset: Tensor, means: Tensor, log_weight: Tensor) -> Tensor:
    return narrow(q, *q.shape[:-1], means.shape[-1], dtype=q.dtype)


@operator(
    "attend_means_back",
    "(Tensor g, Tensor q, Tensor rows, Tensor offset, Tensor means, Tensor log_weight, bool learned) -> "
    "(Tensor, Tensor, Tensor, Tensor)",
)
def attend_means_back(*given: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Of q, M, log Z and the rows of each key head."""
    return launches.attend_means_back(*given)


@attend_means_back.register_fake
def _(
    g: Tensor, q: Tensor, rows: Tensor, offset: Tensor, means: Tensor, log_weight: Tensor, learned: bool
) -> tuple[Tensor, ...]:
    of_rows = (*means.shape[:2], *rows.shape[-2:]) if learned else (0,)
    found = narrow(q, *q.shape, dtype=q.dtype), narrow(q, *means.shape), narrow(q, *log_weight.shape)
    return *found, narrow(q, *of_rows)


def _save_queries(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(*inputs)


def _back_of_queries(ctx: Any, g: Tensor) -> tuple[Any, ...]:
    given = ctx.saved_tensors
    _, rows, offset, *_ = given
    if torch.is_grad_enabled():

        def again(q: Tensor, rows: Tensor, offset: Tensor, means: Tensor, log_weight: Tensor) -> Tensor:
            kept = KeyMeans(means, log_weight)
            out = torch_attend(q, kept, LogLinear(rows, offset, 0.0)).to(q.dtype)
            return out.masked_fill(~kept.seen.repeat_interleave(q.shape[1] // means.shape[1], 1)[..., None, None], 0.0)

        return differentiable(ctx, given, (g,), again)
    learned = ctx.needs_input_grad[1]
    dq, dm, dz, dw = attend_means_back(g, *given, learned)
    return (
        dq,
        to_shape(dw, rows) if learned else None,
        to_shape(dz, offset) if ctx.needs_input_grad[2] else None,
        dm,
        dz,
    )


attend_means.register_autograd(_back_of_queries, setup_context=_save_queries)


# --- causal -----------------------------------------------------------------------------------------------------------


@operator(
    "causal",
    "(Tensor q, Tensor k, Tensor v, Tensor rows, Tensor offset, Tensor key_rows, float square, Tensor? mask, "
    "Tensor? means, Tensor? log_weight, ScalarType dtype) -> (Tensor, Tensor, Tensor, Tensor)",
)
def causal(*given: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Outputs, logarithms of denominators (B, H, L), and M and log Z behind the last key."""
    return launches.causal_attention(*given)


@causal.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, rows: Tensor, offset: Tensor, key_rows: Tensor, square: float,
    mask: Tensor | None, means: Tensor | None, log_weight: Tensor | None, dtype: torch.dtype,
) -> tuple[Tensor, ...]:  # fmt: skip
    shape = (*k.shape[:2], rows.shape[-2])
    out = narrow(q, *q.shape[:-1], v.shape[-1], dtype=dtype)
    return out, narrow(q, *q.shape[:-1]), narrow(q, *shape, v.shape[-1]), narrow(q, *shape)


@operator(
    "causal_back",
    "(Tensor g, Tensor g_lse, Tensor g_means, Tensor g_weight, Tensor q, Tensor k, Tensor v, Tensor rows, "
    "Tensor offset, Tensor key_rows, float square, Tensor? mask, Tensor? means, Tensor? log_weight, Tensor out, "
    "Tensor lse, Tensor behind, Tensor behind_weight, bool learned, bool learned_keys) -> "
    "(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def causal_back(*given: Any) -> tuple[Tensor, ...]:
    """Of q, k, v, rows, offset, key rows, and of M and log Z before the first key."""
    return launches.causal_attention_back(*given)


@causal_back.register_fake
def _(
    g: Tensor, g_lse: Tensor, g_means: Tensor, g_weight: Tensor, q: Tensor, k: Tensor, v: Tensor, rows: Tensor,
    offset: Tensor, key_rows: Tensor, square: float, mask: Tensor | None, means: Tensor | None,
    log_weight: Tensor | None, out: Tensor, lse: Tensor, behind: Tensor, behind_weight: Tensor, learned: bool,
    learned_keys: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    of_inputs = (narrow(x, *x.shape, dtype=x.dtype) for x in (q, k, v))
    of_rows = (*k.shape[:2], *rows.shape[-2:])
    dw, dwk = (narrow(q, *(of_rows if wanted else (0,))) for wanted in (learned, learned_keys))
    state = (behind.shape, behind_weight.shape) if means is not None else ((0,), (0,))
    return *of_inputs, dw, narrow(q, *of_rows[:3]), dwk, narrow(q, *state[0]), narrow(q, *state[1])


def _save_causal(ctx: Any, inputs: Any, output: Any) -> None:
    q, k, v, rows, offset, key_rows, ctx.square, mask, means, log_weight, ctx.dtype = inputs
    ctx.save_for_backward(q, k, v, rows, offset, key_rows, mask, means, log_weight, *output)


def _back_of_causal(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
    q, k, v, rows, offset, key_rows, mask, means, log_weight, *output = ctx.saved_tensors
    given = (q, k, v, rows, offset, key_rows, ctx.square, mask, means, log_weight)
    needs = ctx.needs_input_grad
    if torch.is_grad_enabled():
        return differentiable(ctx, (*given, ctx.dtype), gradients, _causal_in_torch)
    dq, dk, dv, dw, doff, dwk, dm, dz = causal_back(*gradients, *given, *output, needs[3], needs[5])
    return (
        dq,
        dk,
        dv,
        to_shape(dw, rows) if needs[3] else None,
        to_shape(doff, offset) if needs[4] else None,
        to_shape(dwk, key_rows) if needs[5] else None,
        None,
        None,
        dm if means is not None else None,
        dz if means is not None else None,
        None,
    )


def _causal_in_torch(
    q: Tensor, k: Tensor, v: Tensor, rows: Tensor, offset: Tensor, key_rows: Tensor, square: float,
    mask: Tensor | None, means: Tensor | None, log_weight: Tensor | None, dtype: torch.dtype,
) -> tuple[Tensor, ...]:  # fmt: skip
    plain = torch_causal.__wrapped__  # type: ignore[attr-defined]
    state = None if means is None or log_weight is None else KeyMeans(means, log_weight)
    maps = LogLinear(rows, offset, 0.0), LogLinear(key_rows, offset.new_zeros(offset.shape[-1:]), square)
    out, behind = plain(q, k, v, *maps, mask, state, weighed=True)
    return out[..., :-1].to(dtype), out[..., -1], behind.values, behind.log_weight


causal.register_autograd(_back_of_causal, setup_context=_save_causal)
