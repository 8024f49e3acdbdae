"""Causal attention over positive exponential features, by their logarithms: exact even if keys differ by e^hundreds.

    out_i = Σ_r φ_r(q_i) Σ_{j<=i} ψ_r(k_j) v_j / Σ_r φ_r(q_i) Σ_{j<=i} ψ_r(k_j),     a = log φ(q), b = log ψ(k)

Everything before a chunk of 64 tokens enters through the means M and weights log Z of its keys
(`exponential_attention.py`). Within a chunk, weights are formed and cut to the lower triangle, in one of two ways:

    direct    φ and ψ at one scale u per feature, the largest key so far or in this block: e^{a + u} and e^{b − u}.
              Two exponentials per feature. What a row sees must not vanish next to keys that come after it: its
              denominator shows that, and where one is too small the block is recomputed the other way.
    careful   log(φ ψᵀ) by halves: rows of the second half see all keys of the first, so that there one scale per
              feature, that of the first half, loses nothing; and each half is cut in the same way. Then one softmax
              over [a + log Z, log(φ ψᵀ)]. Exact for any keys; also for graphs and accelerators.

A single token needs neither: its key is added to the means, and then it sees all keys.

Shapes: q (B, H, L, d), k (B, G, L, d), v (B, G, L, D) -> (B, H, L, D); inside, a (B, G, chunks, H/G · 64, m) and b
(B, G, chunks, 64, m). Time O(L m D + L (m + D) · 64) per head.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from snnk_peft.functional.backend import dispatched, exporting
from snnk_peft.functional.blocks import block_count, causal_tokens, joined, split_tokens, takes_blocks
from snnk_peft.functional.exponential_attention import KeyMeans, attend_means, key_means, log_weights, means_of
from snnk_peft.functional.log_linear import ABSENT, LogLinear, both_offsets, key_logarithms, query_logarithms
from snnk_peft.functional.precision import full_precision

TOKENS = 64  # per chunk
LEAST = 2.0**-60  # of a denominator, relative to its largest possible value: terms lost to underflow are e^-45 of it


@dispatched
def causal_exponential_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    queries: LogLinear,
    keys: LogLinear,
    mask: Tensor | None = None,
    state: KeyMeans | None = None,
    *,
    weighed: bool = False,
) -> tuple[Tensor, KeyMeans]:
    """Compute attention of query i to keys 0..i, and to all keys in `state` before them.

    Args:
        q: (B, H, L, d), with the features `queries`.
        k: (B, G, L, d), with the features `keys`, of the same signs.
        v: (B, G, L, D).
        queries: feature map of q.
        keys: feature map of k.
        mask: (B, L) bool, True where a key counts.
        state: state to continue from.
        weighed: return log Σ_r φ_r(q_i) Σ_{j<=i} ψ_r(k_j), except |q_i|²_Q, as a last column; not for signed features.

    Returns:
        (B, H, L, D) in the dtype of v, 0 where no key counts, and M and log Z after the last key. Weighed, (B, H, L,
        D + 1) in at least fp32, the last column about ABSENT where no key counts.
    """
    queries = queries._replace(offset=both_offsets(queries, keys), signs=keys.signs)
    length, size, careful = q.shape[-2], causal_tokens(q, queries.rows.shape[-2]), not takes_blocks(q)

    def blocks() -> Iterator[Tensor]:
        nonlocal state
        for tokens, own, values, counts in split_tokens(size, q, k, v, mask):
            out, state = _causal_block(tokens, own, values, counts, queries, keys, state, careful, weighed)
            yield out if weighed else out.to(v.dtype)

    with full_precision(v):
        if not exporting() and length == 1:
            seen = None if mask is None else _rows_with_keys(mask, state, k.shape[1])
            state = key_means(k, v, keys, mask, state)
            out = attend_means(q, state, queries)
            if weighed:
                return _with_weights(out, log_weights(q, state, queries), seen), state
            return _rows_zeroed(out, seen, q.shape[1]).to(v.dtype), state
        out = joined(blocks(), size, length)
        assert state is not None
        return out, state


def _causal_block(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    queries: LogLinear,
    keys: LogLinear,
    state: KeyMeans | None,
    careful: bool,
    weighed: bool,
) -> tuple[Tensor, KeyMeans]:
    rows, groups, length = queries.rows, k.shape[1], q.shape[-2]
    q, k, v = (t.to(rows.dtype) for t in (q, k, v))
    seen = None if mask is None else _rows_with_keys(mask, state, groups)
    if state is None:
        shape = (*k.shape[:2], rows.shape[-2])
        state = KeyMeans(v.new_zeros(*shape, v.shape[-1]), v.new_full(shape, ABSENT))
    chunk = TOKENS
    while not exporting() and chunk // 2 >= length:
        chunk //= 2
    chunks = block_count(length, chunk)
    padding = chunks * chunk - length
    values = _in_chunks(v, chunks, padding, 0.0)

    def logarithms() -> tuple[Tensor, Tensor]:
        a = _in_chunks(query_logarithms(q, rows, groups), chunks, padding, 0.0)
        b = _in_chunks(key_logarithms(k, keys.rows, keys.square, mask), chunks, padding, ABSENT)
        # Rows of all query heads of a group side by side, chunk by chunk.
        return a.transpose(2, 3).flatten(3, 4), b

    def tokens(rows: Tensor) -> Tensor:
        rows = rows.unflatten(3, (-1, chunk)).transpose(2, 3).flatten(3, 4)
        return (rows[..., :length, :] if exporting() or padding else rows).flatten(1, 2)

    def result(out: Tensor, weights: Tensor) -> Tensor:
        if weighed:
            return _with_weights(tokens(out), tokens(weights).squeeze(-1), seen)
        return _rows_zeroed(tokens(out), seen, q.shape[1])

    if not careful:
        numerator, denominator, scale, behind = _direct(*logarithms(), values, state, queries, weighed)
        small = tokens(denominator.detach()).squeeze(-1).abs() < LEAST
        if not bool((small if seen is None else small & seen.repeat_interleave(q.shape[1] // groups, 1)).any()):
            denominator = denominator if seen is None else torch.where(denominator == 0, 1.0, denominator)
            # In place if no gradient needs the numerator: fresh memory costs more than the division.
            out = numerator / denominator if torch.is_grad_enabled() else numerator.div_(denominator)
            return result(out, denominator.log().add_(scale) if weighed else denominator), behind
    out, weights, behind = _careful(*logarithms(), values, state, queries)
    return result(out, weights), behind


def _in_chunks(x: Tensor, chunks: int, padding: int, value: float) -> Tensor:
    """Split (..., L, n) -> (..., chunks, tokens, n)."""
    if exporting() or padding:
        x = torch.nn.functional.pad(x, (0, 0, 0, padding), value=value)
    # Contiguous, since it would otherwise be copied for each of two products.
    return x.contiguous().unflatten(-2, (chunks, -1))


def _rows_with_keys(mask: Tensor, state: KeyMeans | None, groups: int) -> Tensor:
    """Return (B, G, L) bool, True where a query has at least one key."""
    own = (mask.long().cumsum(-1) > 0)[:, None].expand(-1, groups, -1)
    return own if state is None else own | state.seen.unsqueeze(-1)


def _rows_zeroed(out: Tensor, seen: Tensor | None, heads: int) -> Tensor:
    if seen is None:
        return out
    return out.masked_fill(~seen.repeat_interleave(heads // seen.shape[1], 1).unsqueeze(-1), 0.0)


def _with_weights(out: Tensor, weights: Tensor, seen: Tensor | None) -> Tensor:
    """Join (B, H, L, D) and logarithms (B, H, L) in one tensor; 0 and ABSENT where a row has no key."""
    if seen is not None:
        weights = weights.masked_fill(~seen.repeat_interleave(weights.shape[1] // seen.shape[1], 1), ABSENT)
    return torch.cat((_rows_zeroed(out, seen, out.shape[1]), weights.unsqueeze(-1)), -1)


def _direct(
    a: Tensor, b: Tensor, v: Tensor, state: KeyMeans, queries: LogLinear, weighed: bool
) -> tuple[Tensor, Tensor, Tensor | float, KeyMeans]:
    """Return numerators (B, G, chunks, rows, D), denominators (..., 1), the logarithm of their divisor (0 unless
    `weighed`), and the state after the last chunk."""
    top = torch.maximum(b.detach().amax((-3, -2)), state.log_weight.detach())
    psi = b.sub_(top[:, :, None, None]).exp_()
    before = (state.log_weight - top).exp()
    # The part of the largest weight that cancels; e^(a + top) alone could overflow.
    a = a.add_((top + queries.offset)[:, :, None, None])
    phi, scale = a.softmax(-1), a.logsumexp(-1, keepdim=True) if weighed else 0.0
    phi = phi if queries.signs is None else phi * queries.signs
    sums, totals = psi.mT @ v, psi.sum(-2)
    shape, sums = sums.shape[-2:], sums.flatten(-2)
    earlier = sums.new_ones(sums.shape[2], sums.shape[2]).tril(-1)
    S = (earlier @ sums).add_((before.unsqueeze(-1) * state.values).flatten(-2).unsqueeze(2))
    z = (earlier @ totals).add_(before.unsqueeze(2))
    weights = phi @ psi.mT
    weights.unflatten(-2, (-1, b.shape[-2])).tril_()
    numerator = (phi @ S.unflatten(-1, shape)).flatten(0, 2)
    numerator = torch.baddbmm(numerator, weights.flatten(0, 2), v.flatten(0, 2)).unflatten(0, v.shape[:3])
    denominator = (phi @ z.unsqueeze(-1)).add_(weights.sum(-1, keepdim=True))
    total = z[:, :, -1] + totals[:, :, -1]
    values = (S[:, :, -1] + sums[:, :, -1]).unflatten(-1, shape) / total.unsqueeze(-1)
    return numerator, denominator, scale, KeyMeans(values, total.log() + top)


def _careful(a: Tensor, b: Tensor, v: Tensor, state: KeyMeans, queries: LogLinear) -> tuple[Tensor, Tensor, KeyMeans]:
    """Return results (B, G, chunks, rows, D), logarithms of denominators (..., 1), and the state after all chunks."""
    a, signs = a + (queries.offset if queries.offset.dim() == 1 else queries.offset[..., None, None, :]), queries.signs
    prefixes, behind = _prefixes(means_of(b.clone(), v), state)
    within, of_within = _pairs(a.unflatten(3, (-1, b.shape[-2])), b.unsqueeze(3), signs)
    logs = torch.cat((a + prefixes.log_weight.unsqueeze(-2), within.flatten(3, 4)), -1)
    weights = logs.softmax(-1)
    if signs is not None and of_within is not None:
        weights = weights * torch.cat((signs.expand(a.shape), of_within.flatten(3, 4)), -1)
    out = weights @ torch.cat((prefixes.values, v), -2)
    out = out if signs is None else out / weights.sum(-1, keepdim=True)
    return out, logs.logsumexp(-1, keepdim=True), behind


def _pairs(a: Tensor, b: Tensor, signs: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Compute log |Σ_r σ_r e^{a_ir + b_jr}| for j <= i in a chunk, below ABSENT for j > i, and the sums' signs.

    a and b are (..., tokens, m), tokens a power of two; if σ (m,) is None it is 1, and None is returned for the signs.
    """
    tokens, size, found, of_found = a.shape[-2], 1, *_log_products(a.unsqueeze(-2), b.unsqueeze(-2), signs)
    while size < tokens:
        # The blocks (..., tokens / size, size, size) on the diagonal become blocks of twice the size.
        halves = (tokens // (2 * size), 2, size)
        rows, keys = (x.unflatten(-2, halves).select(-3, place) for x, place in ((a, 1), (b, 0)))
        logs, of_logs = _log_products(rows, keys, signs)
        found = _doubled(found, logs, 2 * ABSENT)
        of_found = None if of_found is None or of_logs is None else _doubled(of_found, of_logs, 1.0)
        size *= 2
    return found.squeeze(-3), None if of_found is None else of_found.squeeze(-3)


def _doubled(diagonal: Tensor, below: Tensor, above: float) -> Tensor:
    """Form [[first, above], [below, second]] of neighbours (..., 2n, s, s) on the diagonal: (..., n, 2s, 2s)."""
    first, second = diagonal.unflatten(-3, (-1, 2)).unbind(-3)
    upper = torch.cat((first, torch.full_like(first, above)), -1)
    return torch.cat((upper, torch.cat((below, second), -1)), -2)


def _log_products(a: Tensor, b: Tensor, signs: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Compute log |Σ_r σ_r e^{a_ir + b_jr}| for all rows and keys of a block, and the sums' signs (None without σ)."""
    top = b.detach().amax(-2, keepdim=True)
    shifted = a + top
    largest = shifted.detach().amax(-1, keepdim=True)
    phi, psi = (shifted - largest).exp(), (b - top).exp()
    # Next to a row's largest product with the keys of the block, which is at least 1, what is cut off is negligible.
    products = (phi if signs is None else phi * signs) @ psi.mT
    logs = products.abs().clamp_min(torch.finfo(a.dtype).tiny).log() + largest
    return logs, None if signs is None else products.detach().sign()


def _prefixes(chunks: KeyMeans, state: KeyMeans) -> tuple[KeyMeans, KeyMeans]:
    """Compute M and log Z before each chunk, (B, G, chunks, m, D) and (B, G, chunks, m), and after the last one."""
    values = torch.cat((state.values.unsqueeze(2), chunks.values), 2)
    log_weight = torch.cat((state.log_weight.unsqueeze(2), chunks.log_weight), 2)
    count = log_weight.shape[2]
    later = log_weight.new_full((count, count), 2 * ABSENT).triu(1)
    # Row x of each feature: the weights of the state and of chunks 0..x-1, (B, G, m, chunks + 1, chunks + 1).
    seen = log_weight.transpose(2, 3).unsqueeze(-2) + later
    means = torch.einsum("bgrxc,bgcrd->bgxrd", seen.softmax(-1), values)
    weights = seen.logsumexp(-1).transpose(2, 3)
    last = KeyMeans(means[:, :, -1], weights[:, :, -1])
    return KeyMeans(means[:, :, :-1], weights[:, :, :-1]), last
