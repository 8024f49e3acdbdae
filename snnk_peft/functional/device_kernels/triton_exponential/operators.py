"""The launches as torch operators, with shapes for compilers and with gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from snnk_peft.functional.backend import plain_call
from snnk_peft.functional.device_kernels.triton_exponential import launches
from snnk_peft.functional.device_kernels.triton_exponential.in_torch import (
    attention_in_torch,
    causal_in_torch,
    differentiable,
    means_in_torch,
)


def operator(name: str, schema: str) -> Callable[[Callable[..., Any]], Any]:
    """Decorator: the function is the operator snnk_peft::exponential_{name} on every device that the kernels take."""
    return torch.library.custom_op(f"snnk_peft::exponential_{name}", mutates_args=(), schema=schema)


PLAIN = {torch.Tensor, torch.nn.Parameter, torch.dtype, int, float, bool, type(None)}  # subclasses may not compute


def computes_here(given: Sequence[Any]) -> bool:
    """Return True if a kernel can be launched on these arguments directly, without torch's dispatcher."""
    return plain_call() and all(type(x) in PLAIN for x in given)


def here(operator: Callable[..., Any], launch: Callable[..., Any], *given: Any) -> Any:
    """Call an operator that needs no gradients, directly where possible."""
    return (launch if computes_here(given) else operator)(*given)


def narrow(x: Tensor, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Allocate an operator's output."""
    return x.new_empty(shape, dtype=dtype)


def same(x: Tensor) -> Tensor:
    """The gradient of a tensor, as an operator gives it."""
    return narrow(x, *x.shape, dtype=x.dtype)


def to_shape(gradient: Tensor, of: Tensor) -> Tensor:
    """Sum a per-head gradient (B, G, ...) to the shape of the tensor that the heads share."""
    return gradient.sum_to_size(of.shape).to(of.dtype)


# --- M and log Z of keys ----------------------------------------------------------------------------------------------


@operator("key_means", "(Tensor k, Tensor v, Tensor rows, float square, Tensor? mask) -> (Tensor, Tensor)")
def key_means(*given: Any) -> tuple[Tensor, Tensor]:
    """(B, G, m, D) and (B, G, m)."""
    return launches.key_means(*given)


@key_means.register_fake
def _(k: Tensor, v: Tensor, rows: Tensor, square: float, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    return _state(k, v, rows)


@operator(
    "key_means_back",
    "(Tensor g_means, Tensor g_weight, Tensor k, Tensor v, Tensor rows, float square, Tensor? mask, Tensor means, "
    "Tensor log_weight, bool learned) -> (Tensor, Tensor, Tensor)",
)
def key_means_back(g_means: Tensor, g_weight: Tensor, *given: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of k, v and each head's rows."""
    return launches.key_means_back(g_means.contiguous(), g_weight.contiguous(), *given)


@key_means_back.register_fake
def _(
    g_means: Tensor, g_weight: Tensor, k: Tensor, v: Tensor, rows: Tensor, square: float, mask: Tensor | None,
    means: Tensor, log_weight: Tensor, learned: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    return same(k), same(v), narrow(k, *((*k.shape[:2], *rows.shape[-2:]) if learned else (0,)))


def save_means(ctx: Any, inputs: Any, output: Any) -> None:
    """For the backward pass of `key_means`."""
    k, v, rows, ctx.square, mask = inputs
    ctx.save_for_backward(k, v, rows, mask, *output)


def back_of_means(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
    """Gradients of the inputs of `key_means`."""
    k, v, rows, mask, means, log_weight = ctx.saved_tensors
    if torch.is_grad_enabled():
        return differentiable(ctx, (k, v, rows, ctx.square, mask), gradients, means_in_torch)
    learned = ctx.needs_input_grad[2]
    wanted = (*(g.contiguous() for g in gradients), k, v, rows, ctx.square, mask, means, log_weight, learned)
    dk, dv, dw = here(key_means_back, launches.key_means_back, *wanted)
    return dk, dv, to_shape(dw, rows) if learned else None, None, None


key_means.register_autograd(back_of_means, setup_context=save_means)


# --- both kinds of attention ------------------------------------------------------------------------------------------

GIVEN = (
    "Tensor q, Tensor k, Tensor v, Tensor rows, Tensor offset, Tensor key_rows, float square, Tensor? mask, "
    "Tensor? means, Tensor? log_weight"
)
GRADIENTS = "(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"


def _shapes_back(q: Tensor, k: Tensor, v: Tensor, rows: Tensor, state: bool, *learned: bool) -> tuple[Tensor, ...]:
    """Shapes returned by both backward operators: q, k, v, rows, offset, key rows, M, log Z; empty if not requested."""
    of_rows = (*k.shape[:2], *rows.shape[-2:])
    dw, dwk = (narrow(q, *(of_rows if wanted else (0,))) for wanted in learned)
    before = _state(k, v, rows) if state else (narrow(q, 0), narrow(q, 0))
    return same(q), same(k), same(v), dw, narrow(q, *of_rows[:3]), dwk, *before


def save(ctx: Any, inputs: Any, output: Any) -> None:
    """For the backward pass of either attention."""
    *tensors, ctx.square, mask, means, log_weight = inputs[:10]
    ctx.more = inputs[10:]  # the dtype of causal outputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*tensors, mask, means, log_weight, *output)


def _back(ctx: Any, gradients: Sequence[Any], operator: Any, plain: Callable[..., Any]) -> tuple[Any, ...]:
    """Gradients of the inputs of either operator."""
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


@operator("attention", f"({GIVEN}) -> (Tensor, Tensor, Tensor)")
def attention(*given: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Outputs, and M and log Z."""
    return launches.attention(*given)


@attention.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, rows: Tensor, offset: Tensor, key_rows: Tensor, square: float,
    mask: Tensor | None, means: Tensor | None, log_weight: Tensor | None,
) -> tuple[Tensor, ...]:  # fmt: skip
    return narrow(q, *q.shape[:-1], v.shape[-1], dtype=v.dtype), *_state(k, v, rows)


@operator(
    "attention_back",
    f"(Tensor g, Tensor? g_means, Tensor? g_weight, {GIVEN}, Tensor found, Tensor found_weight, bool learned, "
    f"bool learned_keys) -> {GRADIENTS}",
)
def attention_back(*given: Any) -> tuple[Tensor, ...]:
    """Gradients as in `_shapes_back`; that of the offset is a view of a longer buffer, which compilers cannot know."""
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
    """Gradients of the inputs of `attention`."""

    def call(g: Tensor, more: Any, given: Any, state: Any, wanted: Any, output: Any, learned: Any) -> Any:
        return here(attention_back, launches.attention_back, g, *more, *given, *wanted, *output[1:], *learned)

    return _back(ctx, gradients, call, attention_in_torch)


attention.register_autograd(back_of_attention, setup_context=save)


# --- causal -----------------------------------------------------------------------------------------------------------


@operator("causal", f"({GIVEN}, ScalarType dtype) -> (Tensor, Tensor, Tensor, Tensor)")
def causal(*given: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Outputs, logarithms of denominators (B, H, L), and M and log Z after the last key."""
    return launches.causal_attention(*given)


@causal.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, rows: Tensor, offset: Tensor, key_rows: Tensor, square: float,
    mask: Tensor | None, means: Tensor | None, log_weight: Tensor | None, dtype: torch.dtype,
) -> tuple[Tensor, ...]:  # fmt: skip
    out = narrow(q, *q.shape[:-1], v.shape[-1], dtype=dtype)
    return out, narrow(q, *q.shape[:-1]), *_state(k, v, rows)


@operator(
    "causal_back",
    f"(Tensor g, Tensor? g_lse, Tensor? g_means, Tensor? g_weight, {GIVEN}, Tensor out, Tensor lse, Tensor behind, "
    f"Tensor behind_weight, bool learned, bool learned_keys) -> {GRADIENTS}",
)
def causal_back(*given: Any) -> tuple[Tensor, ...]:
    """Gradients as in `_shapes_back`."""
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
    """Gradients of the inputs of `causal`."""

    def call(g: Tensor, more: Any, given: Any, state: Any, wanted: Any, output: Any, learned: Any) -> Any:
        return here(causal_back, launches.causal_attention_back, g, *more, *given, *state, *output, *learned)

    return _back(ctx, gradients, call, causal_in_torch)


causal.register_autograd(back_of_causal, setup_context=save)


def _state(k: Tensor, v: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    shape = (*k.shape[:2], rows.shape[-2])
    return narrow(k, *shape, v.shape[-1]), narrow(k, *shape)
