"""What can be done to one module of a model, as modules that receive the original as a function.

A slot's forward takes `base`, the original module (or a slot that already wraps it), and the original's inputs. Slots
hold the new parameters; the original stays where it is. `replaces` says that `base` is never called.

The parallel adapter needs three of them, because the FFN it stands beside is three modules: the expansion also emits
the adapter's features, the activation lets them pass, the contraction reads them out.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from snnk_peft.functional.at_hand import at_hand
from snnk_peft.layers.adapter import GatedReadout, SNNKAdapter
from snnk_peft.layers.feature_stage import FeatureStage
from snnk_peft.layers.kernel_attention import KernelAttention
from snnk_peft.layers.snnk_linear import SNNKLinear

Base = Callable[..., torch.Tensor]


class Slot(nn.Module):
    """Base class: changes what one module of the model computes."""

    replaces = False

    def forward(self, base: Base, x: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
        """The new output for input `x`; `base` computes the original one."""
        raise TypeError(f"{type(self).__name__} does not define forward()")


class Replace(Slot):
    """layer(x) instead of the original module and the activation behind it.

    Args:
        layer: the stand-in.
        activation: path in the model of the activation that the stand-in contains, or None.
        following: path in the model of the Linear that reads the output, or None; calibration measures errors behind
            it, bundling multiplies it in.
    """

    replaces = True

    def __init__(self, layer: SNNKLinear, activation: str | None = None, following: str | None = None):
        super().__init__()
        self.layer, self.activation, self.following = layer, activation, following

    def forward(self, base: Base, x: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
        """x (..., dim) -> (..., out)."""
        return self.layer(x)


class Bypass(Slot):
    """x instead of the original module: an activation that a replacement already contains."""

    replaces = True

    def forward(self, base: Base, x: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
        """x unchanged."""
        return x


class After(Slot):
    """adapter(original(x)): the sequential placement."""

    def __init__(self, adapter: SNNKAdapter):
        super().__init__()
        self.adapter = adapter

    def forward(self, base: Base, x: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
        """(..., dim) -> (..., dim)."""
        return self.adapter(base(x, *args, **kwargs))


class BesideLinear(Slot):
    """linear(x) + scaling · v ⊙ (Φ(x) Aᵀ): an adapter beside one Linear, where LoRA puts its two matrices.

    Args:
        stage: Φ.
        readout: holds A and v.
    """

    def __init__(self, stage: FeatureStage, readout: GatedReadout):
        super().__init__()
        self.stage, self.readout = stage, readout

    def forward(self, base: Base, x: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
        """x (..., dim) -> (..., out_dim)."""
        return self.readout(self.stage(x.to(self.readout.A.dtype)), base(x, *args, **kwargs))


class ParallelFeatures(Slot):
    """[expansion(x), Φ(x)]: the FFN's expansion also emits the features of an adapter beside the FFN."""

    def __init__(self, stage: FeatureStage):
        super().__init__()
        self.stage = stage

    def forward(self, base: Base, x: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
        """x (..., dim) -> (..., hidden + feature_dim)."""
        hidden = base(x, *args, **kwargs)
        features = self.stage(x.to(self.stage.feature_map.projection.dtype))
        return torch.cat((hidden, features.to(hidden.dtype)), -1)


class ParallelActivation(Slot):
    """[activation(h), Φ(x)]: the activation acts on the hidden units only.

    Args:
        width: number of hidden units; the adapter's features come behind them.
    """

    def __init__(self, width: int):
        super().__init__()
        self.width = width

    def forward(self, base: Base, x: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
        """(..., width + feature_dim) -> the same shape."""
        hidden = base(x[..., : self.width], *args, **kwargs)
        return torch.cat((hidden, x[..., self.width :]), -1)


class ParallelReadout(Slot):
    """contraction(h) + scaling · v ⊙ (Φ(x) Aᵀ).

    Args:
        readout: holds A and v; the features come from the `ParallelFeatures` slot, behind everything else.
    """

    def __init__(self, readout: GatedReadout):
        super().__init__()
        self.readout = readout

    def forward(self, base: Base, x: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
        """(..., width + feature_dim) -> (..., dim)."""
        features = self.readout.A.shape[1]
        return self.readout(x[..., -features:], base(x[..., :-features], *args, **kwargs))


class Attend(Slot):
    """Says which linear attention an attention module uses; attention/interface.py asks for it.

    Args:
        kernel: the linear attention.
    """

    def __init__(self, kernel: KernelAttention):
        super().__init__()
        self.kernel = kernel

    def forward(self, base: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The original's signature: the module itself calls the attention function."""
        return base(*args, **kwargs)


class Retrained(Slot):
    """A trainable copy instead of the original, where PEFT's modules_to_save would catch a wrong module as well.

    Args:
        module: the original.
    """

    replaces = True

    def __init__(self, module: nn.Module):
        super().__init__()
        with at_hand(module):
            self.module = copy.deepcopy(module)

    def forward(self, base: Base, x: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
        """The original's signature."""
        return self.module(x, *args, **kwargs)
