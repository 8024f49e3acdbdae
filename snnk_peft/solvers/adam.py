"""Refinement after a closed form: Adam with learning rates that fall linearly to zero."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from snnk_peft.errors import NumericalError


def falling_adam(
    tensors: Sequence[Tensor],
    rates: Sequence[float],
    loss: Callable[[], Tensor],
    steps: int,
    what: str,
    *,
    betas: tuple[float, float] = (0.9, 0.99),
) -> None:
    """Move tensors in place.

    Args:
        tensors: leaves that require gradients.
        rates: learning rate of the first step of each.
        loss: a number, of other data each time.
        steps: how many.
        what: the loss is called in errors.
        betas: of Adam.

    Raises:
        NumericalError: the loss is no longer finite.
    """
    optimizer = torch.optim.Adam([{"params": [each]} for each in tensors], betas=betas)
    for step in range(steps):
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * (1 - step / steps)
        optimizer.zero_grad()
        with torch.enable_grad():
            found = loss()
            if not found.isfinite():
                raise NumericalError(
                    f"the {what} is {found.item()} at step {step} of {steps}; expected a finite number. Look for NaN "
                    "in the inputs, or calibrate with steps=0"
                )
            found.backward()
        optimizer.step()
        torch.clear_autocast_cache()  # the caller's autocast would go on with copies of the tensors as they were
