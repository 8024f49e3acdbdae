"""The operators without torch's dispatcher, where torch computes at once: it takes as long as the launches do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from snnk_peft.functional.device_kernels.triton_exponential import launches, operators
from snnk_peft.functional.device_kernels.triton_exponential.operators import computes_here


def direct(
    operator: Callable[..., Any], launch: Callable[..., Any], save: Callable[..., None], back: Callable[..., Any]
) -> Callable[..., Any]:
    """A function that gives what an operator gives.

    Args:
        operator: for everybody who looks at operations.
        launch: what it does.
        save: its `setup_context`.
        back: its gradients.
    """

    class Direct(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *given: Any) -> Any:  # a `setup_context` of its own would cost a search for its signature
            found = launch(*given)
            save(ctx, given, found)
            return found

        backward = staticmethod(back)

    def call(*given: Any) -> Any:
        if not computes_here(given):
            return operator(*given)
        if torch.is_grad_enabled() and any(isinstance(x, torch.Tensor) and x.requires_grad for x in given):
            return Direct.apply(*given)
        return launch(*given)

    return call


key_means = direct(operators.key_means, launches.key_means, operators.save_means, operators.back_of_means)
attention = direct(operators.attention, launches.attention, operators.save, operators.back_of_attention)
causal = direct(operators.causal, launches.causal_attention, operators.save, operators.back_of_causal)
