"""Rows generated from noise by a small network (Learning the Transformer Kernel, Eqs. 7, 8, 11).

    ω = skip ⊙ n + gain ⊙ tanh(g(n)),  n ~ N(0, I) saved noise
    g: four times [linear, batch normalisation over the rows, LeakyReLU], then a linear layer; all of width dim

The paper's generator is the case skip = 0, gain = 1. Here both are learned vectors, initially skip = 1 and gain = 1,
and the last linear layer is initially zero: ω is then exactly the noise, and the kernel the one that is replaced.
(So in the first step only skip and the last layer have gradients; after it all do.) The paper's tanh alone would keep
every entry of W within ±1.

The normalisation always uses the mean and variance of the num_features rows themselves. They all exist in eval too,
so running averages are not needed, W in eval is the W that was trained, and a forward pass changes nothing.

Cost: as gaussian, plus forming W: 5 · num_features · dim² MACs. Parameters: 5 dim² + 11 dim. The paper shares
one generator between the heads of a layer: let the heads use one object.
"""

from __future__ import annotations

import torch
from torch import nn

from snnk_peft.functional.random_numbers import normal_numbers
from snnk_peft.projections import PROJECTIONS
from snnk_peft.projections.base_learned import Learned

GENERATOR_DEPTH = 4
EPSILON_ROWS = 1e-5


@PROJECTIONS.register("generative")
class Generative(Learned):
    """Rows from a generator network. Arguments as in `Projection`.

    Attributes:
        hidden: weights of the four hidden layers, (4, dim, dim); the normalisation after each replaces biases.
        row_scale: factors on the normalised units, (4, dim).
        row_shift: offsets added to them, (4, dim).
        out: weights of the last layer, (dim, dim).
        out_bias: its biases, (dim,).
        skip: share of the noise in W, (dim,).
        gain: share of the network, (dim,).
    """

    formula = "n + g(n), g a network of four layers"
    source = "Learning the Transformer Kernel"
    cost = "m·d, and 5 m·d² for W"

    hidden: torch.Tensor
    row_scale: torch.Tensor
    row_shift: torch.Tensor
    out: torch.Tensor
    out_bias: torch.Tensor
    skip: torch.Tensor
    gain: torch.Tensor

    def initial(self, generator: torch.Generator) -> dict[str, torch.Tensor]:
        """Return random hidden layers, a last layer of zeros, neutral scales."""
        d = self.dim
        hidden = normal_numbers(GENERATOR_DEPTH, d, d, generator=generator)
        return {
            "hidden": hidden * d**-0.5,
            "row_scale": torch.ones(GENERATOR_DEPTH, d, device="cpu"),
            "row_shift": torch.zeros(GENERATOR_DEPTH, d, device="cpu"),
            "out": torch.zeros(d, d, device="cpu"),
            "out_bias": torch.zeros(d, device="cpu"),
            "skip": torch.ones(d, device="cpu"),
            "gain": torch.ones(d, device="cpu"),
        }

    def rows(self) -> torch.Tensor:
        """Compute W (num_features, dim) in one pass of the network over all rows."""
        h = self.noise
        for weight, scale, shift in zip(self.hidden, self.row_scale, self.row_shift, strict=True):
            h = nn.functional.leaky_relu(standardized_rows(h @ weight.T) * scale + shift)
        return self.skip * self.noise + self.gain * torch.tanh(h @ self.out.T + self.out_bias)


def standardized_rows(h: torch.Tensor) -> torch.Tensor:
    """Standardise each column of h (rows, dim) by its mean and standard deviation, computed in at least fp32."""
    wide = h.to(torch.promote_types(h.dtype, torch.float32))
    centred = wide - wide.mean(0)
    return (centred * (centred.square().mean(0) + EPSILON_ROWS).rsqrt()).to(h.dtype)
