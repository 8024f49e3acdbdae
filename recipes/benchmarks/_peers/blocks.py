"""What the peers share: a BERT block by block on real sentences, what its heads and units cost, and cutting them out.

Sublayers are walked one at a time, as post-LN BERT computes them: x -> LN(x + attention(x)) -> LN(x + ffn(x)).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

Batch = Mapping[str, Tensor]


class Cost(NamedTuple):
    """Multiply-adds per token of what can be removed.

    Args:
        head: of one attention head, its share of the four projections and of the products with other tokens.
        unit: of one hidden unit of an FFN.
        heads: per layer.
        units: per layer.
        layers: of the model.
    """

    head: int
    unit: int
    heads: int
    units: int
    layers: int

    @classmethod
    def of(cls, config: Any, tokens: int = 64) -> Cost:
        """For sentences of so many tokens."""
        dim, heads = config.hidden_size, config.num_attention_heads
        size = dim // heads
        return cls(
            4 * dim * size + 2 * tokens * size, 2 * dim, heads, config.intermediate_size, config.num_hidden_layers
        )

    @property
    def total(self) -> int:
        """Of all heads and units."""
        return self.layers * (self.heads * self.head + self.units * self.unit)

    def unit_share(self, share: float) -> float:
        """The share of FFN multiply-adds that leaves `share` of all of them, the heads untouched.

        Raises:
            ValueError: the heads alone cost more.
        """
        ffn = self.units * self.unit
        left = 1 - (1 - share) * (self.heads * self.head + ffn) / ffn
        if not 0 < left <= 1:
            least = self.heads * self.head / (self.heads * self.head + ffn)
            raise ValueError(f"share is {share}; expected more than {least:.3f}, what attention costs, and at most 1")
        return left


@dataclass
class State:
    """Sentences on their way through a model.

    Args:
        x: (sentences, tokens, dim), what the next sublayer gets.
        mask: as the layers get it, or None.
        real: (sentences, tokens), False at padding.
    """

    x: Tensor
    mask: Any
    real: Tensor


class _Reached(Exception):  # noqa: N818 - control flow, not an error
    """Ends a forward pass in front of the first layer."""


def encoder_layers(model: nn.Module) -> Sequence[Any]:
    """The layers of a BERT with a head."""
    return model.base_model.encoder.layer


def model_inputs(batch: Batch) -> dict[str, Tensor]:
    """A batch without its labels."""
    return {name: value for name, value in batch.items() if name != "labels"}


@torch.no_grad()
def entering(model: nn.Module, batches: Sequence[Batch]) -> list[State]:
    """What the first layer gets from each batch."""
    states: list[State] = []

    def look(module: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> None:
        x = given[0] if given else named["hidden_states"]
        mask = given[1] if len(given) > 1 else named.get("attention_mask")
        states.append(State(x, mask, torch.ones(x.shape[:2], dtype=torch.bool)))
        raise _Reached

    handle = encoder_layers(model)[0].register_forward_pre_hook(look, with_kwargs=True)
    try:
        for batch in batches:
            try:
                model(**model_inputs(batch))
            except _Reached:
                if "attention_mask" in batch:
                    states[-1].real = batch["attention_mask"].bool()
    finally:
        handle.remove()
    return states


def heads_of(layer: Any, state: State) -> Tensor:
    """What the heads of a layer read, side by side, before the output projection: (sentences, tokens, heads · size)."""
    return layer.attention.self(state.x, attention_mask=state.mask)[0]


def behind_attention(layer: Any, state: State, heads: Tensor | None = None) -> State:
    """The state behind the attention sublayer; `heads`, if they are known already."""
    heads = heads_of(layer, state) if heads is None else heads
    return dataclasses.replace(state, x=layer.attention.output(heads, state.x))


def behind_ffn(layer: Any, state: State, hidden: Tensor | None = None) -> State:
    """The state behind the FFN sublayer; `hidden`, its activations, if they are known already."""
    hidden = layer.intermediate(state.x) if hidden is None else hidden
    return dataclasses.replace(state, x=layer.output(hidden, state.x))


def linear(weight: Tensor, bias: Tensor) -> nn.Linear:
    """A plain fp32 Linear of these tensors."""
    made = nn.Linear(1, 1, device="meta")  # none of size 0, of which torch warns
    made.out_features, made.in_features = weight.shape
    made.weight = nn.Parameter(weight.detach().float().clone(memory_format=torch.contiguous_format))
    made.bias = nn.Parameter(bias.detach().float().clone())
    return made


def keep_units(layer: Any, units: Tensor, contraction: Tensor | None = None) -> None:
    """Leave these hidden units of the FFN; `contraction` (dim, kept) is the new second matrix, if it changes."""
    expansion, out = layer.intermediate.dense, layer.output.dense
    layer.intermediate.dense = linear(expansion.weight[units], expansion.bias[units])
    layer.output.dense = linear(out.weight[:, units] if contraction is None else contraction, out.bias)


class NoHeads(nn.Module):
    """Attention that has lost all of its heads: its output projection adds its bias to nothing."""

    def forward(self, x: Tensor, *args: object, **kwargs: object) -> tuple[Tensor, None]:
        """(..., dim) -> (..., 0)."""
        return x[..., :0], None


def keep_heads(layer: Any, heads: Tensor) -> None:
    """Leave these attention heads."""
    attention, out = layer.attention.self, layer.attention.output.dense
    size = attention.attention_head_size
    rows = (heads[:, None] * size + torch.arange(size)).flatten()
    for name in ("query", "key", "value"):
        old = getattr(attention, name)
        setattr(attention, name, linear(old.weight[rows], old.bias[rows]))
    layer.attention.output.dense = linear(out.weight[:, rows], out.bias)
    if len(heads) == 0:
        layer.attention.self = NoHeads()
