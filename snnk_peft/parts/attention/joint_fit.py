"""Fit a far field that shares its normalisation with an exact near field: maps and one factor per query head.

Recording, sampling, errors and the output projection are as in fit.py; the maps are those of
solvers/joint_centroids.py, for the far keys.
"""

from __future__ import annotations

from typing import cast

import torch

from snnk_peft.errors import ConfigError
from snnk_peft.families.base import head_sizes
from snnk_peft.layers.attention_term import AttentionTerm
from snnk_peft.parts.attention.fit import MOST, QUERIES, TRIED, AttentionFitter
from snnk_peft.parts.attention.recording import Recorded, Sample
from snnk_peft.projections.base_drawn import site_generator
from snnk_peft.projections.centroids import Centroids
from snnk_peft.solvers.centroids import descend
from snnk_peft.solvers.joint_centroids import (
    JointMaps,
    NearScores,
    best_joint,
    joint_centroids,
    joint_divergence,
    joint_output_error,
)

PAIRS = 1 << 21  # weights formed at a time for one batch, over all heads


def most_queries(scores: NearScores) -> int:
    """Return the number of queries per sequence for which weights are formed."""
    batch, heads, keys, _ = scores.k.shape
    return max(1, min(MOST, PAIRS // (batch * heads * keys)))


class JointFitter(AttentionFitter):
    """Fitter of one attention's far field; arguments as in `AttentionFitter`."""

    @property
    def room(self) -> int | None:
        """The longest sequence that the model supports, if its attention knows it."""
        config = getattr(self.module, "config", None)
        return getattr(config, "max_position_embeddings", None)

    def _maps(self, train: Sample, generator: torch.Generator) -> JointMaps:  # type: ignore[override]
        joint = self.kernel.joint
        assert joint is not None
        batches = [self._scores(recorded) for recorded in train]
        batches = [each for each in batches if bool(each.affected.any())]
        longest = self.longest
        if not batches:
            raise ConfigError(
                f"the longest sequence that was given has {longest} tokens, all within near_field={joint.width} and "
                f"sinks={joint.sinks} of each other, so nothing shows how far keys are attended to; expected sequences "
                f"longer than {joint.width + joint.sinks}. Give longer ones, or a narrower near_field"
            )
        if self.room is not None and longest < self.room and joint.rotary is None:
            self.remark = (
                f"the longest sequence that the far field was fitted to has {longest} tokens, and the model takes "
                f"{self.room}. Queries and keys of later positions are unlike all that was seen, and far keys may do "
                "worse there than none. Calibrate on sequences as long as those that the model will read"
            )
        maps = joint_centroids(batches, self.kernel.maps()[0].num_features, QUERIES, generator)
        every = max(1, len(batches) // TRIED)
        maps = best_joint(maps, [each.some(most_queries(each), generator) for each in batches[::every]])

        def some() -> NearScores:
            chosen = batches[int(torch.randint(len(batches), (), generator=generator))]
            return chosen.some(most_queries(chosen), generator)

        steps = self.options.steps
        maps = descend(maps, lambda tried: joint_divergence(tried, some()).sum(), steps - steps // 2)
        return descend(maps, lambda tried: joint_output_error(tried, some(), self._columns()), steps // 2)

    def _scores(self, recorded: Recorded) -> NearScores:
        """Return the near scores of the heads that become linear."""
        joint, own = self.kernel.joint, recorded.of_others(self.kernel)
        assert joint is not None
        found = NearScores.of(own.scores(), joint.width, joint.sinks)
        if joint.rotary is None:
            return found
        at = torch.arange(own.q.shape[2], device=own.q.device)[None] if own.positions is None else own.positions
        return found._replace(far_q=joint.rotary.queries(found.q, at), far_k=joint.rotary.keys(found.k, at))

    def _columns(self) -> torch.Tensor | None:
        """Return the columns of the output projection that read the heads that become linear."""
        if self.weight is None or not self.kernel.full_heads:
            return self.weight
        by_head = self.weight.unflatten(1, (head_sizes(self.module.config)[1], -1))
        kept = [head for head in range(by_head.shape[1]) if head not in self.kernel.full_heads]
        return by_head[:, kept].flatten(1)

    def _divergence(self, sample: Sample) -> float:
        joint = self.kernel.joint
        assert joint is not None
        pairs = cast(AttentionTerm, self.kernel.terms[0]).pairs()
        queries, keys = ([cast(Centroids, pair[side].projection) for pair in pairs] for side in (0, 1))
        bias = torch.stack([cast(torch.Tensor, each.bias) for each in queries]).float()
        rows = [torch.stack([each.weight for each in side]).float() for side in (queries, keys)]
        maps = JointMaps(rows[0], bias, rows[1], joint.factor[0].float())
        generator = site_generator(
            queries[0].seed, f"{queries[0].site}.divergence"
        )  # the same queries before and after
        total, count = 0.0, 0
        for recorded in sample:
            scores = self._scores(recorded)
            scores = scores.some(most_queries(scores), generator)
            affected = int(scores.affected.sum())
            total += float(joint_divergence(maps, scores).mean()) * affected
            count += affected
        return total / max(count, 1)

    @torch.no_grad()
    def _take(self, maps: JointMaps) -> None:  # type: ignore[override]
        """Copy the fitted maps into the feature maps, one pair per query head, and the factors."""
        joint = self.kernel.joint
        assert joint is not None
        for head, (queries, keys) in enumerate(cast(AttentionTerm, self.kernel.terms[0]).pairs()):
            for feature_map, rows in ((queries, maps.query_rows), (keys, maps.key_rows)):
                cast(Centroids, feature_map.projection).weight.copy_(rows[head])
            cast(torch.Tensor, queries.projection.bias).copy_(maps.query_bias[head])
            cast(torch.Tensor, keys.projection.bias).zero_()
        joint.factor.copy_(maps.factor[None])
