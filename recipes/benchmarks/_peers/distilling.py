"""Evenly spaced layers distilled towards the original's answers for some seconds (DistilBERT, Sanh et al. 2019).

The student keeps evenly spaced layers with their weights, and all else; its loss is KL(p ‖ p') to the original's
answers p. No labels. AdamW, weight decay 1e-4, a linear schedule over the seconds with a warm-up.
"""

from __future__ import annotations

import copy
import random
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from _peers.blocks import Batch, encoder_layers, model_inputs
from snnk_cli.teacher import logit_loss

WARMUP = 0.06  # share of the time


def distil(
    teacher: nn.Module,
    batches: Sequence[Batch],
    layers: int,
    seconds: float,
    *,
    seed: int = 0,
    rate: float = 1e-4,
    size: int = 32,
    clock: Callable[[], float] = time.perf_counter,
) -> nn.Module:
    """Return a copy of `teacher` with `layers` of its layers, distilled within `seconds` in total.

    Args:
        teacher: a classifier.
        batches: batches, whose labels are not read; split into batches of `size` and shuffled in every epoch.
        layers: number of layers to keep, including the first.
        seconds: time limit from the start of this call; at least one step is run.
        seed: seed of the order.
        rate: peak learning rate.
        size: sentences per step.
        clock: returns the current time in seconds.
    """
    start = clock()
    student: Any = copy.deepcopy(teacher)
    present = encoder_layers(student)
    kept = [present[at * len(present) // layers] for at in range(layers)]
    student.base_model.encoder.layer = nn.ModuleList(kept)
    student.config.num_hidden_layers = layers
    student.base_model.embeddings.requires_grad_(False)

    def loss(batch: Batch) -> torch.Tensor:
        given = model_inputs(batch)
        with torch.no_grad():
            wanted = teacher(**given).logits
        return logit_loss(wanted, student(**given).logits, 1.0)

    _train(student, batches, loss, seconds, start, seed=seed, rate=rate, size=size, clock=clock)
    return student.eval()


def _train(
    model: nn.Module,
    batches: Sequence[Batch],
    loss: Callable[[Batch], torch.Tensor],
    seconds: float,
    start: float,
    *,
    seed: int,
    rate: float,
    size: int,
    clock: Callable[[], float],
) -> None:
    """Train the parameters that require a gradient, until `seconds` after `start`.

    Args:
        model: model in any mode.
        batches: batches, which are split for `loss`.
        loss: computes the loss of a batch.
        seconds: time limit.
        start: clock time of the start.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=rate, weight_decay=1e-4)
    smaller = [dict(zip(batch, parts, strict=True)) for batch in batches for parts in _cut(batch, size)]
    order, spent, rng = [], 0.0, random.Random(seed)
    model.train()
    while spent < 1:
        order = order or rng.sample(range(len(smaller)), len(smaller))
        batch = smaller[order.pop()]
        spent = (clock() - start) / seconds
        for group in optimizer.param_groups:
            group["lr"] = rate * max(0.0, min(spent / WARMUP, (1 - spent) / (1 - WARMUP)))
        found = loss(batch)
        optimizer.zero_grad()
        found.backward()
        optimizer.step()


def _cut(batch: Batch, size: int) -> list[tuple[torch.Tensor, ...]]:
    return list(zip(*(tensor.split(size) for tensor in batch.values()), strict=True))
