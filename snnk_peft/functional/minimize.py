"""L-BFGS over several tensors: deterministic, with a line search, and never above its start."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


def minimize(loss: Callable[..., Tensor], start: Sequence[Tensor], *, steps: int = 300) -> list[Tensor]:
    """Return the arguments of the least loss seen in at most `steps` steps; `start` is not changed.

    The loss takes as many tensors as `start` has: a differentiable scalar of order 1. Tensors it does not use stay.
    """
    current = [tensor.detach().clone(memory_format=torch.contiguous_format).requires_grad_() for tensor in start]
    best = [tensor.detach().clone() for tensor in start]
    lowest = float("inf")
    optimizer = torch.optim.LBFGS(
        current,
        max_iter=steps,
        history_size=20,
        tolerance_grad=1e-8,
        tolerance_change=1e-9,
        line_search_fn="strong_wolfe",
    )

    def closure() -> Tensor:
        nonlocal lowest, best
        optimizer.zero_grad()
        with torch.enable_grad():
            value = loss(*current)
        value.backward()
        if (found := float(value.detach())) < lowest:
            lowest, best = found, [tensor.detach().clone() for tensor in current]
        return value

    optimizer.step(closure)
    return best
