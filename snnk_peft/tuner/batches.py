"""The batches of `calibrate` and `fit_attention`: read again and again, some of them held out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from snnk_peft.calibration.reduce import global_index
from snnk_peft.errors import ConfigError
from snnk_peft.functional.at_hand import place_of

Batch = Mapping[str, Any]
Batches = Iterable[Batch] | Callable[[], Iterable[Batch]]


def read(batches: Batches) -> Iterator[Batch]:
    """The batches once more."""
    return iter(batches() if callable(batches) else batches)


def is_held_out(index: int, fraction: float) -> bool:
    """Spread the held-out batches evenly: whenever the running count of index·fraction passes a half.

    Counted over all processes, which take turns: the choice does not depend on how many there are.
    """
    index = global_index(index)
    return int((index + 1) * fraction + 0.5) > int(index * fraction + 0.5)


def count_batches(batches: Batches, held_out: float) -> tuple[int, int]:
    """How many there are, and how many of them are fitted; ConfigError for what can be read only once."""
    if not callable(batches) and iter(batches) is batches:
        raise ConfigError(
            f"batches is a {type(batches).__name__}, which can be read only once; expected a list, a DataLoader, or a "
            "function that returns a fresh iterator"
        )
    total = sum(1 for _ in read(batches))
    return total, sum(not is_held_out(index, held_out) for index in range(total))


def model_inputs(model: nn.Module, batch: Batch) -> dict[str, Any]:
    """What a batch gives the model: no labels, on its device."""
    device = place_of(model)
    return {
        key: value.to(device) if isinstance(value, torch.Tensor) else value
        for key, value in batch.items()
        if key not in ("label", "labels")
    }
