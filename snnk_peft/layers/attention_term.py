"""The feature maps of one linear attention: which φ the queries of a layer go through, and which ψ its keys.

    φ, ψ shared by queries and keys (one W), or apart (`key_maps`); one for all heads, or one per key head.

Shapes: q (B, H, L, d), k (B, G, N, d), H a multiple of G -> φ(q) (B, H, L, m), ψ(k) (B, G, N, m).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import cast

import torch
from torch import nn

from snnk_peft.components.base import Features
from snnk_peft.errors import ConfigError, UnsupportedError
from snnk_peft.feature_map import FeatureMap


class AttentionTerm(nn.Module):
    """Features of queries and keys.

    Args:
        feature_maps: one for all heads, or one per key head (the query heads of a group share that of their keys).
        key_maps: the keys' own maps, as many, or None where queries and keys share theirs. Own maps must start as
            copies of `feature_maps` to start at the same kernel: two independent draws estimate none.

    Raises:
        ConfigError: no map, or another number of maps for the keys.
    """

    def __init__(self, feature_maps: Sequence[FeatureMap], key_maps: Sequence[FeatureMap] | None = None):
        super().__init__()
        if not feature_maps or (key_maps is not None and len(key_maps) != len(feature_maps)):
            raise ConfigError(
                f"{len(feature_maps)} feature maps for queries, {len(key_maps or feature_maps)} for keys; expected one "
                "or more, and as many for either"
            )
        self.feature_maps = nn.ModuleList(feature_maps)
        self.key_maps = None if key_maps is None else nn.ModuleList(key_maps)

    def pairs(self) -> list[tuple[FeatureMap, FeatureMap]]:
        """(map of the queries, map of the keys), one pair or one per key head."""
        keys = self.feature_maps if self.key_maps is None else self.key_maps
        return [
            (cast(FeatureMap, first), cast(FeatureMap, second))
            for first, second in zip(self.feature_maps, keys, strict=True)
        ]

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, mask: torch.Tensor | None, causal: bool
    ) -> tuple[torch.Tensor, Features]:
        """Features of scaled queries (their own scale left out) and keys.

        Args:
            q: (B, H, L, d), multiplied by √scaling.
            k: (B, G, N, d), likewise.
            mask: (B, N) bool, True where a key counts; for components that adapt to the tokens.
            causal: whether attention is causal.

        Raises:
            UnsupportedError: a component that adapts to all tokens of an example, in causal attention.
        """
        queries = q.unflatten(1, (k.shape[1], -1)).flatten(2, 3)
        statistics = self._statistics(queries, k, None if mask is None else (mask, q.shape[2]), causal)
        pairs = self.pairs()
        if len(pairs) == 1:
            phi, psi = pairs[0][0].phi(queries, statistics), pairs[0][1].psi(k, statistics)
        else:
            own = [{key: value[:, head] for key, value in statistics.items()} for head in range(len(pairs))]
            phi = stacked([maps[0].phi(queries[:, head], own[head]) for head, maps in enumerate(pairs)])
            psi = stacked([maps[1].psi(k[:, head], own[head]) for head, maps in enumerate(pairs)])
        return phi.values.unflatten(2, (-1, q.shape[2])).flatten(1, 2), psi

    def _statistics(
        self, queries: torch.Tensor, k: torch.Tensor, mask: tuple[torch.Tensor, int] | None, causal: bool
    ) -> Mapping[str, torch.Tensor]:
        """Statistics of each example and key head, over the queries of the head's group."""
        component = self.pairs()[0][0].component
        if not component.adapts:
            return {}
        if causal:
            raise UnsupportedError(
                f"component {type(component).__name__} computes its parameters from all tokens of an example; causal "
                "attention would see the future; use a component that does not, such as 'posrf'"
            )
        key_mask = query_mask = None
        if mask is not None:
            heads = mask[0][:, None, :].expand(-1, k.shape[1], -1)
            key_mask = heads
            if mask[1] == k.shape[2]:  # self-attention: what is no key is no query either
                query_mask = heads.repeat(1, 1, queries.shape[2] // k.shape[2])
        return component.statistics(queries, k, query_mask, key_mask)


def stacked(parts: Sequence[Features]) -> Features:
    """Features of several heads, each (B, N, m), as (B, heads, N, m)."""
    values = torch.stack([part.values for part in parts], 1)
    scales = [part.log_scale for part in parts]
    return Features(values, None if scales[0] is None else torch.stack([s for s in scales if s is not None], 1))
