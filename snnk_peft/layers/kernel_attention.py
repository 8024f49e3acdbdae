"""KernelAttention: softmax attention replaced by linear attention over feature maps, with an optional near field.

    out = Σ_j φ(q_i)·ψ(k_j) v_j / Σ_j φ(q_i)·ψ(k_j)            (functional/linear_attention.py)
    out = w₁ · softmax over the band + w₂ · the above           (FMMformer; w₁, w₂ > 0 learned per head)

The temperature is split: queries and keys are both multiplied by √scaling, so that a softmax component estimates
e^{scaling · q·k}. Shapes: q (B, H, L, d), k and v (B, G, N, d), H a multiple of G; mask (B, N) -> (B, H, L, D).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import cast

import torch
from torch import nn

from snnk_peft.components.base import Features
from snnk_peft.errors import ConfigError, UnsupportedError
from snnk_peft.feature_map import FeatureMap
from snnk_peft.functional.linear_attention import (
    AttentionState,
    causal_linear_attention,
    common_scale,
    linear_attention,
)
from snnk_peft.functional.near_field import banded_softmax_attention
from snnk_peft.functional.precision import wide

EXPLICIT = 2048  # keys up to which attention weights are formed on request


class KernelAttention(nn.Module):
    """Linear attention of one layer.

    Args:
        feature_maps: one for all heads, or one per key head (the query heads of a group share that of their keys).
        num_heads: H, number of query heads.
        near_field: width of the exact band (1 is the diagonal alone), or None for no band.
    """

    def __init__(self, feature_maps: Sequence[FeatureMap], num_heads: int, *, near_field: int | None = None):
        super().__init__()
        self.feature_maps = nn.ModuleList(feature_maps)
        self.near_field, self.num_heads = near_field, num_heads
        # softplus(log(e^{½} − 1)) = ½: both fields count the same at the start.
        start = math.log(math.expm1(0.5))
        self.blend = None if near_field is None else nn.Parameter(torch.full((2, num_heads), start))

    def maps(self) -> list[FeatureMap]:
        """The feature maps, one or one per key head."""
        return [cast(FeatureMap, feature_map) for feature_map in self.feature_maps]

    def features(
        self, q: torch.Tensor, k: torch.Tensor, mask: torch.Tensor | None, causal: bool
    ) -> tuple[torch.Tensor, Features]:
        """Features of scaled queries (their own scale left out) and keys.

        Raises:
            UnsupportedError: a component that adapts to all tokens of an example, in causal attention.
        """
        groups = k.shape[1]
        queries = q.unflatten(1, (groups, -1)).flatten(2, 3)
        statistics = self._statistics(queries, k, mask, causal)
        maps = self.maps()
        if len(maps) == 1:
            phi, psi = maps[0].phi(queries, statistics), maps[0].psi(k, statistics)
        else:
            per_head = [
                (
                    feature_map.phi(queries[:, head], {key: value[:, head] for key, value in statistics.items()}),
                    feature_map.psi(k[:, head], {key: value[:, head] for key, value in statistics.items()}),
                )
                for head, feature_map in enumerate(maps)
            ]
            phi, psi = (stacked([pair[side] for pair in per_head]) for side in (0, 1))
        return phi.values.unflatten(2, (-1, q.shape[2])).flatten(1, 2), psi

    def _statistics(
        self, queries: torch.Tensor, k: torch.Tensor, mask: torch.Tensor | None, causal: bool
    ) -> dict[str, torch.Tensor]:
        component = self.maps()[0].component
        if not component.adapts:
            return {}
        if causal:
            raise UnsupportedError(
                f"component {type(component).__name__} computes its parameters from all tokens of an example; causal "
                "attention would see the future; use a component that does not, such as 'posrf'"
            )
        key_mask = None if mask is None else mask[:, None, :].expand(-1, k.shape[1], -1)
        query_mask = None
        if mask is not None and queries.shape[2] % mask.shape[1] == 0:
            query_mask = mask[:, None, :].repeat(1, k.shape[1], queries.shape[2] // mask.shape[1])
        return component.statistics(queries, k, query_mask, key_mask)

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        mask: torch.Tensor | None = None,
        *,
        causal: bool = False,
        scaling: float | None = None,
    ) -> torch.Tensor:
        """(B, H, L, D). Causal with more keys than queries: the queries are the last positions (a cache).

        Args:
            q: queries.
            k: keys.
            v: values.
            mask: (B, N) bool, True where a key counts.
            causal: whether a query sees only keys at or before it.
            scaling: the softmax temperature's factor on q·k; None for d^-½.

        Raises:
            ConfigError: a scaling that is not positive.
        """
        scaling = q.shape[-1] ** -0.5 if scaling is None else scaling
        if scaling <= 0:
            raise ConfigError(f"attention scaling is {scaling}; expected a number above 0")
        root = scaling**0.5
        phi, psi = self.features(q * root, k * root, mask, causal)
        keys, top = common_scale(psi.values, psi.log_scale, mask)
        if not causal:
            far = linear_attention(phi, keys, v, mask)
        else:
            before, state = k.shape[-2] - q.shape[-2], None
            if before:
                state = AttentionState(
                    torch.einsum("bgnm,bgnd->bgmd", keys[:, :, :before], v[:, :, :before].to(keys.dtype)),
                    keys[:, :, :before].sum(-2),
                    top,
                )
            own = None if mask is None else mask[:, before:]
            far, _ = causal_linear_attention(
                phi, keys[:, :, before:], v[:, :, before:], own, state=state, log_scale=top
            )
        if self.near_field is None or self.blend is None:
            return far
        if q.shape[-2] != k.shape[-2]:
            # The queries are the last positions: put zeros in front, which see only what comes before them.
            q = nn.functional.pad(q, (0, 0, k.shape[-2] - q.shape[-2], 0))
        near = banded_softmax_attention(q, k, v, self.near_field, mask, causal=causal, scaling=scaling)
        weights = nn.functional.softplus(self.blend.float())[:, None, :, None, None].to(far.dtype)
        return weights[0] * near[:, :, -far.shape[2] :] + weights[1] * far

    def weights(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        mask: torch.Tensor | None = None,
        *,
        causal: bool = False,
        scaling: float | None = None,
    ) -> torch.Tensor:
        """The weights (B, H, L, N) that `forward` multiplies values with: what it makes of the unit vectors.

        Rows sum to one, or with a near field to the sum of the two blending weights of a head (one at the start); rows
        without a key are 0. Weights of features that are not positive can be negative.

        Args:
            q: queries.
            k: keys.
            mask: (B, N) bool, True where a key counts.
            causal: whether a query sees only keys at or before it.
            scaling: as in `forward`.

        Raises:
            UnsupportedError: more than 2048 keys; the weights grow with their square.
        """
        count = k.shape[-2]
        if count > EXPLICIT:
            raise UnsupportedError(
                f"attention weights were asked for (output_attentions=True) with {count} keys; linear attention never "
                f"forms them, and they are formed on request for at most {EXPLICIT}. Give shorter inputs, or leave "
                "output_attentions out"
            )
        units = torch.eye(count, dtype=wide(q).dtype, device=q.device).expand(*k.shape[:2], -1, -1)
        return self(q, k, units, mask, causal=causal, scaling=scaling).to(q.dtype)


def stacked(parts: Sequence[Features]) -> Features:
    """Features of several heads, each (B, N, m), as (B, heads, N, m)."""
    values = torch.stack([part.values for part in parts], 1)
    scales = [part.log_scale for part in parts]
    return Features(values, None if scales[0] is None else torch.stack([s for s in scales if s is not None], 1))
