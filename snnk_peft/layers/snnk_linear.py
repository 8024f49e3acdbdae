"""SNNKLinear: f(Wx + b) replaced by Φ(x) Aᵀ + bias (SNNK paper, section 3).

Shapes: x (..., dim) -> (..., out_features); A (out_features, stage.out_dim). Cost per vector m·dim + m·out instead of
dim·out. A is trained, computed in closed form from the pretrained weights (`init`), or fitted to data (`calibrate`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from snnk_peft.errors import ConfigError
from snnk_peft.functional.at_hand import at_hand
from snnk_peft.functional.precision import as_a_linear
from snnk_peft.functional.random_numbers import normal_numbers
from snnk_peft.layers.feature_stage import FeatureStage
from snnk_peft.solvers.nystrom import nystrom_readout

Activation = Callable[[torch.Tensor], torch.Tensor]


class SNNKLinear(nn.Module):
    """A feature stage followed by one trainable matrix, (..., dim) -> (..., out_features)."""

    def __init__(self, stage: FeatureStage, out_features: int, *, bias: bool = True):
        super().__init__()
        self.stage = stage
        self.out_features = out_features
        self.A = nn.Parameter(torch.zeros(out_features, stage.out_dim))
        self.bias = nn.Parameter(torch.zeros(out_features)) if bias else None

    @classmethod
    def from_linear(
        cls,
        linear: nn.Linear,
        activation: Activation,
        stage: FeatureStage,
        *,
        init: str = "nystrom",
        generator: torch.Generator | None = None,
        input_mean: torch.Tensor | None = None,
        input_std: torch.Tensor | None = None,
    ) -> SNNKLinear:
        """Build the replacement of activation(linear(x)).

        Args:
            linear: the pretrained layer, weight (out, dim).
            activation: the function after it.
            stage: the features to use.
            init: "nystrom": the best readout for inputs N(input_mean, diag(input_std²)), from the weights alone.
                "paper": A = Φ(W), the paper's initialisation, which does not approximate the layer. "random": A ~ N(0,
                1/feature_dim).
            generator: random generator for init="random".
            input_mean: (dim,) mean of the inputs for "nystrom"; 0 if None. A preceding LayerNorm's bias.
            input_std: (dim,) standard deviation of the inputs; 1 if None. A preceding LayerNorm's weight.

        Raises:
            ConfigError: an unknown `init`.
        """
        layer = cls(stage, linear.out_features)
        if layer.A.is_meta or stage.feature_map.projection.is_blank():
            return layer  # a loader fills in all of it
        with at_hand(linear):
            weight = linear.weight.detach().float().cpu()
            bias = None if linear.bias is None else linear.bias.detach().float().cpu()
        features = stage.feature_map.feature_dim
        with torch.no_grad():
            if init == "nystrom":
                A, offset = layer._nystrom(weight, bias, activation, input_mean, input_std)
                layer.A[:, : A.shape[1]].copy_(A)
                layer.bias.copy_(offset)  # type: ignore[union-attr]
            elif init == "paper":
                layer.A[:, :features].copy_(stage.feature_map.psi(weight * stage.scale).dense())
            elif init == "random":
                layer.A.copy_(normal_numbers(*layer.A.shape, generator=generator) * features**-0.5)
            else:
                raise ConfigError(f"init is {init!r}; expected 'nystrom', 'paper' or 'random'")
        return layer

    def _nystrom(
        self,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        activation: Activation,
        input_mean: torch.Tensor | None,
        input_std: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        projection, component = self.stage.feature_map.projection, self.stage.feature_map.component
        rows, row_bias = self.stage.preactivation()
        readout = nystrom_readout(
            weight,
            bias,
            activation,
            rows.float().cpu(),
            None if row_bias is None else row_bias.float().cpu(),
            component.function,
            feature_scale=projection.amplitudes(),
            input_mean=input_mean,
            input_std=input_std,
        )
        offset = torch.zeros(weight.shape[0]) if readout.bias is None else readout.bias
        return readout.weight, offset

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map x (..., dim) -> (..., out_features), in the dtype of x, or the one that autocast gives a Linear."""
        return as_a_linear(nn.functional.linear(self.stage(x.to(self.A.dtype)), self.A, self.bias), x)

    @torch.no_grad()
    def fold(self, following: nn.Linear | None = None) -> tuple[FeatureStage, nn.Linear]:
        """Return the plain modules that this layer folds to: its stage, and one Linear; W̄ = W₂ A (Eq. 14) with
        `following`."""
        stage = self.stage.simplified()
        if following is None:
            return stage, plain_linear(self.A, self.bias)
        return stage, plain_linear(*fold_linear(self.A, self.bias, following.weight, following.bias))


def plain_linear(weight: torch.Tensor, bias: torch.Tensor | None) -> nn.Linear:
    """Return an nn.Linear with copies of these tensors."""
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    linear.weight = nn.Parameter(weight.detach().clone())
    if bias is not None:
        linear.bias = nn.Parameter(bias.detach().clone())
    return linear


class Affine(NamedTuple):
    """The affine map x -> x Wᵀ + b, as computed by nn.Linear.

    Attributes:
        weight: (out, in).
        bias: (out,) or None.
    """

    weight: Tensor
    bias: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        return torch.nn.functional.linear(x, self.weight, self.bias)


def fold_linear(A: Tensor, bias_A: Tensor | None, W2: Tensor, b2: Tensor | None) -> Affine:
    """Return one affine map equal to (A, bias_A) followed by (W2, b2): W2 A (o, m) and W2 bias_A + b2 (o,), None
    without biases.

    Computed in fp64 and rounded to the wider of the two weights' dtypes. Smaller than the pair unless l < o m/(o + m).

    Args:
        A: (l, m) readout of a feature map with m features.
        bias_A: (l,) or None.
        W2: (o, l) weight of the following Linear, with only the identity (or dropout in eval) in between.
        b2: (o,) or None.

    Raises:
        ConfigError: A's rows do not match W2's columns.
    """
    if A.ndim != 2 or W2.ndim != 2 or A.shape[0] != W2.shape[1]:
        raise ConfigError(
            f"cannot fold a readout of shape {tuple(A.shape)} into a weight of shape {tuple(W2.shape)}; "
            "expected (l, m) and (o, l) with the same l"
        )
    dtype = torch.promote_types(A.dtype, W2.dtype)
    wide = W2.double()
    bias = None if bias_A is None else wide @ bias_A.double()
    if b2 is not None:
        bias = b2.double() if bias is None else bias + b2.double()
    return Affine((wide @ A.double()).to(dtype), None if bias is None else bias.to(dtype))
