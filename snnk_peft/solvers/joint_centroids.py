"""Far keys by m typical queries in closed form, on the scale of e^{q·k}, so that they can join an exact near field.

As in centroids.py, queries and keys hold √(scaling) each, and per query head

    weight of a far key k for q  =  g(q) Σ_r softmax_r((u·u_r − ‖u_r‖²/2) / τ) · e^{c_r·k},     g(q) = e^{w·q + c}

but for keys that are far for some query alone, and without the b_r that even out the centres: e^{c_r·k} is what softmax
would use for the query c_r. The relative weights of far keys are then right, but their sum is not: a query differs from
its centre in directions where keys hardly vary, and e^{q·k̄} is exponential in that. log g is a ridge regression on q
of the missing part of the sum's logarithm, weighted by how much that moves the far keys' share of softmax. τ is the one
of `TEMPERATURES` with the least divergence from softmax; Adam steps continue from there.

Shapes: H query heads; q (B, H, L, d), k (B, H, N, d), v (B, H, N, D), out (B, H, L, D), near and far (B, 1, L, N).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from snnk_peft.solvers.centroids import ABSENT, LEAST, Scores, centroids, key_moments

TEMPERATURES = (0.03, 0.06, 0.12, 0.25, 0.5, 1.0)
RIDGE = 1e-2  # on w, as a fraction of the mean of its curvature


class JointMaps(NamedTuple):
    """Features of queries and keys of every query head, rows (H, m, d) and biases (H, m), and the factor of their
    products.

    Attributes:
        factor: w and c, (H, d + 1).
    """

    query_rows: Tensor
    query_bias: Tensor
    key_rows: Tensor
    factor: Tensor

    def sharpened(self, tau: float) -> JointMaps:
        """Divide the logits of the softmax over centres by τ."""
        return self._replace(query_rows=self.query_rows / tau, query_bias=self.query_bias / tau)


class NearScores(NamedTuple):
    """Queries and keys of one batch, each times √(scaling), keys repeated for the query heads of their group.

    Attributes:
        out: softmax attention.
        far: bool, (B, 1, L, N), True where a query sees a key that is not near.
        near: likewise, for near ones.
        counted: bool, (B, L), False at padding.
        far_q, far_k: what the far field reads instead of q and k, if it reads them without their positions.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    far: Tensor
    near: Tensor
    counted: Tensor
    far_q: Tensor | None = None
    far_k: Tensor | None = None

    @property
    def read(self) -> tuple[Tensor, Tensor]:
        """Return queries and keys of the far field."""
        return self.q if self.far_q is None else self.far_q, self.k if self.far_k is None else self.far_k

    @classmethod
    def of(cls, scores: Scores, width: int, sinks: int) -> NearScores:
        """Split the scores of all keys, as many as queries; the first `sinks` keys that count are near for all."""
        q, length = scores.q.flatten(1, 2), scores.q.shape[-2]
        k, v = (each.repeat_interleave(scores.q.shape[2], 1) for each in (scores.k, scores.v))
        positions = torch.arange(length, device=q.device)
        pairs = torch.ones(1, 1, length, length, dtype=torch.bool, device=q.device)
        if scores.pairs is not None:
            pairs = scores.pairs[:, :, 0]
        exists = pairs.any(-2) & scores.counted.unsqueeze(1)
        first = exists & (exists.long().cumsum(-1) <= sinks)
        near = ((positions[:, None] - positions).abs() < width) | first.unsqueeze(-2)
        shape = (len(q), 1, length, length)
        far, near = (pairs & ~near).expand(shape), (pairs & near).expand(shape)
        return cls(q, k, v, scores.out.flatten(1, 2), far, near, scores.counted)

    def some(self, most: int, generator: torch.Generator) -> NearScores:
        """Keep at most so many queries of each sequence, since the weights of all need memory in its length squared."""
        if self.q.shape[-2] <= most:
            return self
        chosen = torch.randperm(self.q.shape[-2], generator=generator)[:most].sort().values.to(self.q.device)
        q, out, far, near = (each[:, :, chosen] for each in (self.q, self.out, self.far, self.near))
        far_q = None if self.far_q is None else self.far_q[:, :, chosen]
        return self._replace(q=q, out=out, far=far, near=near, counted=self.counted[:, chosen], far_q=far_q)

    @property
    def affected(self) -> Tensor:
        """Return which queries count and see a far key, (B, L)."""
        return self.counted & self.far[:, 0].any(-1)


class Exact(NamedTuple):
    """Softmax of a batch: logarithms q·k, (B, H, L, N), ABSENT where a key is not seen, and weights."""

    logs: Tensor
    weights: Tensor

    @classmethod
    def of(cls, scores: NearScores) -> Exact:
        logs = exact_logarithms(scores)
        return cls(logs, logs.softmax(-1))


def exact_logarithms(scores: NearScores) -> Tensor:
    """Compute q·k, (B, H, L, N), ABSENT where a key is not seen."""
    return (scores.q @ scores.k.mT).masked_fill(~(scores.near | scores.far), ABSENT)


def joint_centroids(batches: Sequence[NearScores], rows: int, queries: int, generator: torch.Generator) -> JointMaps:
    """Compute the maps with m = `rows` for τ = 1 and g = 1, in fp32, from at most so many queries of a head.

    At least one of the batches must have a query with a far key.
    """
    far = [each for each in batches if bool(each.affected.any())]
    # One "group" per query head: to `key_moments`, a key counts if it is far for some query.
    given = [
        Scores(s.read[0].unsqueeze(2), s.read[1], s.v, s.out.unsqueeze(2), s.far.unsqueeze(1), s.counted) for s in far
    ]
    mean, covariance = key_moments(given)
    found = torch.cat([each.read[0].transpose(0, 1)[:, each.affected] for each in far], 1)
    chosen = torch.randperm(found.shape[1], generator=generator)[:queries].to(found.device)
    maps = centroids(found[:, chosen], mean, covariance, rows, generator)
    factor = maps.query_rows.new_zeros(len(mean), mean.shape[-1] + 1)
    return JointMaps(maps.query_rows, maps.query_bias, maps.key_rows, factor)


def far_logarithms(maps: JointMaps, scores: NearScores) -> Tensor:
    """Compute log Σ_r φ_r(q) e^{c_r·k} without g, (B, H, L, N), for all pairs, visible or not."""
    q, k = scores.read
    phi = (q @ maps.query_rows.mT + maps.query_bias.unsqueeze(-2)).log_softmax(-1)
    psi = k @ maps.key_rows.mT
    top = psi.detach().amax(-2, keepdim=True)
    logs = phi + top
    most = logs.detach().amax(-1, keepdim=True)
    return ((logs - most).exp() @ (psi - top).exp().mT).clamp_min(LEAST).log() + most


def joint_logarithms(maps: JointMaps, scores: NearScores, exact: Tensor, far: Tensor) -> Tensor:
    """Return the logarithms of all weights, normalised: exact for near keys, from the maps for far keys."""
    factor = scores.read[0] @ maps.factor[:, :-1, None] + maps.factor[:, None, -1:]
    return torch.where(scores.far, far + factor, exact).log_softmax(-1)


def joint_divergence(maps: JointMaps, scores: NearScores) -> Tensor:
    """Compute the mean Kullback-Leibler divergence of the weights from softmax, over queries with far keys: (H,)."""
    return _divergence(maps, scores, Exact.of(scores), far_logarithms(maps, scores))


def joint_output_error(maps: JointMaps, scores: NearScores, readout: Tensor | None) -> Tensor:
    """Compute `output_error` of the heads' outputs, or after W_o (out, H·D)."""
    logs = joint_logarithms(maps, scores, exact_logarithms(scores), far_logarithms(maps, scores))
    missing = scores.out - logs.exp() @ scores.v
    wanted, missing = (each.transpose(1, 2)[scores.counted].flatten(1) for each in (scores.out, missing))
    if readout is not None:
        wanted, missing = wanted @ readout.mT, missing @ readout.mT
    return missing.square().sum() / (wanted - wanted.mean(0)).square().sum().clamp_min(LEAST)


def _divergence(maps: JointMaps, scores: NearScores, exact: Exact, far: Tensor) -> Tensor:
    logs = joint_logarithms(maps, scores, exact.logs, far)
    rows = (exact.weights * (exact.weights.clamp_min(LEAST).log() - logs)).sum(-1)
    affected = scores.affected.unsqueeze(1).to(logs.dtype)
    return (rows * affected).sum((0, 2)) / affected.sum().clamp_min(1)


def fitted_factor(q: Tensor, missing: Tensor, share: Tensor) -> Tensor:
    """Fit w and c (H, d + 1) such that w·q + c is near the missing part, for q (H, n, d).

    Args:
        q: queries.
        missing: logarithm of the far keys' sum minus that of its estimate, (H, n).
        share: share of the far keys in softmax, (H, n).
    """
    x = torch.cat((q, torch.ones_like(q[..., :1])), -1).double()
    weighted = x * (share * (1 - share) + 1e-4).unsqueeze(-1)  # the derivative of the share, bounded away from 0
    curvature = weighted.mT @ x
    ridge = RIDGE * curvature.diagonal(dim1=-2, dim2=-1)[:, :-1].mean(-1, keepdim=True)
    ridge = torch.cat((ridge.expand(-1, q.shape[-1]), torch.zeros_like(ridge)), -1)
    return torch.linalg.solve(curvature + torch.diag_embed(ridge), weighted.mT @ missing.double().unsqueeze(-1))[
        ..., 0
    ].float()


def best_joint(maps: JointMaps, batches: Sequence[NearScores]) -> JointMaps:
    """Return the maps with the best τ of `TEMPERATURES` for each head, and g for that τ."""
    batches = [each for each in batches if bool(each.affected.any())]
    exact = [Exact.of(each) for each in batches]

    def rows(values: Sequence[Tensor]) -> Tensor:
        """Gather (B, H, L, ...) of all batches as (H, n, ...), for the queries with far keys."""
        return torch.cat([v.transpose(0, 1)[:, s.affected] for v, s in zip(values, batches, strict=True)], 1)

    def far_sums(logs: Sequence[Tensor]) -> Tensor:
        """Return the logarithms of the far keys' sums."""
        return rows([each.masked_fill(~s.far, ABSENT).logsumexp(-1) for each, s in zip(logs, batches, strict=True)])

    share = rows([(e.weights * s.far).sum(-1) for e, s in zip(exact, batches, strict=True)])
    q, total = rows([s.read[0] for s in batches]), far_sums([e.logs for e in exact])
    tried, found = [], []
    for tau in TEMPERATURES:
        sharp = maps.sharpened(tau)
        far = [far_logarithms(sharp, each) for each in batches]
        sharp = sharp._replace(factor=fitted_factor(q, total - far_sums(far), share))
        apart = [_divergence(sharp, *each) for each in zip(batches, exact, far, strict=True)]
        tried.append(sharp)
        found.append(torch.stack(apart).mean(0))
    best = torch.stack(found).argmin(0)
    heads = torch.arange(len(best), device=best.device)
    return JointMaps(*(torch.stack(values)[best, heads] for values in zip(*tried, strict=True)))
