"""Rows of a feature map moved by gradient descent, where a closed form has put the best readout for those it chose.

    minimise  E ‖z − B φ_W(x) − b‖²   over W, B and b,

with z what the network reads of the original, by Adam on minibatches drawn at random. B and b begin at the closed form
and are thrown away in the end: whoever calls this solves for the readout once more, on all tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.func import functional_call

from snnk_peft.solvers.adam import falling_adam

LEARNING_RATE = 0.03  # of the first step, times the root mean square of what is moved
BATCH = 1024


def descend(
    stage: nn.Module,
    moved: Sequence[str],
    readout: tuple[Tensor, Tensor],
    inputs: Tensor,
    targets: Tensor,
    steps: int,
    generator: torch.Generator,
) -> None:
    """Move the named tensors of `stage`, in place; the learning rate falls linearly to zero.

    Args:
        stage: the features φ, called with (n, dim), gives (n, m).
        moved: names of its parameters and buffers that are learned; all others stay.
        readout: B (o, m) and b (o,) to begin with.
        inputs: (n, dim).
        targets: z (n, o).
        steps: how many, one minibatch each.
        generator: draws the minibatches, on the CPU.

    Raises:
        NumericalError: the loss is no longer finite; `stage` is as it was.
    """
    named = {**dict(stage.named_parameters()), **dict(stage.named_buffers())}
    tensors = {name: named[name].detach().float().clone().requires_grad_() for name in moved}
    weight, bias = (each.detach().float().clone().requires_grad_() for each in readout)
    learned = [*tensors.values(), weight, bias]

    def loss() -> Tensor:
        chosen = torch.randint(len(inputs), (BATCH,), generator=generator).to(inputs.device)
        features = functional_call(stage, tensors, (inputs[chosen].float(),))
        return (nn.functional.linear(features, weight, bias) - targets[chosen]).square().sum(-1).mean()

    rates = [LEARNING_RATE * _size(each) for each in learned]
    falling_adam(learned, rates, loss, steps, "error of the features")
    with torch.no_grad():
        for name, tensor in tensors.items():
            named[name].copy_(tensor)


def _size(tensor: Tensor) -> float:
    """Root mean square, so that a step means the same for tensors of any scale; 1 for zeros."""
    return float(tensor.detach().square().mean().sqrt()) or 1.0
