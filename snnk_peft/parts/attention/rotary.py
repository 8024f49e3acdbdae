"""The rotary positions of a model: the angle per token by which its queries and keys are rotated."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from snnk_peft.errors import UnsupportedError
from snnk_peft.families.base import ModelFamily
from snnk_peft.functional.rotary import Rotary

STRETCHED = ("dynamic", "longrope")  # whose angles change with the length of the text


def rotary_of(model: nn.Module, family: ModelFamily, distance: int, where: str) -> Rotary | None:
    """Return the inverse rotation; None for a model without rotary positions.

    Raises:
        UnsupportedError: the model's rotation of queries and keys is unknown, or depends on layer or length.
    """
    found: dict[str, torch.Tensor] = {
        name: tensor
        for name, tensor in model.named_buffers()
        if name.endswith("inv_freq") and not name.endswith("original_inv_freq")
    }
    if not found and not family.rotary:
        return None
    config: Any = family.config_of(model)
    told: Any = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    kind = told.get("rope_type", "default")
    first = next(iter(found.values()), None)
    alike = all(first is not None and each.shape == first.shape and _equal(each, first) for each in found.values())
    plain = [name for name in found if name.rpartition(".")[2] == "inv_freq"]
    if not family.rotary or first is None or not alike or len(plain) < len(found) or kind in STRETCHED:
        raise UnsupportedError(
            f"{where} is True; of {type(model).__name__} (family {family.name!r}, rope_type {kind!r}) it is not known "
            "by which angles queries and keys are turned, or these differ from layer to layer or with the length. "
            "Leave position_free out, or, if it turns halves of a head as Llama does, describe the family with "
            "rotary=True"
        )
    numbers = torch.zeros_like(first, device="cpu") if first.device.type == "meta" else first
    return Rotary(numbers.double().tolist(), distance)


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.device.type == "meta" or torch.equal(one, other.to(one.device))
