"""Rows generated from noise by an invertible network (Spectraformer, appendix A.4, "INN").

    ω = (layer_L ∘ ... ∘ layer_1)(n),  n ~ N(0, I) saved noise
    layer:  x <- x ⊙ exp(a) + b                                     a scale and shift per coordinate (ActNorm)
            x_moved <- x_moved ⊙ exp(tanh(s)) + t,  (s, t) = network(x_kept)           an affine coupling

Odd layers keep the coordinates 0, 2, 4, ... and move the others, even layers the other way round, so two layers move
everything. Every layer has an inverse in closed form (`inverse`). Initially a, b and the last layer of each network
are zero, which makes every layer the identity and ω exactly the noise: the kernel that is replaced.

Cost: as gaussian, plus forming W: about 1.5 · layers · num_features · dim² / 2 MACs.
"""

from __future__ import annotations

from typing import Annotated

import torch

from snnk_peft.functional.random_numbers import normal_numbers
from snnk_peft.options import Option
from snnk_peft.projections import PROJECTIONS
from snnk_peft.projections.base_learned import Learned


@PROJECTIONS.register("inn")
class Inn(Learned):
    """Rows from an invertible network.

    Attributes:
        log_scale: a, (layers, dim).
        shift: b, (layers, dim).
        hidden_i: first matrix of the network of layer i, (dim, number of kept coordinates).
        hidden_bias: its biases, (layers, dim).
        out_i: second matrix, (2 · number of moved coordinates, dim); s first, then t.
        out_bias_i: its biases.
    """

    formula = "an invertible network of the noise"
    source = "Spectraformer (learned W)"
    cost = "m·d, and the network for W"

    log_scale: torch.Tensor
    shift: torch.Tensor
    hidden_bias: torch.Tensor

    def __init__(
        self,
        dim: int,
        num_features: int,
        *,
        layers: Annotated[
            int,
            Option(
                "number of layers; with 1, half of the coordinates keep their distribution but for scale and shift.",
                low=1,
                high=64,
            ),
        ] = 4,
        **kwargs: object,
    ):
        self.layers, self.params = layers, {"layers": layers}
        super().__init__(dim, num_features, **kwargs)  # type: ignore[arg-type]

    def initial(self, generator: torch.Generator) -> dict[str, torch.Tensor]:
        """Start from the identity: random hidden layers, everything after them zero."""
        d, count = self.dim, self.layers
        start = {name: torch.zeros(count, d, device="cpu") for name in ("log_scale", "shift", "hidden_bias")}
        for layer in range(count):
            kept = len(range(layer % 2, d, 2))
            moved = d - kept
            hidden = normal_numbers(d, kept, generator=generator)
            start[f"hidden_{layer}"] = hidden * max(kept, 1) ** -0.5
            start[f"out_{layer}"] = torch.zeros(2 * moved, d, device="cpu")
            start[f"out_bias_{layer}"] = torch.zeros(2 * moved, device="cpu")
        return start

    def _coupling(self, layer: int, kept: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return log-scales (bounded, so that no row can diverge) and shifts of the moved coordinates."""
        hidden = torch.nn.functional.silu(kept @ getattr(self, f"hidden_{layer}").T + self.hidden_bias[layer])
        log_scale, shift = (hidden @ getattr(self, f"out_{layer}").T + getattr(self, f"out_bias_{layer}")).chunk(2, -1)
        return torch.tanh(log_scale), shift

    def rows(self) -> torch.Tensor:
        """Compute W (num_features, dim) in one pass of the network over all rows."""
        x = self.noise
        for layer in range(self.layers):
            x = x * self.log_scale[layer].exp() + self.shift[layer]
            even = layer % 2
            kept, moved = x[:, even::2], x[:, 1 - even :: 2]
            log_scale, shift = self._coupling(layer, kept)
            x = interleaved_columns(kept, moved * log_scale.exp() + shift, even)
        return x

    def inverse(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the noise that gives `rows`, both (any number, dim)."""
        for layer in reversed(range(self.layers)):
            even = layer % 2
            kept, moved = rows[:, even::2], rows[:, 1 - even :: 2]
            log_scale, shift = self._coupling(layer, kept)
            rows = interleaved_columns(kept, (moved - shift) * (-log_scale).exp(), even)
            rows = (rows - self.shift[layer]) * (-self.log_scale[layer]).exp()
        return rows


def interleaved_columns(kept: torch.Tensor, moved: torch.Tensor, first: int) -> torch.Tensor:
    """Interleave columns: `kept` at positions first, first + 2, ..., `moved` at the others."""
    rows = kept.new_empty(kept.shape[0], kept.shape[1] + moved.shape[1])
    rows[:, first::2], rows[:, 1 - first :: 2] = kept, moved
    return rows
