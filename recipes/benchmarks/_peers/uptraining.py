"""FFN expansions replaced as the paper replaces them, then trained on labels (SNNK paper, 4.4 and J.4).

Expansion and activation become Φ(x) Aᵀ with A = Φ(W), from the weights alone, which is a start and no approximation.
Then all layers, without what was replaced and without the embeddings, are trained on the task: AdamW, weight decay
1e-4, a linear schedule with a warm-up of 6 % (H.6). The schedule runs over seconds instead of steps, so that training
ends when its time is spent. Bundled afterwards, as there.
"""

from __future__ import annotations

import copy
import random
import time
from collections.abc import Callable, Sequence

import torch
from torch import nn

from _peers.blocks import Batch, model_inputs
from snnk_peft import FFNPart, SNNKConfig, bundle, get_snnk_model

WARMUP = 0.06  # of the time


def uptrain(
    teacher: nn.Module,
    batches: Sequence[Batch],
    features: int,
    seconds: float,
    *,
    seed: int = 0,
    rate: float = 3e-4,
    size: int = 32,
    clock: Callable[[], float] = time.perf_counter,
) -> nn.Module:
    """A bundled copy of `teacher` whose FFNs have `features` features, trained so that all of it takes `seconds`.

    Args:
        teacher: a classifier.
        batches: with labels; they are shuffled in every epoch, and each is cut into batches of `size`.
        features: of each FFN.
        seconds: from the start of this call; training gets what the conversion leaves, one step at least.
        seed: of features and order.
        rate: the highest learning rate.
        size: sentences of a step.
        clock: seconds now; asked once before and once in every step.
    """
    start = clock()
    part = FFNPart(component="gelu", projection="orf", num_features=features, init="paper")
    config = SNNKConfig(parts=[part], modules_to_save=[], seed=seed)
    model = get_snnk_model(copy.deepcopy(teacher), config)
    for name, parameter in model.named_parameters():
        # The original expansion is still there and not used; steps that change 30,522 embeddings would be fewer.
        parameter.requires_grad_("base_layer" not in name and "embeddings" not in name)

    def loss(batch: Batch) -> torch.Tensor:
        return nn.functional.cross_entropy(model(**model_inputs(batch)).logits, batch["labels"])

    train(model, batches, loss, seconds, start, seed=seed, rate=rate, size=size, clock=clock)
    return bundle(model.eval()).eval()


def train(
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
    """Train what requires a gradient, until `seconds` after `start`; the rest is as in `uptrain`.

    Args:
        model: in eval mode or not.
        batches: given to `loss` in smaller ones.
        loss: of a batch.
        seconds: to spend.
        start: what the clock said.
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
