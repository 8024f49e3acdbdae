"""All matrices of a narrower block moved by gradient descent, from where a closed form has put them.

    minimise  E ‖y − g(x; tensors)‖²,        y what the original gives for x

by Adam on minibatches drawn at random, with steps in proportion to each tensor's size that fall linearly to zero.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from snnk_peft.solvers.adam import falling_adam

LEARNING_RATE = 0.01  # of the first step, times the root mean square of what is moved
BATCH = 2048


def descend_block(
    output: Callable[[Sequence[Tensor], Tensor], Tensor],
    tensors: Sequence[Tensor],
    inputs: Tensor,
    targets: Tensor,
    steps: int,
    generator: torch.Generator,
) -> list[Tensor]:
    """Better tensors, fp32, of the shapes of those to begin with.

    Args:
        output: g, called with tensors and inputs (k, dim), gives (k, o).
        tensors: to begin with; they stay as they are.
        inputs: x (n, dim).
        targets: y (n, o).
        steps: how many, one minibatch each.
        generator: draws the minibatches, on the CPU.

    Raises:
        NumericalError: the loss is no longer finite.
    """
    moved = [tensor.detach().float().clone().requires_grad_() for tensor in tensors]
    # Of zeros (a bias) there is no size; one of the mean of the targets will do.
    sizes = [float(each.detach().square().mean().sqrt()) or float(targets.abs().mean()) for each in moved]

    def loss() -> Tensor:
        chosen = torch.randint(len(inputs), (BATCH,), generator=generator).to(inputs.device)
        return (output(moved, inputs[chosen]).float() - targets[chosen]).square().sum(-1).mean()

    falling_adam(moved, [LEARNING_RATE * size for size in sizes], loss, steps, "error of the block")
    return [each.detach() for each in moved]
