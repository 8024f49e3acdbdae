"""Shared code of the baselines: running a BERT block by block, costs of its heads and units, and removing them.

Sublayers are run one at a time, as in a post-LN BERT: x -> LN(x + attention(x)) -> LN(x + ffn(x)).
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
    """Multiply-adds per token of the parts that can be removed.

    Args:
        head: MACs of one attention head: its share of the four projections and of the products with other tokens.
        unit: MACs of one hidden unit of an FFN.
        heads: heads per layer.
        units: hidden units per layer.
        layers: number of layers.
    """

    head: int
    unit: int
    heads: int
    units: int
    layers: int

    @classmethod
    def of(cls, config: Any, tokens: int = 64) -> Cost:
        """Compute the costs for sentences of `tokens` tokens."""
        dim, heads = config.hidden_size, config.num_attention_heads
        size = dim // heads
        return cls(
            4 * dim * size + 2 * tokens * size, 2 * dim, heads, config.intermediate_size, config.num_hidden_layers
        )

    @property
    def total(self) -> int:
        """The multiply-adds of all heads and units."""
        return self.layers * (self.heads * self.head + self.units * self.unit)

    def unit_share(self, share: float) -> float:
        """Return the share of FFN multiply-adds that leaves `share` of the total, with the heads untouched.

        Raises:
            ValueError: the heads alone cost more.
        """
        ffn = self.units * self.unit
        left = 1 - (1 - share) * (self.heads * self.head + ffn) / ffn
        if not 0 < left <= 1:
            least = self.heads * self.head / (self.heads * self.head + ffn)
            raise ValueError(f"share is {share}; expected more than {least:.3f}, the cost of attention, and at most 1")
        return left


@dataclass
class State:
    """The hidden states of sentences between two sublayers.

    Args:
        x: (sentences, tokens, dim), input of the next sublayer.
        mask: mask passed to the layers, or None.
        real: (sentences, tokens), False at padding.
    """

    x: Tensor
    mask: Any
    real: Tensor


class _Reached(Exception):  # noqa: N818 - control flow, not an error
    """Signal that ends a forward pass before the first layer."""


def encoder_layers(model: nn.Module) -> Sequence[Any]:
    """Return the layers of a BERT with a head."""
    return model.base_model.encoder.layer


def model_inputs(batch: Batch) -> dict[str, Tensor]:
    """Return a batch without its labels."""
    return {name: value for name, value in batch.items() if name != "labels"}


@torch.no_grad()
def entering(model: nn.Module, batches: Sequence[Batch]) -> list[State]:
    """Return the input of the first layer for each batch."""
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
    """Return the outputs of a layer's heads, before the output projection: (sentences, tokens, heads · size)."""
    return layer.attention.self(state.x, attention_mask=state.mask)[0]


def behind_attention(layer: Any, state: State, heads: Tensor | None = None) -> State:
    """Return the state after the attention sublayer; `heads` are its heads' outputs, if already known."""
    heads = heads_of(layer, state) if heads is None else heads
    return dataclasses.replace(state, x=layer.attention.output(heads, state.x))


def behind_ffn(layer: Any, state: State, hidden: Tensor | None = None) -> State:
    """Return the state after the FFN sublayer; `hidden` are its activations, if already known."""
    hidden = layer.intermediate(state.x) if hidden is None else hidden
    return dataclasses.replace(state, x=layer.output(hidden, state.x))


def linear(weight: Tensor, bias: Tensor) -> nn.Linear:
    """Create a plain fp32 Linear from these tensors."""
    made = nn.Linear(1, 1, device="meta")  # not size 0, which torch warns about
    made.out_features, made.in_features = weight.shape
    made.weight = nn.Parameter(weight.detach().float().clone(memory_format=torch.contiguous_format))
    made.bias = nn.Parameter(bias.detach().float().clone())
    return made


def keep_units(layer: Any, units: Tensor, contraction: Tensor | None = None) -> None:
    """Keep only these hidden units of the FFN; `contraction` (dim, kept) is the new second matrix, if changed."""
    expansion, out = layer.intermediate.dense, layer.output.dense
    layer.intermediate.dense = linear(expansion.weight[units], expansion.bias[units])
    layer.output.dense = linear(out.weight[:, units] if contraction is None else contraction, out.bias)


class NoHeads(nn.Module):
    """Attention without heads, of which only the bias of the output projection is left."""

    def forward(self, x: Tensor, *args: object, **kwargs: object) -> tuple[Tensor, None]:
        """Map (..., dim) to (..., 0)."""
        return x[..., :0], None


def keep_heads(layer: Any, heads: Tensor) -> None:
    """Keep only these attention heads."""
    attention, out = layer.attention.self, layer.attention.output.dense
    size = attention.attention_head_size
    rows = (heads[:, None] * size + torch.arange(size)).flatten()
    for name in ("query", "key", "value"):
        old = getattr(attention, name)
        setattr(attention, name, linear(old.weight[rows], old.bias[rows]))
    layer.attention.output.dense = linear(out.weight[:, rows], out.bias)
    if len(heads) == 0:
        layer.attention.self = NoHeads()
