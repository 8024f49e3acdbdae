"""One linear attention: the feature maps of a layer's queries and keys, and the sums over the keys.

    out_i = Σ_j φ(q_i)·ψ(k_j) v_j / Σ_j φ(q_i)·ψ(k_j),     over all j, or causal over j <= i

φ and ψ share one W or have separate ones (`key_maps`); one for all heads, or one per key head. Shapes: q (B, H, L, d),
k (B, G, N, d), v (B, G, N, D), H a multiple of G -> (B, H, L, D). On a CPU, tokens are processed in blocks, so that
features stay in the cache and are never materialised in full: allocating memory takes longer than the computation.
Positive exponential features, which estimate softmax, are passed as logarithms (functional/exponential_attention.py,
exponential_causal.py), all others as they are, in at least fp32 (functional/linear_attention.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import cast

import torch
from torch import nn

from snnk_peft.components.base import Features
from snnk_peft.errors import ConfigError, UnsupportedError
from snnk_peft.feature_map import FeatureMap
from snnk_peft.functional.backend import exporting
from snnk_peft.functional.blocks import block_tokens, causal_tokens, joined, split_tokens
from snnk_peft.functional.exponential_attention import KeyMeans, exponential_attention, key_means
from snnk_peft.functional.exponential_causal import causal_exponential_attention
from snnk_peft.functional.linear_attention import CHUNK, AttentionState, attend, causal_linear_attention, key_sums
from snnk_peft.functional.log_linear import LogLinear, stack_heads
from snnk_peft.functional.precision import full_precision, wide
from snnk_peft.layers.kept_maps import KeptByVersion, KeptMaps, Pair
from snnk_peft.projections.base import check_finite

State = AttentionState | KeyMeans  # what is kept of the keys: plain features or exponential ones


class AttentionTerm(nn.Module):
    """Linear attention over feature maps.

    Args:
        feature_maps: one for all heads, or one per key head (the query heads of a group share that of their keys).
        key_maps: as many separate maps for the keys, or None if queries and keys share theirs. Separate maps must be
            initialised as copies of `feature_maps`: two independent draws estimate no kernel.

    Raises:
        ConfigError: no map, or a different number of maps for the keys.
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
        self._kept = KeptByVersion()

    def pairs(self) -> list[tuple[FeatureMap, FeatureMap]]:
        """Return (query map, key map), one pair or one per key head."""
        keys = self.feature_maps if self.key_maps is None else self.key_maps
        return [
            (cast(FeatureMap, first), cast(FeatureMap, second))
            for first, second in zip(self.feature_maps, keys, strict=True)
        ]

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        mask: torch.Tensor | None,
        *,
        causal: bool,
        root: float,
        state: State | None = None,
        kept: KeptMaps | None = None,
    ) -> tuple[torch.Tensor, State]:
        """Compute attention (B, H, L, D), and the state of all keys. Causal: the queries are the last L positions.

        Args:
            q: queries; k: keys; v: values.
            mask: (B, N) bool, True at keys to attend to.
            causal: whether a query sees only keys at or before it.
            root: factor on queries and keys, the square root of the scaling.
            state: state of earlier keys, which every query sees.
            kept: the caller's cache of logarithms between calls, or None.

        Raises:
            UnsupportedError: a component that adapts to all tokens of an example, in causal attention.
        """
        statistics = self.statistics(q, k, mask, causal=causal, root=root)
        logarithms = self.prepared(statistics, root, q) if kept is None else kept.of(self, statistics, root, q)
        if logarithms is None:
            return self._of_features(q, k, v, mask, statistics, causal, root, cast("AttentionState | None", state))
        first, second = self.pairs()[0]
        check_finite("phi", q, first.projection)
        check_finite("psi", k, second.projection)
        means, before = cast("KeyMeans | None", state), k.shape[-2] - q.shape[-2]
        if not causal:
            return exponential_attention(q, k, v, *logarithms, mask, means)
        if before:
            counts = None if mask is None else mask[:, :before]
            means = key_means(k[:, :, :before], v[:, :, :before], logarithms[1], counts, means)
            k, v, mask = k[:, :, before:], v[:, :, before:], None if mask is None else mask[:, before:]
        return causal_exponential_attention(q, k, v, *logarithms, mask, means)

    def prepared(self, statistics: Mapping[str, torch.Tensor], root: float, like: torch.Tensor) -> Pair | None:
        """Return `logarithms`, cached while they cannot have changed."""
        if statistics:
            return self.logarithms(statistics, root, like)
        maps = self.feature_maps if self.key_maps is None else (*self.feature_maps, *self.key_maps)
        return self._kept.of(self, maps, root, like)

    def logarithms(self, statistics: Mapping[str, torch.Tensor], root: float, like: torch.Tensor) -> Pair | None:
        """Compute the logarithms of the features of queries and keys if they are positive exponentials, else None.

        `root` is the factor on queries and keys, `like` any tensor on the device and in the dtype of the queries.
        """
        towers: tuple[list[LogLinear], list[LogLinear]] = ([], [])
        like = wide(like.new_zeros(()))
        with full_precision(like):
            for head, pair in enumerate(self.pairs()):
                own = statistics if len(self.feature_maps) == 1 else _of_head(statistics, head)
                for second, (tower, feature_map) in enumerate(zip(towers, pair, strict=True)):
                    found = feature_map.component.log_linear(feature_map.projection, own, bool(second), like)
                    if found is None:
                        return None
                    tower.append(found.of_scaled(root))
        return stack_heads(towers[0]), stack_heads(towers[1])

    def _of_features(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        mask: torch.Tensor | None,
        statistics: Mapping[str, torch.Tensor],
        causal: bool,
        root: float,
        state: AttentionState | None,
    ) -> tuple[torch.Tensor, AttentionState]:
        """Compute `forward` from the features themselves, not in half precision, where small ones would vanish."""
        columns, length = self.pairs()[0][0].feature_dim, q.shape[-2]
        size = causal_tokens(q, columns) if causal else block_tokens(q, columns)
        before = k.shape[-2] - (length if causal else 0)
        if before:
            counts = None if mask is None else mask[:, :before]
            for keys, values, counted in split_tokens(size, k[:, :, :before], v[:, :, :before], counts):
                psi = self.keys(wide(keys) * root, statistics)
                state = key_sums(psi.values, values, counted, log_scale=psi.log_scale, state=state, overwrite=True)

        def far() -> Iterator[torch.Tensor]:
            for (queries,) in split_tokens(size, q):
                phi = self.queries(wide(queries) * root, k.shape[1], statistics)
                yield attend(phi, cast(AttentionState, state), v.dtype)

        def past() -> Iterator[torch.Tensor]:
            nonlocal state
            own = (k[:, :, before:], v[:, :, before:], None if mask is None else mask[:, before:])
            for queries, keys, values, counted in split_tokens(size, q, *own):
                psi = self.keys(wide(keys) * root, statistics)
                out, state = causal_linear_attention(
                    self.queries(wide(queries) * root, k.shape[1], statistics),
                    psi.values,
                    values,
                    counted,
                    chunk=CHUNK if exporting() else min(CHUNK, keys.shape[-2]),
                    state=state,
                    log_scale=psi.log_scale,
                )
                yield out

        out = joined(past() if causal else far(), size, length)
        return out, cast(AttentionState, state)

    def queries(
        self, q: torch.Tensor, heads: int, statistics: Mapping[str, torch.Tensor] | None = None
    ) -> torch.Tensor:
        """Compute φ(q) without the scale of each query: (B, H, L, d) -> (B, H, L, m), H a multiple of the number of key
        heads."""
        grouped = q.unflatten(1, (heads, -1)).flatten(2, 3)
        maps = [pair[0] for pair in self.pairs()]
        if len(maps) == 1:
            values = maps[0].phi(grouped, statistics).values
        else:
            values = torch.stack(
                [each.phi(grouped[:, i], _of_head(statistics, i)).values for i, each in enumerate(maps)], 1
            )
        return values.unflatten(2, (-1, q.shape[2])).flatten(1, 2)

    def keys(self, k: torch.Tensor, statistics: Mapping[str, torch.Tensor] | None = None) -> Features:
        """Compute ψ(k): (B, G, N, d) -> (B, G, N, m)."""
        maps = [pair[1] for pair in self.pairs()]
        if len(maps) == 1:
            return maps[0].psi(k, statistics)
        return stacked([each.psi(k[:, i], _of_head(statistics, i)) for i, each in enumerate(maps)])

    def statistics(
        self, q: torch.Tensor, k: torch.Tensor, mask: torch.Tensor | None, *, causal: bool, root: float
    ) -> Mapping[str, torch.Tensor]:
        """Compute the statistics for components that adapt to the tokens, per example and key head."""
        component = cast(FeatureMap, next(iter(self.feature_maps))).component
        if not component.adapts:
            return {}
        if causal:
            raise UnsupportedError(
                f"component {type(component).__name__} computes its parameters from all tokens of an example; causal "
                "attention would see the future; use a component that does not, such as 'posrf'"
            )
        queries = q.unflatten(1, (k.shape[1], -1)).flatten(2, 3)
        key_mask = query_mask = None
        if mask is not None:
            key_mask = mask[:, None, :].expand(-1, k.shape[1], -1)
            if q.shape[2] == k.shape[2]:  # self-attention: a token that is not a key is not a query either
                query_mask = key_mask.repeat(1, 1, queries.shape[2] // k.shape[2])
        return component.statistics(wide(queries) * root, wide(k) * root, query_mask, key_mask)


def _of_head(statistics: Mapping[str, torch.Tensor] | None, head: int) -> dict[str, torch.Tensor]:
    return {key: value[:, head] for key, value in (statistics or {}).items()}


def stacked(parts: Sequence[Features]) -> Features:
    """Stack features of several heads, each (B, N, m), to (B, heads, N, m)."""
    values = torch.stack([part.values for part in parts], 1)
    scales = [part.log_scale for part in parts]
    return Features(values, None if scales[0] is None else torch.stack([s for s in scales if s is not None], 1))
