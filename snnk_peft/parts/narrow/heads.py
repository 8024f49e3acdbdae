"""Attention heads with fewer dimensions: W_q with W_k, and W_v with W_o, factorised jointly per head."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from typing import ClassVar

from torch import nn

from snnk_peft.errors import ConfigError, UnsupportedError
from snnk_peft.families import family_of
from snnk_peft.families.base import module_at
from snnk_peft.layers.folded import HEAD_SIZES, head_size
from snnk_peft.layers.slots import Slot
from snnk_peft.options import MOST, documented, option
from snnk_peft.parts import PARTS
from snnk_peft.parts.base import Part, Patch, PatchContext, layers_faults, resolve_layers, shares_of
from snnk_peft.parts.narrow.heads_slots import FittedHeads, NarrowHeads

NORM = re.compile(r"(q|k|qk|query|key)_?(layer_?)?norm")  # names of norms of queries or keys


@PARTS.register("narrow_heads")
@documented
@dataclass
class NarrowHeadsPart(Part):
    """Narrower attention heads: a head depends only on W_qᵀ W_k and W_o W_v, which are truncated to a lower rank.

    The number of heads, softmax and its scale are unchanged. Bundled, the four projections are plain narrower Linears,
    and attention needs less memory traffic and fewer MACs; a patched model still computes at full width. The factors
    are trained.
    """

    head_dim: int = option(16, "new dimension of each attention head, >= 1 and below the old one.", low=1, high=MOST)
    init: str = option(
        "data",
        'how the factors are found: "spectral" (singular vectors of the weights; `calibrate` leaves them) or "data" '
        "(starts the same way, and `calibrate` fits them to what the model actually attends to).",
        choices=("spectral", "data"),
    )
    layers: str | list[int] = option(
        "all",
        'which Transformer layers: "all", "top-K" (the last K), "bottom-K", or a list of indices from 0.',
        checked=False,
    )

    def faults(self, part: str) -> list[str]:
        return super().faults(part) + layers_faults(f"{part}.layers", self.layers)

    size_fields: ClassVar[tuple[str, ...]] = ("head_dim",)

    @classmethod
    def candidates(cls, model: nn.Module, length: int) -> list[Part]:
        family = family_of(model)
        attention = module_at(model, f"{family.layer_paths(model)[0]}.{family.attention}", "the attention")
        return [cls(head_dim=size) for size in shares_of(head_size(attention) or 0, (1 / 4, 5 / 8))]

    @classmethod
    def probes(cls) -> dict[str, Part]:
        return {"narrow_heads": cls(head_dim=1)}

    def plan(self, context: PatchContext) -> list[Patch]:
        """Plan the narrower heads.

        Raises:
            ConfigError: heads that are not wider than head_dim, layers that the model does not have.
            UnsupportedError: an operation between queries, keys and their product, or projections that are not
                separate.
        """
        layers = context.family.layer_paths(context.model)
        chosen, faults = resolve_layers(f"{context.where}.layers", self.layers, len(layers))
        blocks = [_Block(context, self, layers[index]) for index in chosen]
        wide = [block.dim for block in blocks if block.dim <= self.head_dim]
        if wide:
            faults.append(
                f"{context.where}.head_dim is {self.head_dim}; {type(context.model).__name__} has heads of {wide[0]} "
                "dimensions; expected fewer than these"
            )
        if faults:
            raise ConfigError(faults)
        return [patch for block in blocks for patch in block.patches()]


class _Block:
    """The attention of one layer: the paths of its modules, and its slots, created on demand."""

    def __init__(self, context: PatchContext, part: NarrowHeadsPart, layer: str):
        self.context, self.part, self.family = context, part, context.family
        model, what = context.model, f"{context.where} (narrow_heads)"
        if missing := _missing(context):
            raise UnsupportedError(
                f"{what}: the attention of {type(model).__name__} (family {self.family.name!r}) {missing}; expected "
                "projections of their own for queries, keys, values and outputs, and nothing but a product between "
                "queries and keys. Leave this part out for this model"
            )
        names = (self.family.query, self.family.key, self.family.value, self.family.attention_out)
        self.paths = tuple(f"{layer}.{name}" for name in names)
        self.attention = f"{layer}.{self.family.attention}"
        self.block = _common(self.attention, self.paths[3])
        self.sources = tuple(context.linear(path, what) for path in self.paths)
        attention = module_at(model, self.attention, what)
        self.dim = head_size(attention) or 0
        if reasons := [*_reasons(attention, self.dim, *self.sources)]:
            raise UnsupportedError(
                f"{what}: {self.attention!r} of {type(model).__name__} {', and '.join(reasons)}. Leave this part out "
                "for this model"
            )

    def patches(self) -> list[Patch]:
        """Return the patches of the four projections, which are replaced, and of the block around them."""
        inside = [Patch(path, partial(self._slot, i), replaces=True) for i, path in enumerate(self.paths)]
        return [*inside, Patch(self.block, lambda: self._whole)]

    def _slot(self, index: int) -> Slot:
        return self._whole.four[index]

    @cached_property
    def _whole(self) -> NarrowHeads:
        kind = FittedHeads if self.part.init == "data" else NarrowHeads
        heads = self.sources[0].out_features // self.dim
        return kind(self.paths, self.sources, self.attention, heads, self.part.head_dim)


def _missing(context: PatchContext) -> str | None:
    family = context.family
    if family.query is None or family.value is None:
        return "has one matrix for queries, keys and values"
    if family.key is None or family.attention_out is None:
        return "multiplies queries and keys only after changing them (rotary positions, a norm, a scale of its own)"
    return None


def _reasons(
    attention: nn.Module, dim: int, query: nn.Linear, key: nn.Linear, value: nn.Linear, out: nn.Linear
) -> Iterator[str]:
    """Yield reasons that a user's family description may have overlooked."""
    if dim == 0:
        yield f"has none of {', '.join(HEAD_SIZES)}, by which transformers splits into heads"
    elif len({query.out_features, key.out_features, value.out_features, out.in_features}) > 1:
        yield (
            f"has queries of {query.out_features}, keys of {key.out_features} and values of {value.out_features} "
            "numbers: several query heads share a key head"
        )
    if not hasattr(attention, "scaling") and not hasattr(attention, "scale"):
        yield "keeps no scale of its own, so that a smaller head would change it"
    if "position_embeddings" in inspect.signature(attention.forward).parameters:
        yield "turns queries and keys by their positions"
    between = [name for name, _ in attention.named_modules() if "rotary" in name or NORM.match(name)]
    if between:
        yield f"has {between[0]!r} between the projections and their product"


def _common(first: str, second: str) -> str:
    """Return the innermost module that holds both paths, or is one of them."""
    shared = [a for a, b in zip(first.split("."), second.split("."), strict=False) if a == b]
    return ".".join(shared)
