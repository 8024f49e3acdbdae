"""Key heads that keep softmax while others do not: how they are split and joined, and what a cache holds of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from snnk_peft.functional.rounded import Rounded, restored, rounded

Heads = tuple[Tensor, Tensor, Tensor]  # queries, keys and values of some heads


def split_heads(q: Tensor, k: Tensor, v: Tensor, full: Sequence[int]) -> tuple[Heads, Heads]:
    """Split queries (B, H, L, d), keys and values (B, G, N, ·) into those of the key heads `full` and the others."""
    grouped = q.unflatten(1, (k.shape[1], -1))
    others = [head for head in range(k.shape[1]) if head not in full]
    first, second = (
        (_heads(grouped, own).flatten(1, 2), _heads(k, own), _heads(v, own)) for own in (list(full), others)
    )
    return first, second


def _heads(x: Tensor, chosen: Sequence[int]) -> Tensor:
    """Return x[:, chosen]; faster for the few heads of one token."""
    return torch.cat([x[:, head : head + 1] for head in chosen], 1) if len(chosen) > 1 else x[:, chosen]


def joined_heads(whole: Tensor, rest: Tensor, full: Sequence[int]) -> Tensor:
    """Join the results of the heads `full` and the others, (B, ·, L, D), in the order of the layer's heads."""
    repeats = whole.shape[1] // len(full)
    both = torch.cat((whole, rest.to(whole.dtype)), 1).unflatten(1, (-1, repeats))
    order = [*full, *(head for head in range(both.shape[1]) if head not in full)]
    return both[:, [order.index(head) for head in range(len(order))]].flatten(1, 2)


class Stored(NamedTuple):
    """Keys or values (B, F, t, d) of full heads, unchanged or rounded."""

    whole: Tensor | None
    rounded: Rounded | None

    @classmethod
    def of(cls, x: Tensor, bits: int | None) -> Stored:
        return cls(x, None) if bits is None else cls(None, rounded(x, bits))

    def and_then(self, other: Stored) -> Stored:
        if self.rounded is not None and other.rounded is not None:
            return Stored(None, self.rounded.and_then(other.rounded))
        assert self.whole is not None
        assert other.whole is not None
        return Stored(torch.cat((self.whole, other.whole), -2), None)

    def read(self, bits: int | None, dtype: torch.dtype) -> Tensor:
        if self.rounded is None or bits is None:
            assert self.whole is not None
            return self.whole
        return restored(self.rounded, bits, dtype)
