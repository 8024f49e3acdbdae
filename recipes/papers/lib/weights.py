"""Weights of the recipes' own networks: safetensors files, checked against the module before anything is copied."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from snnk_peft.errors import ConfigError


def read_tensors(file: str | Path, expected: str) -> dict[str, torch.Tensor]:
    """Read the tensors of a safetensors file; a ConfigError states what was `expected`."""
    try:
        return load_file(file)
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"{file}: cannot be read ({error}); expected {expected}") from error


def fill(model: nn.Module, tensors: Mapping[str, torch.Tensor], source: str) -> None:
    """Copy all tensors into the model; names and shapes must match.

    Raises:
        ConfigError: names are missing or unknown, or shapes differ; `source` names the origin of the tensors.
    """
    wanted = model.state_dict()
    # Batch counters are not always published; nothing depends on them.
    needed = {name for name in wanted if not name.endswith("num_batches_tracked")}
    faults = [f"{name} is missing" for name in needed - tensors.keys()]
    faults += [f"{name} is unknown" for name in tensors.keys() - wanted.keys()]
    faults += [
        f"{name} is {tuple(value.shape)}, expected {tuple(wanted[name].shape)}"
        for name, value in tensors.items()
        if name in wanted and value.shape != wanted[name].shape
    ]
    if faults:
        shown = "; ".join(sorted(faults)[:4])
        raise ConfigError(
            f"{source} does not fit {type(model).__name__}: {shown} ({len(faults)} in all); expected the weights of "
            "this network"
        )
    model.load_state_dict(tensors, strict=False)
