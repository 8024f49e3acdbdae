"""What folding leaves that torch has no module for: the plain forms of adapters.

    BundledAdapter   x + Φ(x) Mᵀ           a sequential adapter, gate and scaling multiplied into M
    Beside           [module(x), Φ(x)]     features of an adapter beside the FFN, emitted by what they stand beside
    Leading          [module(h), z]        for x = [h, z]: a module that acts on the first entries only

Part of the code file of every bundle. Shapes: x (..., dim).
"""

from __future__ import annotations

import torch
from torch import nn

from snnk_peft.layers.feature_stage import FeatureStage


class BundledAdapter(nn.Module):
    """x + Φ(x) Mᵀ: an adapter whose gate and scaling are multiplied into one matrix.

    Args:
        stage: the features, over inputs of length dim.
        linear: M, (dim, feature_dim), without bias.
    """

    def __init__(self, stage: FeatureStage, linear: nn.Linear):
        super().__init__()
        self.stage, self.linear = stage, linear

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(..., dim) -> (..., dim)."""
        # Called, and not multiplied with its weight: the Linear may be offloaded, adapted or exchanged by now.
        return x + self.linear(self.stage(x)).to(x.dtype)


class Beside(nn.Module):
    """[module(x), Φ(x)]: the features of a parallel adapter, emitted by the module it stands beside."""

    def __init__(self, module: nn.Module, stage: FeatureStage):
        super().__init__()
        self.module, self.stage = module, stage

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(..., dim) -> (..., out + feature_dim)."""
        return torch.cat((self.module(x), self.stage(x)), -1)


class Leading(nn.Module):
    """[module(h), z] for x = [h, z] with h of length `width`."""

    def __init__(self, module: nn.Module, width: int):
        super().__init__()
        self.module, self.width = module, width

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(..., width + rest) -> the same shape."""
        return torch.cat((self.module(x[..., : self.width]), x[..., self.width :]), -1)
