"""FFNs whose features are hidden units of the layer: all sizes fitted from one set of second moments.

The moments are most of the work, and do not depend on the size (solvers/landmarks.py); what `calibrate` finds for
the same inputs is the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch
from torch import nn

from snnk_peft.families.base import as_linear, unwrap
from snnk_peft.functional.at_hand import at_hand
from snnk_peft.parts.replaced.slots import Replace
from snnk_peft.solvers.landmarks import SecondMoments, choose_landmarks, fit_landmarks
from snnk_peft.solvers.ridge import DEFAULT_RIDGES
from snnk_peft.tuner.slot_layer import SlotLayer, active_module


class UnitChoice:
    """A stand-in for an FFN, as far as it is a choice of its hidden units.

    Args:
        root: the patched model.
        layer: the place, its slot in use.
    """

    def __init__(self, root: nn.Module, layer: SlotLayer):
        self.root, self.original = root, unwrap(layer.base_layer)
        self.slot = next((slot for slot in layer.active_slots() if isinstance(slot, Replace)), None)

    @property
    def possible(self) -> bool:
        """Whether features are chosen units of the layer under its own activation, which one Linear reads."""
        slot = self.slot
        if slot is None or slot.activation is None or slot.following is None:
            return False
        stage = slot.layer.stage
        component, z = stage.feature_map.component, torch.linspace(-6, 6, 97)
        if stage.append_input or not stage.feature_map.projection.selects_rows or not component.elementwise():
            return False
        z = z.to(slot.layer.A.device)
        return torch.allclose(component.function(z), self.activation(z), rtol=1e-5, atol=1e-6)

    @property
    def activation(self) -> Any:
        """Behind the expansion."""
        assert self.slot is not None
        return unwrap(self.root.get_submodule(str(self.slot.activation)))

    @cached_property
    def reader(self) -> torch.Tensor:
        """Weight of the contraction, (out, units)."""
        assert self.slot is not None
        found: Any = as_linear(active_module(self.root.get_submodule(str(self.slot.following))))
        with at_hand(found):
            weight: torch.Tensor = found.weight.detach()
        return weight

    def take(self, train: SecondMoments, held_out: SecondMoments) -> float:
        """Choose and fit; returns the error on held-out tokens."""
        assert self.slot is not None
        stand_in = self.slot.layer
        projection, linear = stand_in.stage.feature_map.projection, as_linear(self.original)
        assert isinstance(linear, nn.Linear)
        units = choose_landmarks(train, self.reader, projection.num_features)
        wanted = torch.zeros(stand_in.out_features, device=units.device).index_fill_(0, units, 1.0)
        with at_hand(linear):
            order = projection.select(linear.weight, linear.bias, wanted.to(linear.weight.device)).to(units.device)
        fit = fit_landmarks(train, held_out, order, self.reader, ridges=DEFAULT_RIDGES)
        stand_in.A.copy_(fit.weight * projection.num_features**0.5)  # the feature map divides by √m
        stand_in.bias.copy_(fit.bias)  # type: ignore[union-attr, arg-type]
        return fit.error


def fit_unit_choices(choices: Sequence[UnitChoice], calls: Any) -> list[float]:
    """Fit stand-ins of several sizes for one layer.

    Args:
        choices: all possible.
        calls: (is it held out?, calls of the expansion), batch by batch.

    Returns:
        Their errors on held-out tokens.
    """
    first = choices[0]
    moments = [SecondMoments(first.reader.shape[1]) for _ in range(2)]
    for held_out, batch in calls:
        for call in batch:
            moments[held_out].update(first.activation(first.original(call.real(call.args[0]))))
    return [choice.take(*moments) for choice in choices]
