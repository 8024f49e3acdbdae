"""One token after a state, with near and far field under one normalisation: one softmax over keys and features.

    out = softmax([q·k_j, j near or sink;  log φ_r(q) + log Z_r + log g(q), r of each term]) · [v_j;  M_r]

M_r and log Z_r are means and weights of the far keys (functional/exponential_attention.py); the rest is as in
layers/joint_attention.py, which computes the same for any number of tokens with more than twice as many operations,
whose number is the cost of one token. Shapes: q (B, H, 1, d), near keys (B, G, w + s, d), M (B, G or H, m, D) ->
(B, H, 1, D). Tested against all tokens at once in tests/package/test_joint_attention.py.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from snnk_peft.functional.backend import exporting
from snnk_peft.functional.exponential_attention import KeyMeans
from snnk_peft.functional.log_linear import (
    ABSENT,
    LogLinear,
    both_offsets,
    half_norms,
    key_logarithms,
    query_logarithms,
)
from snnk_peft.functional.precision import full_precision, wide


def with_key(means: KeyMeans, k: Tensor, v: Tensor, counts: Tensor, keys: LogLinear) -> KeyMeans:
    """Add one key (B, G, 1, d) and its value (B, G, 1, D) to the means, where counts (B, 1) is True."""
    own = key_logarithms(k.to(keys.rows.dtype), keys.rows, keys.square, counts).squeeze(-2)
    if exporting():  # ONNX has no logaddexp, and its replacement overflows
        distance = (means.log_weight - own).abs()
        together = torch.maximum(means.log_weight, own) + (-distance).exp().log1p()
    else:
        together = torch.logaddexp(means.log_weight, own)
    share = (own - together).exp().unsqueeze(-1)
    return KeyMeans(torch.lerp(means.values, v.to(share.dtype), share), together)


def far_logarithms(q: Tensor, means: KeyMeans, queries: LogLinear, keys: LogLinear) -> Tensor:
    """Compute log φ_r(q) + log Z_r, (B, H, 1, m), for one query per head (B, H, 1, d)."""
    logs, weights = query_logarithms(q, queries.rows, means.values.shape[1]), means.log_weight
    if queries.divided:
        offset = queries.offset if queries.offset.dim() == 1 else queries.offset[..., None, None, :]
        logs, weights = (logs + offset).log_softmax(-1), weights + keys.offset
    else:
        weights = weights + both_offsets(queries, keys)
    logs = (logs + weights[:, :, None, None]).flatten(1, 2)
    if isinstance(queries.square, Tensor) or queries.square != 0:
        groups = means.values.shape[1]
        norms = half_norms(q.unflatten(1, (groups, -1)).flatten(2, 3), queries.square)
        logs = logs - norms.reshape(*q.shape[:-1], 1)
    return logs


def attend_at_once(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    counts: Tensor,
    far: Sequence[tuple[Tensor, Tensor]],
    scaling: float,
) -> Tensor:
    """Attend to keys (B, G, n, d), where counts (B, n), and to each term's logarithms (B, H, 1, m) and
    means (B, G or H, m, D); return (B, H, 1, D)."""
    with full_precision(v):
        groups, width = k.shape[1], k.shape[2]
        near = (wide(q) * scaling).unflatten(1, (groups, -1)).squeeze(3) @ wide(k).mT
        near = near.masked_fill(~counts[:, None, None], ABSENT).flatten(1, 2)
        nothing = near.new_full((*near.shape[:2], 1), ABSENT / 2)  # the only entry that a query without keys sees
        logs = torch.cat((near, *(logarithms.squeeze(2) for logarithms, _ in far), nothing), -1)
        of_near, *others, _ = logs.softmax(-1).split([width, *(means.shape[2] for _, means in far), 1], -1)
        out = _mean(of_near, wide(v))
        for weights, (_, means) in zip(others, far, strict=True):
            out = out + _mean(weights, means)
        return out.unsqueeze(2).to(v.dtype)


def _mean(weights: Tensor, values: Tensor) -> Tensor:
    """Average values (B, G, n, D) with weights (B, H, n)."""
    return (weights.unflatten(1, (values.shape[1], -1)) @ values).flatten(1, 2)
