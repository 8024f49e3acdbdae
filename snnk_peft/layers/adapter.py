"""Adapters, as one computation for training and for bundles.

    SNNKAdapter   r + Φ(x) Mᵀ            r = x after a module, its output beside one (SNNK paper, Eq. 22 and App. D)
    beside        [module(x), Φ(x)]      features of an adapter beside the FFN, emitted by what they stand beside
    leading       [module(h), z]         for x = [h, z]: a module that acts on the first entries only

A slot is given its module with each call; `Beside` and `Leading`, which folding leaves, hold theirs. Part of the code
file of every bundle. Shapes: x (..., dim).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from snnk_peft.layers.feature_stage import FeatureStage


class SNNKAdapter(nn.Module):
    """The adapter r + Φ(x) Mᵀ, with a residual r.

    Args:
        stage: Φ, over inputs of length dim.
        readout: M (out_dim, feature_dim): a `GatedReadout`, to be trained, or the Linear without bias that it folds to.
    """

    linear: Any  # one of the two: the names of the tensors in bundles and in adapters
    readout: Any

    def __init__(self, stage: FeatureStage, readout: nn.Module):
        super().__init__()
        self.stage = stage
        self.folded = isinstance(readout, nn.Linear)
        self.add_module("linear" if self.folded else "readout", readout)

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """r + Φ(x) Mᵀ, (..., out_dim), in the dtype of r.

        Args:
            x: (..., dim).
            residual: r (..., out_dim); None for x itself.
        """
        residual = x if residual is None else residual
        if self.folded:
            # Called, and not multiplied with its weight: the Linear may be offloaded, adapted or exchanged by now.
            added: torch.Tensor = self.linear(self.stage(x))
            return residual + added.to(residual.dtype)
        summed: torch.Tensor | None = None
        if hasattr(type(self.readout), "step"):  # FSDP may have wrapped it
            summed = self.readout.step(self.stage, x, residual)
        if summed is None:
            summed = self.readout(self.stage(x.to(self.readout.A.dtype)), residual)
        return summed


def beside(
    module: Callable[..., torch.Tensor], stage: FeatureStage, x: torch.Tensor, *args: object, **kwargs: object
) -> torch.Tensor:
    """[module(x), Φ(x)]: (..., dim) -> (..., out + feature_dim), in the dtype of the module's output."""
    out = module(x, *args, **kwargs)
    features = stage(x.to(stage.feature_map.projection.dtype))
    return torch.cat((out, features.to(out.dtype)), -1)


def leading(
    module: Callable[..., torch.Tensor], width: int, x: torch.Tensor, *args: object, **kwargs: object
) -> torch.Tensor:
    """[module(h), z] for x = [h, z] with h of length `width`: (..., width + rest) -> the same shape."""
    return torch.cat((module(x[..., :width], *args, **kwargs), x[..., width:]), -1)


class Beside(nn.Module):
    """`beside`, of a module that it holds."""

    def __init__(self, module: nn.Module, stage: FeatureStage):
        super().__init__()
        self.module, self.stage = module, stage

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(..., dim) -> (..., out + feature_dim)."""
        return beside(self.module, self.stage, x)


class Leading(nn.Module):
    """`leading`, of a module that it holds."""

    def __init__(self, module: nn.Module, width: int):
        super().__init__()
        self.module, self.width = module, width

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(..., width + rest) -> the same shape."""
        return leading(self.module, self.width, x)
