"""Gradient descent from a closed-form solution, by Adam with learning rates that decay linearly to zero.

Minibatches are drawn at random, and the first step is proportional to the size of each tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.func import functional_call

from snnk_peft.errors import NumericalError

# Size of the first step, relative to the root mean square of the tensor; and tokens in a minibatch.
LEARNING_RATE, BATCH = 0.03, 1024
BLOCK_LEARNING_RATE, BLOCK_BATCH = 0.01, 2048


def falling_adam(
    tensors: Sequence[Tensor],
    rates: Sequence[float],
    loss: Callable[[], Tensor],
    steps: int,
    what: str,
    *,
    betas: tuple[float, float] = (0.9, 0.99),
) -> None:
    """Update tensors that require gradients, in place.

    Args:
        tensors: leaf tensors.
        rates: learning rate of the first step, per tensor.
        loss: returns a number, from other data at each call.
        steps: number of steps.
        what: name of the loss in errors.
        betas: those of Adam.

    Raises:
        NumericalError: the loss is no longer finite.
    """
    optimizer = torch.optim.Adam([{"params": [each]} for each in tensors], betas=betas)
    for step in range(steps):
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * (1 - step / steps)
        optimizer.zero_grad()
        with torch.enable_grad():
            value = loss()
            if not value.isfinite():
                raise NumericalError(
                    f"the {what} is {value.item()} at step {step} of {steps}; expected a finite number. Look for NaN "
                    "in the inputs, or calibrate with steps=0"
                )
            value.backward()
        optimizer.step()
        torch.clear_autocast_cache()  # otherwise the caller's autocast keeps copies of the old tensors


def descend(
    stage: nn.Module,
    moved: Sequence[str],
    readout: tuple[Tensor, Tensor],
    inputs: Tensor,
    targets: Tensor,
    steps: int,
    generator: torch.Generator,
) -> None:
    """Update the named tensors W of a stage φ_W in place, minimising E ‖z − B φ_W(x) − b‖² over W, B and b.

    B and b are discarded in the end: the caller solves for the readout once more, on all tokens.

    Args:
        stage: maps (n, dim) to (n, m).
        moved: names of its parameters and buffers that are learned; all others stay unchanged.
        readout: B (o, m) and b (o,) as initial values.
        inputs: x (n, dim).
        targets: z (n, o), what the network reads from the original.
        steps: number of steps, one minibatch each.
        generator: draws the minibatches; on the CPU.

    Raises:
        NumericalError: the loss is no longer finite; `stage` is unchanged.
    """
    named = {**dict(stage.named_parameters()), **dict(stage.named_buffers())}
    learned = [each.detach().float().clone().requires_grad_() for each in (*(named[name] for name in moved), *readout)]

    def output(x: Tensor) -> Tensor:
        *tensors, weight, bias = learned
        features = functional_call(stage, dict(zip(moved, tensors, strict=True)), (x.float(),))
        return nn.functional.linear(features, weight, bias)

    rates = [LEARNING_RATE * (_size(each) or 1.0) for each in learned]
    loss = _minibatch_error(output, inputs, targets, BATCH, generator)
    falling_adam(learned, rates, loss, steps, "error of the features")
    with torch.no_grad():
        for name, tensor in zip(moved, learned, strict=False):
            named[name].copy_(tensor)


def descend_block(
    output: Callable[[Sequence[Tensor], Tensor], Tensor],
    tensors: Sequence[Tensor],
    inputs: Tensor,
    targets: Tensor,
    steps: int,
    generator: torch.Generator,
) -> list[Tensor]:
    """Return better tensors of a block g, fp32, minimising E ‖y − g(x; tensors)‖².

    Args:
        output: g, maps tensors and inputs (k, dim) to (k, o).
        tensors: initial values; not changed.
        inputs: x (n, dim).
        targets: y (n, o), outputs of the original.
        steps: number of steps, one minibatch each.
        generator: draws the minibatches; on the CPU.

    Raises:
        NumericalError: the loss is no longer finite.
    """
    moved = [tensor.detach().float().clone().requires_grad_() for tensor in tensors]
    # A tensor of zeros (a bias) has no size; that of the mean target is used.
    rates = [BLOCK_LEARNING_RATE * (_size(each) or float(targets.abs().mean())) for each in moved]
    loss = _minibatch_error(lambda x: output(moved, x).float(), inputs, targets, BLOCK_BATCH, generator)
    falling_adam(moved, rates, loss, steps, "error of the block")
    return [each.detach() for each in moved]


def _minibatch_error(
    output: Callable[[Tensor], Tensor], inputs: Tensor, targets: Tensor, batch: int, generator: torch.Generator
) -> Callable[[], Tensor]:
    def loss() -> Tensor:
        chosen = torch.randint(len(inputs), (batch,), generator=generator).to(inputs.device)
        return (output(inputs[chosen]) - targets[chosen]).square().sum(-1).mean()

    return loss


def _size(tensor: Tensor) -> float:
    """Return the root mean square, so that a step means the same for tensors of any scale."""
    return float(tensor.detach().square().mean().sqrt())
