"""Near field and far field under one normalisation: exact softmax of near keys, feature maps for far ones.

    out_i = [Σ_{j near} e^{q_i·k_j} v_j + Σ_r g_r(q_i) Σ_{j far} φ_r(q_i)·ψ_r(k_j) v_j] / [the same without v]

The near keys are those at a distance below `width` and the first `sinks` keys of a text; the far keys are all others
that a query sees. Both are on the scale of e^{q·k}, so a width of the whole length gives softmax. g_r(q) = exp(w·q + c)
is learned per query head and starts at one (several terms: one over their number). `calibrate` fits it, for feature
maps that weigh far keys correctly among each other but get their sum wrong. q and k include √scaling here.

If causal, the far keys of query i are the first i − width + 1: linear attention with keys delayed by `width` tokens.
Maps fitted to texts of some length are wrong by orders of magnitude beyond it if queries and keys rotate with their
positions, so later queries, counted in real tokens, see only near keys and sinks. With `rotary`, the far field
reads queries and keys without their positions and does not end; beyond the fitted length its weight fades (`FADING`).

Otherwise this holds in both directions. Shapes: q (B, H, L, d), k (B, G, N, d), v (B, G, N, D) -> (B, H, L, D). Time
and memory are those of the band (functional/near_field.py) and of the terms; a cache keeps the sinks, `width`
keys and values, and the sums of the terms.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from transformers.integrations.sdpa_attention import repeat_kv

from snnk_peft.components.base import Component
from snnk_peft.errors import ConfigError, UnsupportedError
from snnk_peft.functional.exponential_attention import KeyMeans, key_means
from snnk_peft.functional.exponential_causal import causal_exponential_attention
from snnk_peft.functional.log_linear import ABSENT, LogLinear, common_logarithm
from snnk_peft.functional.near_field import Sinks, near_attention
from snnk_peft.functional.precision import full_precision, wide
from snnk_peft.functional.rotary import Rotary
from snnk_peft.layers.attention_term import AttentionTerm, KeptMaps
from snnk_peft.layers.joint_step import attend_at_once, far_logarithms, with_key
from snnk_peft.projections.base import Projection

# Beyond the fitted length the weight of far keys falls as (place / length)^-2. For SmolLM2, fitted to 2,048 tokens, the
# perplexity of a paper beyond 4,096 is 9.47 without it, 8.68 with exponent 1, 8.47 with 2; of reviews beyond 2,048
# 60.9, 59.7 and 59.1.
FADING = 2.0


class Kept(NamedTuple):
    """Keys (B, G, t, d) and values (B, G, t, D), unprocessed; counts (B, t) is False where there is none.

    Attributes:
        positions: (B, t) integers, if keys are rotated by them but the far field is not; else None.
    """

    keys: Tensor
    values: Tensor
    counts: Tensor
    positions: Tensor | None = None

    def and_then(self, other: Kept) -> Kept:
        """Return these keys followed by others."""
        keys, values = (torch.cat(pair, -2) for pair in zip(self[:2], other[:2], strict=True))
        positions = None
        if self.positions is not None and other.positions is not None:
            positions = torch.cat((self.positions, other.positions), -1)
        return Kept(keys, values, torch.cat((self.counts, other.counts), -1), positions)

    def part(self, first: int, last: int) -> Kept:
        """Return the keys from one index up to, excluding, another."""
        positions = None if self.positions is None else self.positions[:, first:last]
        return Kept(self.keys[:, :, first:last], self.values[:, :, first:last], self.counts[:, first:last], positions)

    def reversed(self) -> Kept:
        """Return the keys in reverse order."""
        return Kept(self.keys.flip(-2), self.values.flip(-2), self.counts.flip(-1))

    def owned(self) -> Kept:
        """Return a copy in memory that holds nothing else."""
        return Kept(*(None if each is None else each.clone() for each in self))  # type: ignore[arg-type]


class JointState(NamedTuple):
    """The memory of earlier tokens; its size does not depend on their number.

    Attributes:
        sums: of each term, over the far keys of the last token.
        band: the last `width` keys that are not sinks.
        sinks: the first keys that count, as many as there were, in `sinks` slots.
        place: (B,), number of keys that counted.
    """

    sums: tuple[KeyMeans, ...]
    band: Kept
    sinks: Kept
    place: Tensor


class JointAttention(nn.Module):
    """Combines the near and far fields of one layer under one normalisation.

    Args:
        width: width of the exact band; 1 is the diagonal alone.
        sinks: number of first keys that are exact as well.
        terms: the linear attentions of the far field.
        num_heads: H, number of query heads.
        rotary: removes the positions from the far field's queries and keys, or None. Causal attention only.

    Attributes:
        factor: w and c of each term and query head, (terms, H, d + 1).

    Raises:
        ConfigError: feature maps that are not on the scale of e^{q·k}.
    """

    def __init__(
        self, width: int, sinks: int, terms: Sequence[AttentionTerm], num_heads: int, rotary: Rotary | None = None
    ):
        super().__init__()
        maps = [feature_map for term in terms for pair in term.pairs() for feature_map in pair]
        if wrong := [each for each in maps if not may_be_joint(each.component, each.projection)]:
            names = [type(part).__name__.lower() for part in (wrong[0].component, wrong[0].projection)]
            raise ConfigError(
                f"features {names[0]!r} over {names[1]!r} are not known as positive numbers on the scale of e^(q·k), "
                "as one normalisation with softmax needs them; expected a component such as 'posrf', 'hyprf' or "
                "'mixture' over rows of equal weights"
            )
        self.width, self.sinks, self.rotary = width, sinks, rotary
        factor = torch.zeros(len(terms), num_heads, maps[0].projection.dim + 1)
        factor[..., -1] = -math.log(len(terms))
        self.factor = nn.Parameter(factor)

    def forward(
        self,
        terms: Sequence[AttentionTerm],
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None,
        *,
        causal: bool,
        scaling: float,
        reach: int | None = None,
        positions: Tensor | None = None,
    ) -> Tensor:
        """Return (B, H, L, D) in the dtype of v. Causal with more keys than queries: the queries come last.

        `terms` are those of the constructor. Causal queries later in their text than `reach` see no far keys, or
        with `rotary` see them with less weight; None for no limit.
        `positions` (B or 1, N) are those the keys were rotated by, for `rotary`; None for 0, 1, ...

        Raises:
            ConfigError: not causal, and the numbers of keys and queries differ.
        """
        before = k.shape[-2] - q.shape[-2]
        if before and not causal:
            raise ConfigError(
                f"near field: {q.shape[-2]} queries and {k.shape[-2]} keys; a band needs the same positions on both "
                "sides"
            )
        new = self._counted(k, v, mask, positions)
        if not causal:
            return self._both_ways(terms, q, new, scaling)
        state = None
        if before:
            earlier = new.part(0, before)
            place = earlier.counts.cumsum(-1)
            window, sinks = self._with_window(earlier, place, None)
            sums = []
            for term in terms:
                keys = self._far_keys(term, window.part(0, before))
                sums.append(key_means(*keys[:2], _maps(term, q, k, None, True, scaling)[1], keys.counts))
            state = JointState(tuple(sums), window.part(before, before + self.width), sinks, place[:, -1])
        return self._behind(terms, q, new.part(before, k.shape[-2]), state, scaling, reach)[0]

    def continued(
        self,
        terms: Sequence[AttentionTerm],
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None,
        state: JointState | None,
        scaling: float,
        kept: KeptMaps | None = None,
        reach: int | None = None,
        positions: Tensor | None = None,
    ) -> tuple[Tensor, JointState]:
        """Compute causal attention of new tokens to each other and all earlier ones, and a new state that owns its
        memory.

        `state` is that of the previous call, None at the start; `kept` caches logarithms between calls; the rest
        is as in `forward`.
        """
        if positions is None and state is not None:
            positions = state.place[:, None] + torch.arange(k.shape[-2], device=k.device)
        new = self._counted(k, v, mask, positions)
        if state is not None and k.shape[-2] == 1:
            return self._one(terms, q, new, state, scaling, reach, kept)
        out, (sums, band, sinks, place) = self._behind(terms, q, new, state, scaling, reach, kept)
        owned = (KeyMeans(each.values.clone(), each.log_weight.clone()) for each in sums)
        return out, JointState(tuple(owned), band.owned(), sinks.owned(), place)

    def _counted(self, k: Tensor, v: Tensor, mask: Tensor | None, positions: Tensor | None) -> Kept:
        every = torch.ones(k.shape[0], k.shape[-2], dtype=torch.bool, device=k.device) if mask is None else mask
        if self.rotary is None:
            return Kept(k, v, every)
        if positions is None:
            positions = torch.arange(k.shape[-2], device=k.device)[None]
        return Kept(k, v, every, positions.expand(k.shape[0], -1))

    def _with_window(self, new: Kept, place: Tensor, state: JointState | None) -> tuple[Kept, Kept]:
        """Return the last `width` keys and the new ones, without sinks, and the sinks. `place` (B, L) starts at 1."""
        k, v, counts = new[:3]
        batch, groups = k.shape[:2]
        if state is None:
            empty = [t.new_zeros(batch, groups, self.width + self.sinks, t.shape[-1]) for t in (k, v)]
            at = None if new.positions is None else new.positions.new_zeros(batch, self.width + self.sinks)
            nothing = Kept(empty[0], empty[1], counts.new_zeros(batch, self.width + self.sinks), at)
            band, sinks = nothing.part(0, self.width), nothing.part(self.width, self.width + self.sinks)
        else:
            band, sinks = state.band, state.sinks
        if self.sinks:
            places = torch.arange(1, self.sinks + 1, device=k.device)
            # Places (B, s, L): each receives at most one new key.
            found = (place.unsqueeze(-1) == places).mT & counts.unsqueeze(1)
            at, there = found.int().argmax(-1)[:, None, :, None], found.any(-1)
            keys, values = (
                torch.where(there[:, None, :, None], t.gather(2, at.expand(-1, t.shape[1], -1, t.shape[-1])), old)
                for old, t in ((sinks.keys, k), (sinks.values, v))
            )
            sinks = Kept(keys, values, sinks.counts | there)
        return band.and_then(new._replace(counts=counts & (place > self.sinks))), sinks

    def _behind(
        self,
        terms: Sequence[AttentionTerm],
        q: Tensor,
        new: Kept,
        state: JointState | None,
        scaling: float,
        reach: int | None,
        kept: KeptMaps | None = None,
    ) -> tuple[Tensor, JointState]:
        """Compute causal attention of L new tokens after a state."""
        length = q.shape[-2]
        place = new.counts.cumsum(-1)  # of each token in its text, starting at 1
        if state is not None:
            place = place + state.place.unsqueeze(-1)
        window, sinks = self._with_window(new, place, state)
        beside = Sinks(sinks.keys, sinks.values, place) if self.sinks else None
        fields, sums = [], []
        far_q = q if self.rotary is None or new.positions is None else self.rotary.queries(q, new.positions)
        for number, term in enumerate(terms):
            given = None if state is None else state.sums[number]
            maps = _maps(term, q, new.keys, None, True, scaling, kept)
            out, weights, behind = self._far(
                number, maps, far_q, self._far_keys(term, window.part(0, length)), given, scaling
            )
            if reach is not None and self.rotary is not None:
                weights = weights - FADING * (place / reach).clamp_min(1).log().to(weights.dtype).unsqueeze(1)
            elif reach is not None:
                weights = weights.masked_fill((place > reach).unsqueeze(1), ABSENT)
            fields.append((out, weights))
            sums.append(behind)
        out = near_attention(
            q, *window[:2], self.width, window.counts, causal=True, scaling=scaling, sinks=beside, far=tuple(fields)
        )
        last = window.part(length, length + self.width)
        return out, JointState(tuple(sums), last, sinks, place[:, -1])

    def _one(
        self,
        terms: Sequence[AttentionTerm],
        q: Tensor,
        new: Kept,
        state: JointState,
        scaling: float,
        reach: int | None,
        kept: KeptMaps | None,
    ) -> tuple[Tensor, JointState]:
        """Compute `_behind` for one token (layers/joint_step.py)."""
        place, sinks = state.place.unsqueeze(-1) + new.counts, state.sinks
        near, late = new, state.band.part(0, 1)
        if self.sinks:
            found = (place == torch.arange(1, self.sinks + 1, device=q.device)) & new.counts
            there = found[:, None, :, None]
            keys, values = (torch.where(there, own, old) for own, old in zip(new[:2], sinks[:2], strict=True))
            sinks = Kept(keys, values, sinks.counts | found)
            near = new._replace(counts=new.counts & (place > self.sinks))
        band = state.band.part(1, self.width).and_then(near)
        far_q = q
        if self.rotary is not None and new.positions is not None and late.positions is not None:
            far_q, late_keys = self.rotary.both(q, new.positions, late.keys, late.positions)
            late = late._replace(keys=late_keys)
        fields, sums = [], []
        for number, term in enumerate(terms):
            queries, keys_map = _maps(term, q, new.keys, None, True, scaling, kept)
            leaving = self._spread(term, late)
            with full_precision(q):
                means = with_key(state.sums[number], *leaving[:3], keys_map)
                logs = far_logarithms(wide(far_q), means, queries, keys_map)
                own = self.factor[number].to(logs)
                factor = (wide(far_q).squeeze(2) * (own[:, :-1] * scaling**0.5)).sum(-1) + own[:, -1]
                logs = logs + factor[:, :, None, None]
                if reach is not None and self.rotary is not None:
                    logs = logs - FADING * (place / reach).clamp_min(1).log().to(logs.dtype)[:, None, None]
                elif reach is not None:
                    logs = logs.masked_fill((place > reach)[:, None, None], ABSENT)
            fields.append((logs, means.values))
            sums.append(means)
        seen = Kept(*band[:3]).and_then(Kept(*sinks[:3])) if self.sinks else band
        return attend_at_once(q, *seen[:3], fields, scaling), JointState(tuple(sums), band, sinks, place[:, 0])

    def _both_ways(self, terms: Sequence[AttentionTerm], q: Tensor, new: Kept, scaling: float) -> Tensor:
        """Compute attention in which every query sees every key."""
        if self.rotary is not None:
            raise UnsupportedError("position_free is for causal attention; leave it out where later tokens are seen")
        length = q.shape[-2]
        place = new.counts.cumsum(-1)
        late, sinks = self._with_window(new, place, None)
        own = late.part(self.width, self.width + length)
        beside = Sinks(sinks.keys, sinks.values, place[:, -1:]) if self.sinks else None
        fields = []
        early = late.part(0, self.width).and_then(own.reversed())
        # Both directions as one batch: half as many operations, each of which is slow to trace.
        both = Kept(*map(torch.cat, zip(late.part(0, length)[:3], early.part(0, length)[:3], strict=True)))
        queries = torch.cat((q, q.flip(-2)))
        for number, term in enumerate(terms):
            maps = _maps(term, q, self._spread(term, new).keys, new.counts, False, scaling)
            maps = maps[0].for_each_half(), maps[1].for_each_half()
            out, weights, _ = self._far(number, maps, queries, self._spread(term, both), None, scaling)
            (forward, backward), (of_forward, of_backward) = out.chunk(2), weights.chunk(2)
            fields += [(forward, of_forward), (backward.flip(-2), of_backward.flip(-1))]
        return near_attention(q, *own[:2], self.width, own.counts, scaling=scaling, sinks=beside, far=tuple(fields))

    def _far(
        self,
        number: int,
        maps: tuple[LogLinear, LogLinear],
        q: Tensor,
        far: Kept,
        sums: KeyMeans | None,
        scaling: float,
    ) -> tuple[Tensor, Tensor, KeyMeans]:
        """Compute means (B, H, L, D), log weights (B, H, L), sums; query i sees keys 0 to i of `far` and `sums`."""
        both, behind = causal_exponential_attention(q, *far[:2], *maps, far.counts, sums, weighed=True)
        out, weights = both.split((both.shape[-1] - 1, 1), -1)  # two slices would each need a full-length gradient
        with full_precision(q):
            q, own = wide(q), self.factor[number].to(both)
            factor = torch.einsum("bhld,hd->bhl", q, own[:, :-1] * scaling**0.5) + own[:, None, -1]
            common = common_logarithm(q, maps[0], far.keys.shape[1])
            return out, weights.squeeze(-1) + common + factor, behind

    def _far_keys(self, term: AttentionTerm, far: Kept) -> Kept:
        """Return the keys as the far field sees them."""
        if self.rotary is not None and far.positions is not None:
            far = far._replace(keys=self.rotary.keys(far.keys, far.positions))
        return self._spread(term, far)

    def _spread(self, term: AttentionTerm, far: Kept) -> Kept:
        """Repeat keys and values for each query head, if there is one map per query head."""
        repeats = self.factor.shape[1] // far.keys.shape[1]
        if repeats == 1 or len(term.feature_maps) in (1, far.keys.shape[1]):
            return far
        return Kept(repeat_kv(far.keys, repeats), repeat_kv(far.values, repeats), far.counts)


def _maps(
    term: AttentionTerm,
    q: Tensor,
    k: Tensor,
    mask: Tensor | None,
    causal: bool,
    scaling: float,
    kept: KeptMaps | None = None,
) -> tuple[LogLinear, LogLinear]:
    """Compute the log features of queries and keys; of all tokens, if a component adapts to them."""
    root = scaling**0.5
    form = term.prepared if kept is None else partial(kept.of, term)
    found = form(term.statistics(q, k, mask, causal=causal, root=root), root, q)
    assert found is not None
    return found


def may_be_joint(component: Component, projection: Projection | type[Projection]) -> bool:
    """Return True if features are positive and fully given by their logarithms."""
    return type(component).log_linear is not Component.log_linear and component.positive and projection.uniform
