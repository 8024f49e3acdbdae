"""The launches as torch operators, with shapes for compilers and with gradients.

A gradient that is to be differentiated itself comes from the torch form.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from snnk_peft.functional.device_kernels.triton_linear import launches
from snnk_peft.functional.device_kernels.triton_shared.operating import (
    differentiable,
    direct,
    here,
    narrow,
    operator,
    same,
)
from snnk_peft.functional.linear_attention import AttentionState
from snnk_peft.functional.linear_attention import causal_linear_attention as torch_causal
from snnk_peft.functional.linear_attention import key_sums as torch_sums

KEYS = "Tensor k, Tensor v, Tensor? mask, Tensor? scales"
STATE = "Tensor? values, Tensor? normaliser, Tensor? log_scale"


def _state(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    (B, G, _, m), D = k.shape, v.shape[-1]
    return narrow(k, B, G, m, D), narrow(k, B, G, m), narrow(k, B, G, 1)


def _given(values: Tensor | None, normaliser: Tensor | None, log_scale: Tensor | None) -> AttentionState | None:
    if values is None or normaliser is None or log_scale is None:
        return None
    return AttentionState(values, normaliser, log_scale)


def _last(scales: Tensor | None) -> Tensor | None:
    return None if scales is None else scales.unsqueeze(-1)


# --- sums over keys ---------------------------------------------------------------------------------------------------


@operator("linear_key_sums", f"({KEYS}, {STATE}) -> (Tensor, Tensor, Tensor)")
def key_sums(*given: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Return S (B, G, m, D), z (B, G, m) and their scale (B, G, 1)."""
    return launches.key_sums(*given)


@key_sums.register_fake
def _(k: Tensor, v: Tensor, *more: Any) -> tuple[Tensor, Tensor, Tensor]:
    return _state(k, v)


@operator(
    "linear_key_sums_back",
    f"(Tensor g_values, Tensor g_normaliser, {KEYS}, Tensor scale, bool of_scales) -> (Tensor, Tensor, Tensor)",
)
def key_sums_back(*given: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Return gradients of k, v and the scales; empty if not requested."""
    return launches.key_sums_back(*given)


@key_sums_back.register_fake
def _(g: Tensor, h: Tensor, k: Tensor, v: Tensor, mask: Any, scales: Any, scale: Tensor, wanted: bool) -> Any:
    return same(k), same(v), narrow(k, *(k.shape[:3] if wanted else (0,)))


def _save_sums(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(*inputs, output[2])


def _back_of_sums(ctx: Any, g_values: Tensor, g_normaliser: Tensor, _: Any) -> tuple[Any, ...]:
    k, v, mask, scales, values, normaliser, log_scale, scale = ctx.saved_tensors
    if torch.is_grad_enabled():
        given = k, v, mask, scales, values, normaliser, log_scale
        return differentiable(ctx, given, (g_values, g_normaliser), _sums_in_torch)
    needs = ctx.needs_input_grad
    asked = g_values, g_normaliser, k, v, mask, scales, scale, needs[3]
    dk, dv, ds = here(key_sums_back, launches.key_sums_back, *asked)
    dS, dz = None, None
    if needs[4] or needs[5]:
        share = torch.where(scale > log_scale, (log_scale - scale).exp(), 1.0)
        dS, dz = g_values * share.unsqueeze(-1), g_normaliser * share
    return dk, dv, None, ds if needs[3] else None, dS, dz, None


def _sums_in_torch(k: Tensor, v: Tensor, mask: Any, scales: Any, *state: Any) -> tuple[Tensor, Tensor]:
    plain = torch_sums.__wrapped__  # type: ignore[attr-defined]
    return tuple(plain(k, v, mask, log_scale=_last(scales), state=_given(*state))[:2])


sums = direct(key_sums, launches.key_sums, _save_sums, _back_of_sums)


# --- causal attention -------------------------------------------------------------------------------------------------


@operator("linear_causal", f"(Tensor q, {KEYS}, {STATE}) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)")
def causal(*given: Any) -> tuple[Tensor, ...]:
    """Return outputs, denominators and ρ (B, H, L), and S, z and scale after the last key."""
    return launches.causal_attention(*given)


@causal.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, mask: Any, scales: Tensor | None, *state: Any) -> tuple[Tensor, ...]:
    out = narrow(q, *q.shape[:-1], v.shape[-1], dtype=v.dtype)
    rho = narrow(q, *((0,) if scales is None else q.shape[:-1]))
    return out, narrow(q, *q.shape[:-1]), rho, *_state(k, v)


@operator(
    "linear_causal_back",
    f"(Tensor g, Tensor? g_values, Tensor? g_normaliser, Tensor q, {KEYS}, {STATE}, Tensor out, Tensor den, "
    "Tensor rho, Tensor scale, bool of_scales, bool of_state) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def causal_back(*given: Any) -> tuple[Tensor, ...]:
    """Return gradients of q, k, v, the scales, S and z; empty if not requested."""
    return launches.causal_attention_back(*given)


@causal_back.register_fake
def _(g: Tensor, g_values: Any, g_normaliser: Any, q: Tensor, k: Tensor, v: Tensor, *more: Any) -> tuple[Tensor, ...]:
    of_scales, of_state = more[-2:]
    state = _state(k, v)[:2] if of_state else (narrow(k, 0), narrow(k, 0))
    return same(q), same(k), same(v), narrow(k, *(k.shape[:3] if of_scales else (0,))), *state


def _save(ctx: Any, inputs: Any, output: Any) -> None:
    out, den, rho, _, _, scale = output
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs, out, den, rho, scale)


def _back_of_causal(ctx: Any, g: Tensor | None, _: Any, __: Any, *of_state: Tensor | None) -> tuple[Any, ...]:
    *given, out, den, rho, scale = ctx.saved_tensors
    g, needs = torch.zeros_like(out) if g is None else g, ctx.needs_input_grad
    if torch.is_grad_enabled():
        like = _state(*given[1:3])
        g_state = [torch.zeros_like(x) if each is None else each for x, each in zip(like, of_state[:2], strict=False)]
        return differentiable(ctx, given, (g, *g_state), _causal_in_torch)
    wanted = needs[4], needs[5] or needs[6]
    given = g, *of_state[:2], *given, out, den, rho, scale, *wanted
    dq, dk, dv, ds, dS, dz = here(causal_back, launches.causal_attention_back, *given)
    return dq, dk, dv, None, ds if wanted[0] else None, *((dS, dz) if wanted[1] else (None, None)), None


def _causal_in_torch(q: Tensor, k: Tensor, v: Tensor, mask: Any, scales: Any, *state: Any) -> tuple[Tensor, ...]:
    plain = torch_causal.__wrapped__  # type: ignore[attr-defined]
    out, behind = plain(q, k, v, mask, state=_given(*state), log_scale=_last(scales))
    return out, *behind[:2]


causal_attention = direct(causal, launches.causal_attention, _save, _back_of_causal)
