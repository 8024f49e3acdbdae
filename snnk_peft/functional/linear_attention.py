"""Attention in linear time: softmax weights replaced by φ(q)·ψ(k), so that sums over keys are shared by all queries.

    out_i = Σ_j φ(q_i)·ψ(k_j) v_j / Σ_j φ(q_i)·ψ(k_j)  =  φ(q_i) S / φ(q_i) z,     S = Σ_j ψ(k_j) v_jᵀ,  z = Σ_j ψ(k_j)

(Katharopoulos et al. 2020; FAVOR+; the lecture.) The causal form is in `causal_attention.py`. Shapes: q (B, H, L, m),
k (B, G, N, m), v (B, G, N, D) -> (B, H, L, D), with H a multiple of G (grouped-query attention); a mask (B, N) is True
where a key counts. Cost O((L + N) m D) per head; memory O(L (m + D)).

What enters are features, not queries and keys: masks act on ψ(k), since ψ(0) is not zero. A factor common to the
features of one query cancels; of the keys only one number per batch entry and head may be taken out (`common_scale`):
taking out a maximum per key would silently weigh the keys. Sums are accumulated in at least fp32, also under autocast.
A query whose keys are all masked gives 0."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from snnk_peft.functional.backend import dispatched
from snnk_peft.functional.precision import full_precision, wide


class AttentionState(NamedTuple):
    """Sums over keys; their size does not depend on how many there were.

    Attributes:
        values: S (B, G, m, D) in at least fp32.
        normaliser: z (B, G, m).
        log_scale: (B, G, 1), the true sums are S and z times exp(log_scale). −∞ where no key counted so far: zeros
            have no scale, and a finite one would make later, smaller keys vanish beside it.
    """

    values: Tensor
    normaliser: Tensor
    log_scale: Tensor


def common_scale(
    values: Tensor, log_scale: Tensor | None, mask: Tensor | None = None, *, overwrite: bool = False
) -> tuple[Tensor, Tensor]:
    """Features of keys with one scale per batch entry and head.

    Args:
        values: (B, G, N, m).
        log_scale: broadcastable to (B, G, N, 1), the features are values · exp(log_scale); None for 0.
        mask: (B, N) bool; masked keys become 0 and do not count for the scale.
        overwrite: whether `values` may be used for the result where no gradient is needed: fresh memory of this size
            costs more than the product.

    Returns:
        Features (B, G, N, m) in at least fp32, and the logarithm of the factor taken out of them, (B, G, 1): 0
        without `log_scale`, else −∞ where no key counts.
    """
    values = wide(values)
    if mask is not None:
        keep = mask[:, None, :, None]
        values = values.masked_fill(~keep, 0.0)
    if log_scale is None:
        return values, values.new_zeros(*values.shape[:2], 1)
    log_scale = log_scale.to(values.dtype).expand(*values.shape[:-1], 1)
    if mask is not None:
        log_scale = log_scale.masked_fill(~keep, float("-inf"))
    top = log_scale.detach().amax(-2)
    factor = (log_scale - finite(top).unsqueeze(-2)).exp()
    if not overwrite or (torch.is_grad_enabled() and (values.requires_grad or factor.requires_grad)):
        return values * factor, top
    return values.mul_(factor), top


def finite(log_scale: Tensor) -> Tensor:
    """0 for −∞: zeros may have any scale."""
    return torch.where(log_scale.isfinite(), log_scale, 0.0)


def grouped(q: Tensor, groups: int) -> Tensor:
    """(B, H, L, m) -> (B, G, H/G, L, m)."""
    return q.unflatten(1, (groups, q.shape[1] // groups))


def divide(numerator: Tensor, denominator: Tensor) -> Tensor:
    """Where no key counts, both are 0 and so is the result."""
    return numerator / torch.where(denominator == 0, 1.0, denominator)


@dispatched
def key_sums(
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    *,
    log_scale: Tensor | None = None,
    state: AttentionState | None = None,
    overwrite: bool = False,
) -> AttentionState:
    """S and z of these keys, and of those in `state`.

    Args:
        k: features of the keys, (B, G, N, m), but for their scales.
        v: values, (B, G, N, D).
        mask: (B, N) bool, True where a key counts.
        log_scale: broadcastable to (B, G, N, 1): the features are k · exp(log_scale). None for 0.
        state: sums over other keys, of the same feature map.
        overwrite: whether `k` may be, see `common_scale`.
    """
    with full_precision(v):
        k, top = common_scale(k, log_scale, mask, overwrite=overwrite)
        sums, normaliser = torch.einsum("bgnm,bgnd->bgmd", k, wide(v)), k.sum(-2)
        if state is None:
            return AttentionState(sums, normaliser, top)
        both = torch.maximum(state.log_scale, top)
        old, new = ((scale - finite(both)).exp() for scale in (state.log_scale, top))
        return AttentionState(
            torch.addcmul(state.values * old.unsqueeze(-1), sums, new.unsqueeze(-1)),
            torch.addcmul(state.normaliser * old, normaliser, new),
            both,
        )


def attend(q: Tensor, state: AttentionState, dtype: torch.dtype) -> Tensor:
    """Every query attends to every key in `state`: (B, H, L, m) -> (B, H, L, D).

    Args:
        q: features of the queries; the scale of each may be left out.
        state: sums over the keys.
        dtype: of the result.
    """
    with full_precision(q):
        q = grouped(wide(q), state.normaliser.shape[1])
        numerator = torch.einsum("bghlm,bgmd->bghld", q, state.values)
        denominator = torch.einsum("bghlm,bgm->bghl", q, state.normaliser).unsqueeze(-1)
        return divide(numerator, denominator).flatten(1, 2).to(dtype)


def linear_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    """Every query attends to every key.

    Args:
        q: features of the queries, (B, H, L, m); the scale of each may be left out.
        k: features of the keys, (B, G, N, m), with one scale per head (`common_scale`).
        v: values, (B, G, N, D).
        mask: (B, N) bool, True where a key counts.

    Returns:
        (B, H, L, D), in the dtype of v.
    """
    return attend(q, key_sums(k, v, mask), v.dtype)
