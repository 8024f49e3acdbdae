"""A three-layer MLP whose second layer is dense, an SNNK layer or low-rank (SNNK paper, G.1.3 and H.5).

    h₁ = ReLU(W₁ x + b₁)        h₂ = ReLU(W₂ h₁ + b₂)  |  A Φ(h₁) + a  |  ReLU(U Vᵀ h₁ + b₂)        logits = W₃ h₂ + b₃

with dropout after h₁ and h₂. SNNK features of h₁ are random, scaled by d^−½; A is trained and later folded into W₃,
which leaves classes × features parameters for both layers. A low-rank layer gets the largest rank that has no more
parameters than the SNNK layer.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import nn

from snnk_peft.feature_map import FeatureMapSpec
from snnk_peft.layers.feature_stage import FeatureStage
from snnk_peft.layers.snnk_linear import SNNKLinear


class Scored(NamedTuple):
    """The part of an output that the training loop needs."""

    loss: torch.Tensor | None
    logits: torch.Tensor


class Perceptron(nn.Module):
    """The MLP described above.

    Args:
        columns: number of inputs.
        classes: number of outputs.
        width: width of h₁.
        second: width of h₂.
        dropout: dropout probability.
        snnk: fields of a FeatureMapSpec but `dim` (component, projection, num_features), and `init`; None for none.
        rank: rank of W₂ = U Vᵀ; None for none. Without `snnk` and `rank` the layer is dense.
        seed: seed of the features.
    """

    def __init__(
        self,
        columns: int,
        classes: int,
        width: int,
        second: int,
        dropout: float,
        snnk: dict[str, Any] | None = None,
        rank: int | None = None,
        seed: int = 0,
    ):
        super().__init__()
        self.first, self.last = nn.Linear(columns, width), nn.Linear(second, classes)
        self.dropout = nn.Dropout(dropout)
        dense = nn.Linear(width, second)
        if rank is not None:
            self.second: nn.Module = nn.Sequential(
                nn.Linear(width, rank, bias=False), nn.Linear(rank, second), nn.ReLU()
            )
        elif snnk is not None:
            self.second = snnk_layer(dense, snnk, seed)
        else:
            self.second = nn.Sequential(dense, nn.ReLU())

    def forward(self, values: torch.Tensor, labels: torch.Tensor | None = None) -> Scored:
        """Return logits (batch, classes), and their cross-entropy if labels are given."""
        hidden = self.dropout(torch.relu(self.first(values)))
        logits = self.last(self.dropout(self.second(hidden)))
        return Scored(None if labels is None else nn.functional.cross_entropy(logits, labels), logits)

    @torch.no_grad()
    def bundled(self) -> Perceptron:
        """Return the network with A multiplied into W₃; without an SNNK layer, itself."""
        if not isinstance(self.second, SNNKLinear):
            return self
        stage, last = self.second.fold(following=self.last)
        found = Perceptron.__new__(Perceptron)
        nn.Module.__init__(found)
        found.first, found.second, found.last, found.dropout = self.first, stage, last, nn.Dropout(0.0)
        return found.eval()


def snnk_layer(dense: nn.Linear, snnk: dict[str, Any], seed: int) -> SNNKLinear:
    """Replace a layer and its ReLU by features; with init "nystrom", A is fitted for standard normal inputs."""
    fields = {key: value for key, value in snnk.items() if key != "init"}
    width = dense.in_features
    spec = FeatureMapSpec.from_dict({"seed": seed, "slot": "second", **fields, "dim": width})
    stage = FeatureStage(spec.build(), scale=width**-0.5)
    generator = torch.Generator().manual_seed(seed)
    return SNNKLinear.from_linear(dense, torch.relu, stage, init=snnk.get("init", "nystrom"), generator=generator)


def equal_rank(width: int, second: int, features: int) -> int:
    """Return the largest rank r with r (width + second) <= features · second, at least 1."""
    return max(1, features * second // (width + second))
