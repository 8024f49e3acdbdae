"""The launches as torch operators, with shapes for compilers and with gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from snnk_peft.functional.device_kernels.triton_exponential import launches
from snnk_peft.functional.device_kernels.triton_shared.operating import (
    differentiable,
    direct,
    here,
    narrow,
    operator,
    same,
)
from snnk_peft.functional.exponential_attention import KeyMeans
from snnk_peft.functional.exponential_attention import exponential_attention as torch_attention
from snnk_peft.functional.exponential_attention import key_means as torch_means
from snnk_peft.functional.exponential_causal import causal_exponential_attention as torch_causal
from snnk_peft.functional.log_linear import LogLinear


def to_shape(gradient: Tensor, of: Tensor) -> Tensor:
    """Sum a per-head gradient (B, G, ...) to the shape of the tensor that the heads share."""
    return gradient.sum_to_size(of.shape).to(of.dtype)


# --- M and log Z of keys ----------------------------------------------------------------------------------------------


@operator("exponential_key_means", "(Tensor k, Tensor v, Tensor rows, float square, Tensor? mask) -> (Tensor, Tensor)")
def key_means(*given: Any) -> tuple[Tensor, Tensor]:
    """Return (B, G, m, D) and (B, G, m)."""
    return launches.key_means(*given)


@key_means.register_fake
def _(k: Tensor, v: Tensor, rows: Tensor, square: float, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    return _state(k, v, rows)


@operator(
    "exponential_key_means_back",
    "(Tensor g_means, Tensor g_weight, Tensor k, Tensor v, Tensor rows, float square, Tensor? mask, Tensor means, "
    "Tensor log_weight, bool learned) -> (Tensor, Tensor, Tensor)",
)
def key_means_back(g_means: Tensor, g_weight: Tensor, *given: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Return gradients of k, v and each head's rows."""
    return launches.key_means_back(g_means.contiguous(), g_weight.contiguous(), *given)


@key_means_back.register_fake
def _(
    g_means: Tensor, g_weight: Tensor, k: Tensor, v: Tensor, rows: Tensor, square: float, mask: Tensor | None,
    means: Tensor, log_weight: Tensor, learned: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    return same(k), same(v), narrow(k, *((*k.shape[:2], *rows.shape[-2:]) if learned else (0,)))


def save_means(ctx: Any, inputs: Any, output: Any) -> None:
    """Save tensors for the backward pass of `key_means`."""
    k, v, rows, ctx.square, mask = inputs
    ctx.save_for_backward(k, v, rows, mask, *output)


def back_of_means(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
    """Return gradients of the inputs of `key_means`."""
    k, v, rows, mask, means, log_weight = ctx.saved_tensors
    if torch.is_grad_enabled():
        return differentiable(ctx, (k, v, rows, ctx.square, mask), gradients, means_in_torch)
    learned = ctx.needs_input_grad[2]
    wanted = (*(g.contiguous() for g in gradients), k, v, rows, ctx.square, mask, means, log_weight, learned)
    dk, dv, dw = here(key_means_back, launches.key_means_back, *wanted)
    return dk, dv, to_shape(dw, rows) if learned else None, None, None


key_means_here = direct(key_means, launches.key_means, save_means, back_of_means)


# --- both kinds of attention ------------------------------------------------------------------------------------------

GIVEN = (
    "Tensor q, Tensor k, Tensor v, Tensor rows, Tensor offset, Tensor key_rows, float square, Tensor? mask, "
    "Tensor? means, Tensor? log_weight"
)
GRADIENTS = "(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"


def _shapes_back(q: Tensor, k: Tensor, v: Tensor, rows: Tensor, state: bool, *learned: bool) -> tuple[Tensor, ...]:
    """Return both backward operators' outputs: q, k, v, rows, offset, key rows, M, log Z; empty if not requested."""
    of_rows = (*k.shape[:2], *rows.shape[-2:])
    dw, dwk = (narrow(q, *(of_rows if wanted else (0,))) for wanted in learned)
    before = _state(k, v, rows) if state else (narrow(q, 0), narrow(q, 0))
    return same(q), same(k), same(v), dw, narrow(q, *of_rows[:3]), dwk, *before


def save(ctx: Any, inputs: Any, output: Any) -> None:
    """Save tensors for the backward pass of either attention."""
    *tensors, ctx.square, mask, means, log_weight = inputs[:10]
    ctx.more = inputs[10:]  # the dtype of causal outputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*tensors, mask, means, log_weight, *output)


def _back(ctx: Any, gradients: Sequence[Any], operator: Any, plain: Callable[..., Any]) -> tuple[Any, ...]:
    """Return gradients of the inputs of either operator."""
    q, k, v, rows, offset, key_rows, mask, means, log_weight, *output = ctx.saved_tensors
    given, needs = (q, k, v, rows, offset, key_rows, ctx.square, mask, means, log_weight), ctx.needs_input_grad
    if torch.is_grad_enabled():
        whole = [torch.zeros_like(o) if g is None else g for g, o in zip(gradients, output, strict=True)]
        return differentiable(ctx, (*given, *ctx.more), whole, plain)
    g = torch.zeros_like(output[0]) if gradients[0] is None else gradients[0]
    learned, state = (needs[3], needs[5]), (means, log_weight) if needs[8] or needs[9] else (None, None)
    dq, dk, dv, dw, doff, dwk, dm, dz = operator(
        g, gradients[1:], given[:8], (means, log_weight), state, output, learned
    )
    return (
        dq,
        dk,
        dv,
        to_shape(dw, rows) if learned[0] else None,
        to_shape(doff, offset) if needs[4] else None,
        to_shape(dwk, key_rows) if learned[1] else None,
        None,
        None,
        dm if needs[8] else None,
        dz if needs[9] else None,
        *(None for _ in ctx.more),
    )


# --- every query attends to every key ---------------------------------------------------------------------------------


@operator("exponential_attention", f"({GIVEN}) -> (Tensor, Tensor, Tensor)")
def attention(*given: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Return outputs, and M and log Z."""
    return launches.attention(*given)


@attention.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, rows: Tensor, offset: Tensor, key_rows: Tensor, square: float,
    mask: Tensor | None, means: Tensor | None, log_weight: Tensor | None,
) -> tuple[Tensor, ...]:  # fmt: skip
    return narrow(q, *q.shape[:-1], v.shape[-1], dtype=v.dtype), *_state(k, v, rows)


@operator(
    "exponential_attention_back",
    f"(Tensor g, Tensor? g_means, Tensor? g_weight, {GIVEN}, Tensor found, Tensor found_weight, bool learned, "
    f"bool learned_keys) -> {GRADIENTS}",
)
def attention_back(*given: Any) -> tuple[Tensor, ...]:
    """Return gradients as in `_shapes_back`; the offset's is a view of a longer buffer, unknown to compilers."""
    *found, of_offset, of_key_rows, of_means, of_weight = launches.attention_back(*given)
    return *found, of_offset.clone(), of_key_rows, of_means, of_weight


@attention_back.register_fake
def _(
    g: Tensor, g_means: Tensor | None, g_weight: Tensor | None, q: Tensor, k: Tensor, v: Tensor, rows: Tensor,
    offset: Tensor, key_rows: Tensor, square: float, mask: Tensor | None, means: Tensor | None,
    log_weight: Tensor | None, found: Tensor, found_weight: Tensor, learned: bool, learned_keys: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    return _shapes_back(q, k, v, rows, means is not None, learned, learned_keys)


def back_of_attention(ctx: Any, *gradients: Any) -> tuple[Any, ...]:
    """Return gradients of the inputs of `attention`."""

    def call(g: Tensor, more: Any, given: Any, state: Any, wanted: Any, output: Any, learned: Any) -> Any:
        return here(attention_back, launches.attention_back, g, *more, *given, *wanted, *output[1:], *learned)

    return _back(ctx, gradients, call, attention_in_torch)


attention_here = direct(attention, launches.attention, save, back_of_attention)


# --- causal -----------------------------------------------------------------------------------------------------------


@operator("exponential_causal", f"({GIVEN}, ScalarType dtype) -> (Tensor, Tensor, Tensor, Tensor)")
def causal(*given: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return outputs, logarithms of denominators (B, H, L), and M and log Z after the last key."""
    return launches.causal_attention(*given)


@causal.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, rows: Tensor, offset: Tensor, key_rows: Tensor, square: float,
    mask: Tensor | None, means: Tensor | None, log_weight: Tensor | None, dtype: torch.dtype,
) -> tuple[Tensor, ...]:  # fmt: skip
    out = narrow(q, *q.shape[:-1], v.shape[-1], dtype=dtype)
    return out, narrow(q, *q.shape[:-1]), *_state(k, v, rows)


@operator(
    "exponential_causal_back",
    f"(Tensor g, Tensor? g_lse, Tensor? g_means, Tensor? g_weight, {GIVEN}, Tensor out, Tensor lse, Tensor behind, "
    f"Tensor behind_weight, bool learned, bool learned_keys) -> {GRADIENTS}",
)
def causal_back(*given: Any) -> tuple[Tensor, ...]:
    """Return gradients as in `_shapes_back`."""
    return launches.causal_attention_back(*given)


@causal_back.register_fake
def _(
    g: Tensor, g_lse: Tensor | None, g_means: Tensor | None, g_weight: Tensor | None, q: Tensor, k: Tensor,
    v: Tensor, rows: Tensor, offset: Tensor, key_rows: Tensor, square: float, mask: Tensor | None,
    means: Tensor | None, log_weight: Tensor | None, out: Tensor, lse: Tensor, behind: Tensor,
    behind_weight: Tensor, learned: bool, learned_keys: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    return _shapes_back(q, k, v, rows, means is not None, learned, learned_keys)


def back_of_causal(ctx: Any, *gradients: Any) -> tuple[Any, ...]:
    """Return gradients of the inputs of `causal`."""

    def call(g: Tensor, more: Any, given: Any, state: Any, wanted: Any, output: Any, learned: Any) -> Any:
        return here(causal_back, launches.causal_attention_back, g, *more, *given, *state, *output, *learned)

    return _back(ctx, gradients, call, causal_in_torch)


causal_here = direct(causal, launches.causal_attention, save, back_of_causal)


def _state(k: Tensor, v: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    shape = (*k.shape[:2], rows.shape[-2])
    return narrow(k, *shape, v.shape[-1]), narrow(k, *shape)


# --- in torch's own operations ----------------------------------------------------------------------------------------


def means_in_torch(k: Tensor, v: Tensor, rows: Tensor, square: float, mask: Tensor | None) -> KeyMeans:
    """Compute the torch form of `key_means`."""
    plain = torch_means.__wrapped__  # type: ignore[attr-defined]
    found: KeyMeans = plain(k, v, LogLinear(rows, rows.new_zeros(()), square), mask)
    return found


def attention_in_torch(
    q: Tensor, k: Tensor, v: Tensor, rows: Tensor, offset: Tensor, key_rows: Tensor, square: float,
    mask: Tensor | None, means: Tensor | None, log_weight: Tensor | None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Compute the torch form of `attention`."""
    plain = torch_attention.__wrapped__  # type: ignore[attr-defined]
    out, found = plain(q, k, v, *_maps(rows, offset, key_rows, square), mask, _kept(means, log_weight))
    return out, *found


def causal_in_torch(*given: Any) -> tuple[Tensor, ...]:
    """Compute the torch form of `causal`."""
    q, k, v, rows, offset, key_rows, square, mask, means, log_weight, dtype = given
    plain = torch_causal.__wrapped__  # type: ignore[attr-defined]
    maps = _maps(rows, offset, key_rows, square)
    out, behind = plain(q, k, v, *maps, mask, _kept(means, log_weight), weighed=True)
    return out[..., :-1].to(dtype), out[..., -1], *behind


def _maps(rows: Tensor, offset: Tensor, key_rows: Tensor, square: float) -> tuple[LogLinear, LogLinear]:
    return LogLinear(rows, offset, 0.0), LogLinear(key_rows, offset.new_zeros(offset.shape[-1:]), square)


def _kept(means: Tensor | None, log_weight: Tensor | None) -> KeyMeans | None:
    return None if means is None or log_weight is None else KeyMeans(means, log_weight)
