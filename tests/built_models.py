"""Patched models with inputs, for tests of what runs behind the seam of `functional/backend.py`."""

from __future__ import annotations

from typing import Any

import torch

from snnk_peft import SNNKConfig, get_snnk_model
from tests.attention_models import causal_model, left_padded, sharpened
from tests.tiny_models import inputs_for, trained


def built(family: str, parts: dict[str, Any]) -> tuple[Any, dict[str, torch.Tensor]]:
    """A patched model that is as if trained, and inputs for it."""
    model = sharpened("bert") if family == "bert" else causal_model(family)
    inputs = inputs_for(model) if family == "bert" else {**left_padded(), "use_cache": False}
    return trained(get_snnk_model(model, SNNKConfig(**parts, modules_to_save=[])), 0.1).eval(), inputs
