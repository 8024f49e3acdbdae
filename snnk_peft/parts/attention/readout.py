"""The output projection, which is fitted with attention over `centroids` and is then part of the adapter."""

from __future__ import annotations

import copy

import torch
from torch import nn

from snnk_peft.functional.at_hand import at_hand
from snnk_peft.functional.precision import as_a_linear
from snnk_peft.layers.slots import (
    Base,
    FoldPlace,
    Slot,
    no_folded_form,
)
from snnk_peft.layers.snnk_linear import plain_linear


class ReadHeads(Slot):
    """The output projection, with its own weight and bias.

    Args:
        linear: the original.
    """

    replaces = True

    def __init__(self, linear: nn.Linear):
        super().__init__()
        with at_hand(linear):
            self.linear = copy.deepcopy(linear)

    def forward(self, base: Base, x: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
        """x (..., heads·d) -> (..., out); PEFT keeps what is trained in fp32, also in a model of half precision."""
        return as_a_linear(self.linear(x.to(self.linear.weight.dtype)), x)

    def take(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        """Overwrite weight and bias, from any dtype."""
        with torch.no_grad():
            self.linear.weight.copy_(weight)
            if self.linear.bias is not None and bias is not None:
                self.linear.bias.copy_(bias)

    def fold(self, place: FoldPlace) -> None:
        if any(slot is not self for slot in place.slots):
            raise no_folded_form(place, self)
        place.put(plain_linear(self.linear.weight, self.linear.bias))


class HeadsReader:
    """The output projection of a layer: its path and its slot.

    Args:
        path: in the model.
        source: the original.
    """

    def __init__(self, path: str, source: nn.Linear):
        self.path = path
        self._source: nn.Linear | None = source
        self._slot: ReadHeads | None = None

    def slot(self) -> ReadHeads:
        """Return the slot, created on the first call."""
        if self._slot is None:
            assert self._source is not None
            self._slot, self._source = ReadHeads(self._source), None  # a copy of the model copies no original
        return self._slot
