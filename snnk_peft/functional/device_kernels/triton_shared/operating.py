"""Launches as torch operators, with shapes for compilers and with gradients.

A gradient that is to be differentiated itself comes from the torch form.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from snnk_peft.functional.backend import plain_call

PLAIN = {Tensor, torch.nn.Parameter, torch.dtype, int, float, bool, type(None)}  # subclasses may not compute anything


def operator(name: str, schema: str) -> Callable[[Callable[..., Any]], Any]:
    """Register the decorated function as the operator snnk_peft::{name} on every device of the kernels."""
    return torch.library.custom_op(f"snnk_peft::{name}", mutates_args=(), schema=schema)


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
    """Return the gradient of a tensor in the form that an operator returns."""
    return narrow(x, *x.shape, dtype=x.dtype)


def differentiable(
    ctx: Any, given: Sequence[Any], gradients: Sequence[Tensor], function: Callable[..., Any]
) -> tuple[Any, ...]:
    """Compute the requested gradients of the inputs through torch's own operations."""
    wanted = [x for x, needed in zip(given, ctx.needs_input_grad, strict=True) if needed]
    found = iter(torch.autograd.grad(function(*given), wanted, gradients, create_graph=True))
    return tuple(next(found) if needed else None for needed in ctx.needs_input_grad)


def direct(
    operator: Any, launch: Callable[..., Any], save: Callable[..., None], back: Callable[..., Any]
) -> Callable[..., Any]:
    """Give an operator its gradients `back`, from what its `setup_context` `save` stores, and return it without torch's
    dispatcher, which takes as long as a launch, if torch runs eagerly."""
    operator.register_autograd(back, setup_context=save)

    class Direct(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *given: Any) -> Any:  # a separate `setup_context` would cost a signature lookup
            found = launch(*given)
            save(ctx, given, found)
            return found

        backward = staticmethod(back)

    def call(*given: Any) -> Any:
        if not computes_here(given):
            return operator(*given)
        if torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in given):
            return Direct.apply(*given)
        return launch(*given)

    return call
