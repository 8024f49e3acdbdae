"""A part for a share of a decoder's cache: which heads keep all keys, and how wide the windows of the others are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import nn

from snnk_peft.arguments import number_faults
from snnk_peft.calibrating.batches import Batch
from snnk_peft.errors import ConfigError
from snnk_peft.families.base import head_sizes
from snnk_peft.parts.attention.part import AttentionPart
from snnk_peft.planning.full_heads import decoder_family, head_needs, token_rows

FEATURES = 16  # features of each query head in `cache_part`
FULL = 1 / 8  # share of the key heads in `cache_part`, before windows become wider than the narrowest
NARROWEST, WIDEST = 64, 256
SINKS = 4


def cache_part(
    model: nn.Module, batches: Sequence[Batch], share: float, *, seed: int = 0, progress: bool = True
) -> AttentionPart:
    """Return a part that keeps a share of a decoder's cache: a few full heads; window, sinks and features elsewhere.

    Windows are wider than 64 tokens only if an eighth of the heads can be full as well.

    Args:
        model, batches, seed, progress: as in `choose_full_heads`.
        share: share of the bytes of keys and values in half precision after the longest text that the model reads, in
            (0, 1).

    Raises:
        ConfigError: a share that window, sinks and features alone exceed; and as for `choose_full_heads`.
    """
    family = decoder_family(model)
    config: Any = family.config_of(model)
    if faults := number_faults("cache", share, above=0, below=1):
        raise ConfigError(faults)
    longest = max(map(len, token_rows(batches)))
    length, layers = getattr(config, "max_position_embeddings", None) or longest, len(family.layer_paths(model))
    heads, groups, dim = head_sizes(config)
    token = 2 * dim * 2  # bytes of a key and a value in half precision
    sums = FEATURES * (heads // groups) * (dim + 1) * 4  # bytes of a head that does not keep all keys, in fp32
    whole = length * 2 * (dim + 4)  # a byte per number, plus minimum and step of each vector
    every = layers * groups
    full = int(FULL * every)
    width = int(((share * length * token * every - full * whole) / (every - full) - sums) / token) - SINKS
    width = max(NARROWEST, min(WIDEST, longest // 4, width))
    least = (width + SINKS) * token + sums
    # Bytes of a layer with 0, 1, ... full heads; one whose heads are all full stays as it was.
    costs = [n * whole + (groups - n) * least for n in range(groups)] + [groups * length * token]
    if not costs[0] < share * costs[-1]:
        raise ConfigError(
            f"cache is {share}; window, sinks and features of every head take {costs[0] / costs[-1]:.3f} of the keys "
            f"and values of {length} tokens. Expected more"
        )
    needs = head_needs(model, batches, near_field=width, sinks=SINKS, seed=seed, progress=progress)
    return AttentionPart(
        component="mixture",
        projection="centroids",
        num_features=FEATURES,
        near_field=width,
        near_field_normalisation="joint",
        sinks=SINKS,
        position_free=True,
        refit_output=False,
        full_heads=within_bytes(layers * (share * costs[-1] - costs[0]), needs.tolist(), costs),
        cache_bits=8,
    )


def within_bytes(room: float, needs: Sequence[Sequence[float]], costs: Sequence[int]) -> list[list[int]]:
    """Return pairs [layer, head], those with the greatest need per byte first, as many as there is room for.

    Args:
        room: bytes, beyond those of layers without full heads.
        needs: needs of each layer's heads.
        costs: bytes of a layer with 0, 1, ... full heads.
    """
    chosen: list[list[int]] = []
    prices = np.diff(costs)
    waiting = [sorted(range(len(own)), key=own.__getitem__, reverse=True)[::-1] for own in needs]
    while True:
        found = []
        for layer, heads in enumerate(waiting):
            if heads and (price := float(prices[-len(heads)])) <= room:
                found.append((needs[layer][heads[-1]] / max(price, 1.0), -layer, price))
        if not found:
            return chosen
        _, layer, price = max(found)
        chosen.append([-layer, waiting[-layer].pop()])
        room -= price
