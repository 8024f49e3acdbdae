"""Landmark rows: ω_i are rows of a pretrained weight matrix, c_i their biases (Nyström landmarks).

A feature relu(ω_i·x + c_i) at a landmark is one of the hidden units of the layer being replaced, so a readout fitted
on a few of them starts from features that the network itself found useful. Which rows: the most important first,
importance = output standard deviation × ‖column of the contraction‖, or ‖row‖ when nothing else is known.

num_features may not exceed the number of rows. Not drawn from a distribution, hence not unbiased: an approximation
error remains until num_features equals the number of rows.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from snnk_peft.errors import ConfigError
from snnk_peft.functional.at_hand import at_hand
from snnk_peft.projections import PROJECTIONS
from snnk_peft.projections.base import Projection


@PROJECTIONS.register("landmark")
class Landmark(Projection):
    """Rows of a given matrix.

    Args:
        source_weight: the pretrained (rows, dim) matrix, or None for zeros of the right shape to load a checkpoint
            into.
        source_bias: its biases (rows,), or None.
        importance: (rows,) scores; the `num_features` largest are taken, in the order of their row index.
        **kwargs: as in `Projection`.
    """

    formula = "rows of a pretrained weight, with its biases"
    source = "this package (SNNK conversion)"
    cost = "m·d"

    unbiased = False
    redrawable = False
    resamplable = False
    needs_layer = selects_rows = True
    layer_arguments = ("source_weight", "source_bias", "importance")

    def __init__(
        self,
        dim: int,
        num_features: int,
        *,
        source_weight: torch.Tensor | None = None,
        source_bias: torch.Tensor | None = None,
        importance: torch.Tensor | None = None,
        **kwargs: object,
    ):
        rows = 0 if source_weight is None else source_weight.shape[0]
        if source_weight is not None and source_weight.shape[1] != dim:
            raise ConfigError(f"landmark source_weight has shape {tuple(source_weight.shape)}; expected (rows, {dim})")
        if source_weight is not None and num_features > rows:
            raise ConfigError(f"landmark num_features is {num_features}; the pretrained weight has only {rows} rows")
        super().__init__(dim, num_features, **kwargs)  # type: ignore[arg-type]
        self.bias = torch.zeros(num_features, device="cpu")
        if source_weight is not None:
            scores = source_weight.norm(dim=1) if importance is None else importance
            self.select(source_weight, source_bias, scores)

    @classmethod
    def from_layer(
        cls, layer: nn.Linear, num_features: int, *, importance: torch.Tensor | None = None, **kwargs: Any
    ) -> Landmark:
        """Create rows of a layer and their biases; see `Projection.from_layer`."""
        with at_hand(layer):
            bias = None if layer.bias is None else layer.bias.detach()
            tensors = {"source_weight": layer.weight.detach(), "source_bias": bias, "importance": importance}
            return cls(layer.in_features, num_features, **tensors, **kwargs)

    def draw(self, generator: torch.Generator) -> torch.Tensor:
        """Return zeros: the rows are copied from the pretrained weight by `select`."""
        return torch.zeros(self.num_features, self.dim, device="cpu")

    @torch.no_grad()
    def select(self, weight: torch.Tensor, bias: torch.Tensor | None, importance: torch.Tensor) -> torch.Tensor:
        chosen = importance.topk(self.num_features).indices.sort().values
        self.weight = weight.detach()[chosen].to(self.weight.device, self.weight.dtype).clone()
        rows_bias = torch.zeros_like(weight[:, 0]) if bias is None else bias.detach()
        self.bias = rows_bias[chosen].to(self.weight.device, self.weight.dtype).clone()
        return chosen
