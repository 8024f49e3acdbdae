"""Softmax attention by m typical queries in closed form, for `mixture` over `centroids`.

The weights of a query c over all keys, e^{c·k} / Σ_j e^{c·k_j}, can be kept as one sum over the keys. A query q is
described by its similarity to m such centres. For queries and keys that already include √(scaling):

    weight of k for q  ∝  Σ_r softmax_r((u·u_r − ‖u_r‖²/2) / τ) · exp(c_r·k + b_r),        u = C^½ q,  u_r = C^½ c_r
    b_r = −(c_r·k̄ + ‖u_r‖²/2),     the logarithm of the mean of e^{c_r·k} over Gaussian keys N(k̄, C), negated

C is the covariance of keys within a sequence: what all keys of a sequence share cancels in a softmax, and two queries
attend alike if their scores vary alike, which is distance in u. The u_r are means of clusters of queries (Lloyd), τ is
the one of `TEMPERATURES` with the least divergence from softmax. From there `descend` takes Adam steps, half of them on
the divergence of the weights and half on the error of the outputs, which closed forms do not minimise.

Shapes: G key heads, R query heads to each; q (B, G, R, L, d), k (B, G, N, d), v (B, G, N, D), out (B, G, R, L, D),
pairs (B, 1, 1, L, N) or (1, 1, 1, L, N).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from snnk_peft.solvers.descent import falling_adam

TEMPERATURES = (0.02, 0.04, 0.06, 0.1, 0.15, 0.25, 0.5, 1.0)
SWEEPS = 8  # of Lloyd's iteration
ABSENT = -1e9  # logarithm for a key that does not count
Maps = TypeVar("Maps", bound=Any)
LEAST = 1e-30  # instead of zero, in a logarithm or denominator


class CentroidMaps(NamedTuple):
    """Features of queries and keys; rows (G, m, d) and biases (G, m)."""

    query_rows: Tensor
    query_bias: Tensor
    key_rows: Tensor
    key_bias: Tensor

    def sharpened(self, tau: Tensor) -> CentroidMaps:
        """Divide the logits of the softmax over centres by τ (G,)."""
        return self._replace(query_rows=self.query_rows / tau[:, None, None], query_bias=self.query_bias / tau[:, None])


class Scores(NamedTuple):
    """Queries and keys of one batch, each times √(scaling), and their softmax attention.

    Attributes:
        q: (B, G, R, L, d).
        k: (B, G, N, d).
        v: (B, G, N, D).
        out: (B, G, R, L, D), softmax attention.
        pairs: bool, (B or 1, 1, 1, L, N), True where a query sees a key; None for all.
        counted: bool, (B, L), False at padding.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    pairs: Tensor | None
    counted: Tensor

    def some(self, most: int, generator: torch.Generator) -> Scores:
        """Keep at most so many queries of each sequence, since the weights of all need memory in its length squared."""
        if self.q.shape[-2] <= most:
            return self
        chosen = torch.randperm(self.q.shape[-2], generator=generator)[:most].sort().values.to(self.q.device)
        pairs = self.pairs
        if pairs is not None and pairs.shape[-2] > 1:
            pairs = pairs[..., chosen, :]
        q, out = self.q[..., chosen, :], self.out[..., chosen, :]
        return self._replace(q=q, out=out, pairs=pairs, counted=self.counted[:, chosen])


def key_moments(batches: Sequence[Scores]) -> tuple[Tensor, Tensor]:
    """Return k̄ (G, d), the mean of the means of sequences, and C (G, d, d), the covariance within a sequence; fp64."""
    covariance: Tensor | float = 0.0
    mean: Tensor | float = 0.0
    keys, sequences = 0, 0
    for batch in batches:
        k = batch.k.double()
        seen = torch.ones(k.shape[0], 1, k.shape[2], 1, dtype=k.dtype, device=k.device)
        if batch.pairs is not None:  # a key counts if any query sees it
            seen = batch.pairs.any(-2)[:, 0, 0, :, None].expand(k.shape[0], -1, -1).unsqueeze(1).to(k.dtype)
        count = seen.sum(2, keepdim=True)
        own = (k * seen).sum(2, keepdim=True) / count.clamp_min(1)
        centred = (k - own) * seen
        covariance = covariance + torch.einsum("bgnd,bgne->gde", centred, centred)
        mean = mean + own[:, :, 0].sum(0)
        keys, sequences = keys + int(seen.sum()), sequences + len(k)
    assert isinstance(mean, Tensor)
    assert isinstance(covariance, Tensor)
    return mean / sequences, covariance / max(keys, 1)


def centroids(
    queries: Tensor, mean: Tensor, covariance: Tensor, count: int, generator: torch.Generator
) -> CentroidMaps:
    """Compute the maps for τ = 1, in fp32, from queries (G, n, d), k̄ and C; surplus centres repeat queries."""
    # A direction in which keys do not vary says nothing about them, and its inverse is only rounding.
    floor = 1e-4 * covariance.diagonal(dim1=-2, dim2=-1).mean(-1)[:, None]
    values, vectors = torch.linalg.eigh(covariance)
    values = values.clamp_min(floor)
    root = (vectors * values.sqrt().unsqueeze(-2)) @ vectors.mT
    inverse = (vectors * values.rsqrt().unsqueeze(-2)) @ vectors.mT
    u = queries.float() @ root.float()
    total = u.shape[1]
    start = torch.cat([torch.randperm(total, generator=generator) for _ in range(-(-count // total))])[:count]
    centres = u[:, start.to(u.device)].clone()
    for _ in range(SWEEPS):
        nearest = (u @ centres.mT - centres.square().sum(-1).unsqueeze(1) / 2).argmax(-1)
        member = torch.nn.functional.one_hot(nearest, count).to(u.dtype)
        size = member.sum(1).unsqueeze(-1)
        centres = torch.where(size > 0, member.mT @ u / size.clamp_min(1), centres)
    centres = centres.double()
    half = centres.square().sum(-1) / 2
    key_rows = centres @ inverse
    key_bias = -(torch.einsum("gmd,gd->gm", key_rows, mean) + half)
    return CentroidMaps(*(each.float() for each in (centres @ root, -half, key_rows, key_bias)))


def weights(maps: CentroidMaps, scores: Scores) -> Tensor:
    """Return the weight of every key for every query, (B, G, R, L, N), up to a factor per query."""
    logits = scores.q @ maps.query_rows.mT.unsqueeze(1) + maps.query_bias[:, None, None]
    logs = scores.k @ maps.key_rows.mT + maps.key_bias.unsqueeze(1)
    if scores.pairs is not None:
        logs = logs.masked_fill(~scores.pairs.any(-2)[:, :, 0, :, None], ABSENT)
    # Every feature at the scale of its largest key, so that none vanishes: see functional/exponential_attention.py.
    top = logs.detach().amax(-2)
    found = (logits + top[:, :, None, None]).softmax(-1) @ (logs - top.unsqueeze(-2)).exp().mT.unsqueeze(2)
    return found if scores.pairs is None else found.masked_fill(~scores.pairs, 0.0)


def divergence(maps: CentroidMaps, scores: Scores) -> Tensor:
    """Compute the mean Kullback-Leibler divergence of the weights from softmax, over all queries: (G,)."""
    exact = scores.q @ scores.k.mT.unsqueeze(2)
    if scores.pairs is not None:
        exact = exact.masked_fill(~scores.pairs, ABSENT)
    found = weights(maps, scores)
    log_weights = found.clamp_min(LEAST).log() - found.sum(-1, keepdim=True).clamp_min(LEAST).log()
    wanted = exact.log_softmax(-1)
    rows = (wanted.exp() * (wanted - log_weights)).sum(-1)
    return (rows * scores.counted[:, None, None]).sum((0, 2, 3)) / (scores.counted.sum() * scores.q.shape[2])


def output_error(maps: CentroidMaps, scores: Scores, readout: Tensor | None) -> Tensor:
    """Compute the squared error of the heads' outputs relative to the variance of softmax's.

    With `readout`, after W_o (out, G·R·D), which reads all heads.
    """
    found = weights(maps, scores)
    out = (found / found.sum(-1, keepdim=True).clamp_min(LEAST)) @ scores.v.unsqueeze(2)
    wanted, missing = (
        each.permute(0, 3, 1, 2, 4)[scores.counted].flatten(1) for each in (scores.out, scores.out - out)
    )
    if readout is not None:
        wanted, missing = wanted @ readout.mT, missing @ readout.mT
    return missing.square().sum() / (wanted - wanted.mean(0)).square().sum().clamp_min(LEAST)


def sharpest(maps: CentroidMaps, batches: Sequence[Scores]) -> CentroidMaps:
    """Return the maps with the τ of `TEMPERATURES` whose weights diverge least from softmax, per head."""
    found = []
    for temperature in TEMPERATURES:
        tried = maps.sharpened(torch.full_like(maps.query_bias[:, 0], temperature))
        found.append(torch.stack([divergence(tried, batch) for batch in batches]).mean(0))
    best = torch.stack(found).argmin(0)
    return maps.sharpened(torch.tensor(TEMPERATURES).to(maps.query_bias)[best])


def descend(maps: Maps, loss: Callable[[Maps], Tensor], steps: int, *, learning_rate: float = 1e-2) -> Maps:
    """Take Adam steps on maps, a NamedTuple of rows (., m, d) and numbers; the learning rate falls linearly to zero.

    Args:
        maps: where to start.
        loss: returns a number, from other queries and keys at each call.
        steps: number of steps.
        learning_rate: of the first step, for biases and for rows of vectors without √(scaling), d^-¼.

    Raises:
        NumericalError: the loss is no longer finite.
    """
    learned = [each.clone().requires_grad_() for each in maps]
    factor = maps[0].shape[-1] ** 0.25
    rates = [learning_rate * (factor if each.dim() == 3 else 1.0) for each in learned]
    betas = (0.9, 0.999)
    falling_adam(learned, rates, lambda: loss(type(maps)(*learned)), steps, "distance from softmax", betas=betas)
    return type(maps)(*(each.detach() for each in learned))
