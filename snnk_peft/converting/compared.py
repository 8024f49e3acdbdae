"""Comparison of the original and its conversion on held-out examples: answers, layer states, seconds, bytes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from snnk_peft.calibrating.answers import Answers, Comparison
from snnk_peft.calibrating.batches import model_inputs
from snnk_peft.layers.slots import real_tokens
from snnk_peft.planning.timing import clock
from snnk_peft.turns import taking_turns

ROUNDS = 7  # of timings


@torch.no_grad()
def compared(
    original: nn.Module, other: Callable[..., Any], batches: Sequence[Mapping[str, Any]], answers: Answers
) -> tuple[dict[str, float], list[dict[str, float]]]:
    """Compute the figures of `Comparison`, and for each layer the distance of its states from the original's.

    Args:
        original: the model.
        other: another model; or a function from its inputs to its outputs, without states.
        batches: held-out examples.
        answers: reader of both models' answers.

    Returns:
        The figures, including `distance`; and per layer, front to back, `error`, the squared difference of the states
        after it (residual and normalisation included) relative to their variance, and `psnr`, in dB, relative to their
        range. Without states, no layers.
    """
    comparison = Comparison(answers)
    sums: list[_States] = []
    asked = {"output_hidden_states": True} if isinstance(other, nn.Module) else {}
    for batch in batches:
        inputs = model_inputs(original, batch)
        expected, given = original(**inputs, **asked), other(**inputs, **asked)
        comparison.update(expected, given, inputs)
        states = [each.get("hidden_states") or () for each in (expected, given)]
        if not sums:
            sums = [_States() for _ in states[0][1:]]
        for layer, wanted, found in zip(sums, states[0][1:], states[1][1:], strict=False):
            layer.update(wanted, found, inputs.get("attention_mask"))
    return {**comparison.figures(), "distance": comparison.distance()}, [layer.figures() for layer in sums]


class _States:
    """Running sums over the tokens of one layer."""

    def __init__(self) -> None:
        self.missed = self.squares = self.count = 0.0
        self.total: Any = 0.0
        self.least, self.most = math.inf, -math.inf

    def update(self, wanted: torch.Tensor, found: torch.Tensor, mask: Any) -> None:
        wanted, found = (real_tokens(each, mask).double() for each in (wanted, found))
        self.missed += float((wanted - found).square().sum())
        self.squares += float(wanted.square().sum())
        self.total = self.total + wanted.sum(0)
        self.count += len(wanted)
        self.least, self.most = min(self.least, float(wanted.min())), max(self.most, float(wanted.max()))

    def figures(self) -> dict[str, float]:
        spread = self.squares - float(self.total.square().sum()) / self.count
        mean = self.missed / (self.count * len(self.total))
        return {
            "error": self.missed / spread if spread > 0 else 0.0,
            "psnr": 10 * math.log10((self.most - self.least) ** 2 / mean) if mean > 0 else math.inf,
        }


@torch.inference_mode()
def seconds(runs: Mapping[str, Callable[..., Any]], model: nn.Module, batch: Mapping[str, Any]) -> dict[str, float]:
    """Measure the minimum seconds of a forward pass of each model on one batch, taking turns.

    Args:
        runs: models, or functions of the same inputs.
        model: determines the device of the inputs.
        batch: the inputs.
    """
    inputs = model_inputs(model, batch)
    spent = taking_turns({name: partial(run, **inputs) for name, run in runs.items()}, range(-1, ROUNDS), clock(model))
    return {name: min(values) for name, values in spent.items()}


def size(model: nn.Module, stored: torch.dtype) -> dict[str, int]:
    """Return the number of parameters (including rows of feature maps, which are buffers) and the size in bytes."""
    tensors = {id(each): each for each in (*model.parameters(), *model.buffers()) if each.is_floating_point()}
    saved = {id(each): each for each in model.state_dict(keep_vars=True).values()}
    return {
        "parameters": sum(each.numel() for each in tensors.values()),
        "bytes": sum(
            each.numel() * (stored if each.is_floating_point() else each.dtype).itemsize for each in saved.values()
        ),
    }
