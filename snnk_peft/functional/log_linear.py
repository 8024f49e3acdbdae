"""Positive features by their logarithms: log f_r(x) = ω_r·x + c_r − |x|²_Q, linear in x but for one number per vector.

All positive estimates of the softmax kernel are of this form (`components/base_exponential.py`). Attention uses the
logarithms: common factors of several features or tokens can then be removed before anything is exponentiated, so
that nothing overflows and nothing that counts vanishes. |x|²_Q = xᵀQx is common to all features of a vector: in queries
it cancels. Shapes: x (..., L, d), rows (m, d) or (..., m, d), logarithms (..., L, m).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

# The logarithm for a masked key or no key at all: finite, since −∞ − (−∞) has no value and no
# gradient, and so far below every other logarithm that its exponential next to one of them is exactly 0.
ABSENT = -1e9


class LogLinear(NamedTuple):
    """Features exp(rows·x + offset − |x|²) · signs of vectors x.

    Attributes:
        rows: (m, d), or one per leading index (..., m, d).
        offset: (m,) or (..., m).
        square: Q of |x|², without gradient: one number for Q = square · I, (..., 1, d) for a diagonal, or (..., d, d).
        signs: ±1 (m,), or None if all are positive.
        divided: whether the features of a vector are then divided by their sum (a softmax).
    """

    rows: Tensor
    offset: Tensor
    square: float | Tensor
    signs: Tensor | None = None
    divided: bool = False

    def of_scaled(self, factor: float) -> LogLinear:
        """Return the features as functions of x, given those of factor · x."""
        return self._replace(rows=self.rows * factor, square=self.square * factor**2)

    def for_each_half(self) -> LogLinear:
        """Return the features of two batches, one after the other, given those of one."""

        def twice(x: Tensor, alone: int) -> Tensor:
            return torch.cat((x, x)) if x.dim() > alone else x

        square = twice(self.square, 3) if isinstance(self.square, Tensor) else self.square
        return self._replace(rows=twice(self.rows, 3), offset=twice(self.offset, 2), square=square)


def stack_heads(parts: list[LogLinear]) -> LogLinear:
    """Stack the features of several heads, for vectors (B, heads, L, d); leading dimensions of each are (B)."""
    if len(parts) == 1:
        return parts[0]
    first = parts[0]
    square = first.square
    if isinstance(square, Tensor) and square.dim() > 0:
        square = torch.stack([torch.as_tensor(part.square) for part in parts], -3)
    rows, offset = torch.stack([part.rows for part in parts], -3), torch.stack([part.offset for part in parts], -2)
    return LogLinear(rows, offset, square, first.signs, first.divided)


NOTHING = "snnk_nothing"  # marks a key offset of zeros, which the queries have absorbed


def both_offsets(queries: LogLinear, keys: LogLinear) -> Tensor:
    """Return the offset of a product of query and key features, (m,) or (..., m)."""
    return queries.offset if hasattr(keys.offset, NOTHING) else queries.offset + keys.offset


def with_one_offset(queries: LogLinear, keys: LogLinear) -> tuple[LogLinear, LogLinear]:
    """Move the keys' offset to the queries, for attention; `divided` features keep their own."""
    if queries.divided:
        return queries, keys
    nothing = torch.zeros_like(keys.offset)
    setattr(nothing, NOTHING, True)
    return queries._replace(offset=both_offsets(queries, keys)), keys._replace(offset=nothing)


def half_norms(x: Tensor, square: float | Tensor) -> Tensor:
    """Compute |x|²_Q, (..., L, 1); the plain norm needs no temporary of the size of x."""
    if not isinstance(square, Tensor) or square.dim() == 0:  # a traced graph turns numbers into tensors
        return torch.linalg.vector_norm(x, dim=-1, keepdim=True).square() * square
    weighted = x * square if square.shape[-2] == 1 else x @ square
    return (weighted * x).sum(-1, keepdim=True)


def key_logarithms(
    k: Tensor, rows: Tensor, square: float | Tensor, mask: Tensor | None = None, out: Tensor | None = None
) -> Tensor:
    """Compute log features of keys (at least fp32), without offset: (B, G, N, d) -> (B, G, N, m), or into `out`.

    Rows are (m, d) or (B, G, m, d); masked keys (B, N) get ABSENT. The caller may overwrite the result.
    """
    logs = torch.matmul(k, rows.mT, out=out)
    if isinstance(square, Tensor) or square != 0:
        logs = logs.sub_(half_norms(k, square))
    return logs if mask is None else logs.masked_fill_(~mask[:, None, :, None], ABSENT)


def common_logarithm(q: Tensor, features: LogLinear, groups: int) -> Tensor:
    """Return the logarithm that `query_logarithms` omits, common to a query's features, (B, H, L), for G groups."""
    common = -half_norms(q.unflatten(1, (groups, -1)).flatten(2, 3), features.square).reshape(q.shape[:-1])
    if not features.divided:
        return common
    offset = features.offset if features.offset.dim() == 1 else features.offset[..., None, None, :]
    return common - (query_logarithms(q, features.rows, groups) + offset).logsumexp(-1).flatten(1, 2)


def query_logarithms(q: Tensor, rows: Tensor, groups: int, out: Tensor | None = None) -> Tensor:
    """Compute log features of queries, without offset: (B, H, L, d) -> (B, G, H/G, L, m), likewise."""
    q = q.unflatten(1, (groups, -1))
    return torch.matmul(q, rows.mT if rows.dim() == 2 else rows.mT.unsqueeze(-3), out=out)
