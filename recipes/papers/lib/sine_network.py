"""A sine network for a function of a few coordinates (SIREN, Sitzmann et al. 2020): dense, SNNK or low-rank.

    h₀ = sin(ω₀ (W₀ x + b₀)),   h_i = sin(ω₀ (W_i h_{i−1} + b_i)),   y = W h + b

with W₀ uniform in ±1/inputs and all others in ±√(6/width)/ω₀, so that ω₀ W h has a standard deviation near one. In the
SNNK form (SNNK paper, 4.2) a hidden layer is h_i = A_i Φ(h_{i−1}) + a_i with random features Φ and trained A_i and a_i.
A_i starts at the best readout for the sine layer that it replaces ("nystrom"), at Φ(ω₀ W_i) as in the paper, or at
random. Sine features are odd: they give the odd part of a layer with biases; cos features give both parts.
In the low-rank form it is h_i = sin(ω₀ (U Vᵀ h_{i−1} + b_i)), and entries of V start uniform in ±√(3/width), so that
those of Vᵀ h are as large as those of h.

Shapes: coordinates (..., inputs) -> values (..., outputs).
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import nn

from papers.lib.mlp import equal_rank
from snnk_peft.feature_map import FeatureMapSpec
from snnk_peft.layers.feature_stage import FeatureStage
from snnk_peft.layers.snnk_linear import SNNKLinear

SPREAD = 0.5**0.5  # standard deviation of a sine whose argument varies by more than a period


class Fit(NamedTuple):
    """The part of an output that the training loop needs."""

    loss: torch.Tensor
    values: torch.Tensor


class Sine(nn.Module):
    """The layer sin(ω₀ (W x + b)).

    Args:
        inputs: length of x.
        outputs: rows of W.
        omega: ω₀.
        first: whether W reads the coordinates.
    """

    def __init__(self, inputs: int, outputs: int, omega: float, *, first: bool = False):
        super().__init__()
        self.linear, self.omega = nn.Linear(inputs, outputs), omega
        bound = 1 / inputs if first else math.sqrt(6 / inputs) / omega
        nn.init.uniform_(self.linear.weight, -bound, bound)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (..., inputs) to (..., outputs)."""
        return torch.sin(self.omega * self.linear(x))

    @torch.no_grad()
    def scaled(self) -> nn.Linear:
        """Return the argument of the sine as a Linear."""
        found = nn.Linear(self.linear.in_features, self.linear.out_features)
        found.weight.copy_(self.omega * self.linear.weight)
        found.bias.copy_(self.omega * self.linear.bias)
        return found


class SineNetwork(nn.Module):
    """The network described above.

    Args:
        inputs: number of coordinates.
        outputs: number of values.
        width: width of the hidden layers.
        hidden: number of width × width layers.
        omega: ω₀.
        snnk: fields of a FeatureMapSpec but `dim` (component, projection, num_features), and `init`; None is dense.
        layers: hidden layers, from 0, that become SNNK layers or get the rank; None for all.
        seed: seed of the features.
        rank: rank of the chosen layers, which then have no features; None for full rank.
    """

    def __init__(
        self,
        inputs: int,
        outputs: int,
        width: int,
        hidden: int,
        omega: float,
        snnk: dict[str, Any] | None = None,
        layers: list[int] | None = None,
        seed: int = 0,
        rank: int | None = None,
    ):
        super().__init__()
        chosen = range(hidden) if layers is None else layers
        parts: list[nn.Module] = [Sine(inputs, width, omega, first=True)]
        for index in range(hidden):
            layer = Sine(width, width, omega)
            if index not in chosen or (snnk is None and rank is None):
                parts.append(layer)
            elif rank is not None:
                parts.append(low_rank(width, rank, omega))
            else:
                parts.append(stand_in(layer, snnk, seed, index))
        last = nn.Linear(width, outputs)
        bound = math.sqrt(6 / width) / omega
        nn.init.uniform_(last.weight, -bound, bound)
        self.layers = nn.Sequential(*parts, last)

    @classmethod
    def of(cls, config: Any, inputs: int, outputs: int) -> SineNetwork:
        """Build from the sections `model` and `method` of a recipe's settings (papers/lib/layer_settings.py)."""
        model, method = config.model, config.method
        given: dict[str, Any] = {"snnk": method.snnk}
        if method.kind == "low_rank":
            given = {"rank": equal_rank(model.width, model.width, method.snnk["num_features"])}
        sizes = (model.width, model.hidden, model.omega)
        return cls(inputs, outputs, *sizes, layers=method.layers, seed=config.train.seed, **given)

    def forward(self, coordinates: torch.Tensor, values: torch.Tensor | None = None) -> Fit:
        """Return the values of the network, and their mean squared error if the target values are given."""
        found = self.layers(coordinates)
        loss = found.new_zeros(()) if values is None else (found - values).square().mean()
        return Fit(loss, found)


class PotentialNetwork(nn.Module):
    """V(x) = network(x) − network(0), with a loss from conservation of energy (lib/two_bodies.py).

    Args:
        network: network with one output.
    """

    def __init__(self, network: SineNetwork):
        super().__init__()
        self.network = network

    def potential(self, coordinates: torch.Tensor) -> torch.Tensor:
        """Map (n, inputs) to (n,)."""
        origin = torch.zeros_like(coordinates[:1])
        found: torch.Tensor = (self.network.layers(coordinates) - self.network.layers(origin)).squeeze(-1)
        return found

    def forward(self, coordinates: torch.Tensor, kinetic: torch.Tensor) -> Fit:
        """Return the variance of kinetic (n,) + V over the points, and V."""
        values = self.potential(coordinates)
        return Fit((kinetic + values).var(correction=0), values)


def stand_in(layer: Sine, snnk: dict[str, Any], seed: int, index: int) -> SNNKLinear:
    """Replace a hidden sine layer by an SNNK layer, whose inputs are values of sines."""
    fields = {key: value for key, value in snnk.items() if key != "init"}
    dim = layer.linear.in_features
    spec = FeatureMapSpec.from_dict({"seed": seed, "slot": f"hidden.{index}", **fields, "dim": dim})
    stage = FeatureStage(spec.build(), scale=1 / (SPREAD * dim**0.5))  # arguments of variance one
    generator = torch.Generator().manual_seed(seed + index)
    return SNNKLinear.from_linear(
        layer.scaled(),
        torch.sin,
        stage,
        init=snnk.get("init", "nystrom"),
        generator=generator,
        input_std=torch.full((dim,), SPREAD),
    )


def low_rank(width: int, rank: int, omega: float) -> nn.Sequential:
    """Return Vᵀ followed by a sine layer that reads it."""
    narrow = nn.Linear(width, rank, bias=False)
    bound = math.sqrt(3 / width)
    nn.init.uniform_(narrow.weight, -bound, bound)
    return nn.Sequential(narrow, Sine(rank, width, omega))


def derivatives(model: SineNetwork, coordinates: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute value, gradient and Laplacian of the first output at coordinates (n, inputs): (n,), (n, inputs), (n,)."""
    coordinates = coordinates.detach().clone().requires_grad_()
    values = model(coordinates).values[:, 0]
    (gradient,) = torch.autograd.grad(values.sum(), coordinates, create_graph=True)
    laplacian = torch.zeros_like(values)
    for axis in range(coordinates.shape[1]):
        (second,) = torch.autograd.grad(gradient[:, axis].sum(), coordinates, retain_graph=True)
        laplacian = laplacian + second[:, axis]
    return values.detach(), gradient.detach(), laplacian.detach()
