"""Every other layer, trained towards the original's answers (as DistilBERT begins, Sanh et al. 2019), for some seconds.

The student keeps layers at equal distances, with their weights, and all else; its loss is KL(p ‖ p') to the original's
answers p. No labels. Schedule and optimizer are those of `uptraining.py`.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from _peers.blocks import Batch, encoder_layers, model_inputs
from _peers.uptraining import train
from snnk_cli.teacher import logit_loss


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
    """A copy of `teacher` with so many of its layers, trained so that all of it takes `seconds`.

    Args:
        teacher: a classifier.
        batches: labels are not read; shuffled in every epoch, and cut into batches of `size`.
        layers: how many stay, the first among them.
        seconds: from the start of this call; one step at least.
        seed: of the order.
        rate: the highest learning rate.
        size: sentences of a step.
        clock: seconds now.
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

    train(student, batches, loss, seconds, start, seed=seed, rate=rate, size=size, clock=clock)
    return student.eval()
