"""The launches as torch operators, with shapes for compilers and with gradients.

A gradient that is to be differentiated itself comes from the torch form.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from snnk_peft.functional.device_kernels.triton_near import launches
from snnk_peft.functional.device_kernels.triton_shared.operating import (
    differentiable,
    direct,
    here,
    narrow,
    operator,
    same,
)
from snnk_peft.functional.near_field import Sinks
from snnk_peft.functional.near_field import near_attention as torch_form

GIVEN = (
    "Tensor q, Tensor k, Tensor v, int width, Tensor? mask, bool causal, float scaling, Tensor? sink_keys, "
    "Tensor? sink_values, Tensor? known, Tensor? far, Tensor? weight"
)


@operator("near", f"({GIVEN}) -> (Tensor, Tensor)")
def near(*given: Any) -> tuple[Tensor, Tensor]:
    """Return outputs, and logarithms of denominators for the backward pass."""
    return launches.near_attention(*given)


@near.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *more: Any) -> tuple[Tensor, Tensor]:
    return narrow(q, *q.shape[:-1], v.shape[-1], dtype=v.dtype), narrow(q, *q.shape[:-1])


@operator(
    "near_back",
    f"(Tensor g, {GIVEN}, Tensor lse) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def near_back(*given: Any) -> tuple[Tensor, ...]:
    """Return gradients of q, k, v, sinks, far and weight; empty if absent."""
    return launches.near_attention_back(*given)


@near_back.register_fake
def _(
    g: Tensor, q: Tensor, k: Tensor, v: Tensor, width: int, mask: Tensor | None, causal: bool, scaling: float,
    sink_keys: Tensor | None, sink_values: Tensor | None, known: Tensor | None, far: Tensor | None,
    weight: Tensor | None, lse: Tensor,
) -> tuple[Tensor, ...]:  # fmt: skip
    of_sinks = (0,) if sink_keys is None else (*sink_keys.shape[:-1], q.shape[-1] + v.shape[-1])
    others = (narrow(q, *((0,) if x is None else x.shape)) for x in (far, weight))
    return same(q), same(k), same(v), narrow(q, *of_sinks), *others


def _save(ctx: Any, inputs: Any, output: Any) -> None:
    q, k, v, width, mask, causal, scaling, *more = inputs
    ctx.numbers = width, causal, scaling
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(q, k, v, mask, *more, output[1])


def _back(ctx: Any, g: Tensor, _: Any) -> tuple[Any, ...]:
    q, k, v, mask, *more, lse = ctx.saved_tensors
    width, causal, scaling = ctx.numbers
    given = (q, k, v, width, mask, causal, scaling, *more)
    if torch.is_grad_enabled():
        return differentiable(ctx, given, (g,), _in_torch)
    dq, dk, dv, dsinks, dfar, dweight = here(near_back, launches.near_attention_back, g, *given, lse)
    sinks: tuple[Any, ...] = (None, None)
    if more[0] is not None:
        sinks = tuple(x.to(q.dtype) for x in dsinks.split((q.shape[-1], v.shape[-1]), -1))
    far = (None, None) if more[3] is None else (dfar, dweight)
    return dq, dk, dv, None, None, None, None, *sinks, None, *far


def _in_torch(
    q: Tensor, k: Tensor, v: Tensor, width: int, mask: Tensor | None, causal: bool, scaling: float,
    *more: Tensor | None,
) -> tuple[Tensor]:  # fmt: skip
    plain = torch_form.__wrapped__  # type: ignore[attr-defined]
    keys, values, known, *far = more
    sinks = Sinks(keys, values, known) if keys is not None and values is not None and known is not None else None
    others = () if far[0] is None else (far,)
    return (plain(q, k, v, width, mask, causal=causal, scaling=scaling, sinks=sinks, far=others),)


attention = direct(near, launches.near_attention, _save, _back)
