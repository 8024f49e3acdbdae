"""Narrower layers in closed form, from second moments, without another pass over the tokens.

**Fewer hidden units.** An FFN computes W h, a narrower one A h_S for the kept units S. With the second moment C of all
hidden units (centred where a bias is fitted as well)

    error     tr (W − A) C (W − A)ᵀ                 with zeros in A outside of S
    repair    A = W_S + W_R C_RS (C_SS + λ)⁻¹       R the other units: ridge regression of their output, so that a
                                                    large λ leaves the old columns

Two rules for S. "greedy": repeatedly remove the unit without which the repaired error is smallest. Its cost is
‖a‖² / P_jj with a its column of the repaired A and P the inverse of C_SS + λ, and both follow from one rank-one step
(as in Optimal Brain Surgeon, Hassibi & Stork 1993). "leverage": the largest ridge leverage scores, the diagonal of
C (C + λI)⁻¹ with λ the mean of the diagonal of C (in the manner of MoDeGPT, Lin et al. 2024, type I), without W.

**Narrower attention heads**: the best product of rank r in place of one of rank d. What a head computes depends on
queries and keys only through q·k, and on values and outputs only through W_o W_v. P, R (r, d) replace the identity:

    q·k         ≈ (P q)·(R k)          minimising E (q·k − (Pq)·(Rk))² over independent queries and keys
    W_o v       ≈ (W_o Rᵀ)(P v)        the same problem, with the columns of W_o as keys

By Eckart and Young, with M = C_q^½ C_k^½ = U S Vᵀ, cut to r: P = S^½ Uᵀ C_q^-½, R = S^½ Vᵀ C_k^-½. With the second
moments of weights alone these are the singular vectors of W_qᵀ W_k and W_o W_v themselves, found in d dimensions.

**Low rank**: min over U, V, b' of E‖(U Vᵀ x + b') − (W x + b)‖². U Vᵀ = Q Qᵀ W with Q the leading eigenvectors of W S
Wᵀ, the principal components of the output, S = Cov x with a bias and E x xᵀ without; b' = b + (W − U Vᵀ) E x.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from snnk_peft.errors import ConfigError
from snnk_peft.functional.minimize import minimize
from snnk_peft.solvers.corrected import Target, fit_corrected, moved
from snnk_peft.solvers.landmarks import SecondMoments

RULES = ("greedy", "leverage")
RIDGE = 1e-3  # relative to the mean of the diagonal, while units are chosen


class NarrowFit(NamedTuple):
    """Kept units and the contraction after them.

    Attributes:
        kept: indices of the units, (m,), ascending.
        weight: A (o, m).
        offset: (o,), to be added to the bias, or None without intercept.
        ridge: the chosen λ as a fraction of the mean second moment of the kept units.
        error: squared error on the held-out tokens, relative to the variance of W h there.
    """

    kept: Tensor
    weight: Tensor
    offset: Tensor | None
    ridge: float
    error: float


def second_moment(moments: SecondMoments, centre: Tensor | None = None) -> Tensor:
    """Return E (h − c)(h − c)ᵀ, (l, l), about a point c (l,); None for the origin."""
    covariance = moments.covariance()
    step = moments.mean if centre is None else moments.mean - centre
    return covariance.addr(step, step)


def choose_units(moment: Tensor, weight: Tensor, count: int, *, rule: str = "greedy", ridge: float = RIDGE) -> Tensor:
    """Return the hidden units to keep, (count,), ascending, from C (l, l) and the contraction W (o, l) after them.

    `ridge` is that of the rule "greedy", as a fraction of the mean of the diagonal of C.

    Raises:
        ConfigError: unknown rule, or more units than there are.
    """
    units = len(moment)
    if rule not in RULES:
        raise ConfigError(f"rule is {rule!r}; expected one of {', '.join(RULES)}")
    if not 1 <= count <= units:
        raise ConfigError(f"number of units to keep is {count}; expected 1 to {units}, the hidden units of the layer")
    mean = moment.diagonal().mean().clamp_min(torch.finfo(moment.dtype).tiny)
    identity = torch.eye(units, dtype=moment.dtype, device=moment.device)
    if rule == "leverage":
        scores = torch.linalg.solve(moment + mean * identity, moment).diagonal()
        return scores.topk(count).indices.sort().values
    inverse = torch.linalg.inv(moment + ridge * mean * identity)
    weight = weight.to(moment).clone()
    kept = torch.ones(units, dtype=torch.bool, device=moment.device)
    for _ in range(units - count):
        cost = weight.square().sum(0) / inverse.diagonal()
        worst = int(cost.masked_fill(~kept, torch.inf).argmin())
        kept[worst] = False
        row = inverse[worst] / inverse[worst, worst]
        weight.addr_(weight[:, worst].clone(), row, alpha=-1.0)
        inverse.addr_(inverse[worst].clone(), row, alpha=-1.0)
    return kept.nonzero().squeeze(1)


def narrow_units(
    train: SecondMoments,
    held_out: SecondMoments,
    weight: Tensor,
    count: int,
    *,
    rule: str = "greedy",
    ridges: Sequence[float],
    intercept: bool,
    refit: bool = False,
    metric: Tensor | None = None,
) -> NarrowFit:
    """Choose units, and the contraction after them with its ridge chosen on held-out tokens.

    Args:
        train: moments of the hidden units (l,), of the tokens to fit; with a metric, also of the missing part (o,) that
            follows them (`corrected.py`).
        held_out: the same for other tokens.
        weight: W (o, l).
        count: units to keep.
        rule: see `choose_units`.
        ridges: candidates, as fractions of the mean second moment of the kept units.
        intercept: whether there is a bias that can absorb the lost part of the mean.
        refit: finally fit to all tokens; the error remains the one measured before.
        metric: R (o, o), in which errors are measured; None for the identity.
    """
    outputs, units = weight.shape
    weight = weight.to(train.scatter)
    moment = second_moment(train, train.mean if intercept else None)
    seen = weight
    if metric is not None:
        # The reference for what is lost is the best readout of all units.
        inside, mean = moment[:units, :units], moment.diagonal()[:units].mean()
        seen = (
            weight + torch.linalg.solve(inside + RIDGE * mean * torch.eye(units).to(inside), moment[:units, units:]).T
        )
        seen = metric.to(weight) @ seen
    kept = choose_units(moment[:units, :units], seen, count, rule=rule)
    missing = None if metric is None else slice(units, units + outputs)
    whole = Target(torch.nn.functional.pad(weight, (0, len(train.mean) - units)), missing)
    fit = fit_corrected(
        train,
        held_out,
        kept,
        moved(whole, kept, weight[:, kept]),  # a large ridge leaves the old columns
        torch.eye(outputs) if metric is None else metric,
        ridges,
        intercept=intercept,
        refit=refit,
        spread=whole,
    )
    return NarrowFit(kept, weight[:, kept] + fit.weight, fit.bias, fit.ridge, fit.error)


# Directions in which vectors vary less than this, relative to the largest, count as rounding.
FLOOR = 1e-10


def roots_of(moment: Tensor) -> tuple[Tensor, Tensor]:
    """Return C^½ and C^−½ of symmetric non-negative C (..., d, d) on its range; directions outside of it become 0."""
    values, vectors = torch.linalg.eigh(moment)
    inside = values > FLOOR * values.amax(-1, keepdim=True)
    root = values.clamp_min(torch.finfo(values.dtype).tiny).sqrt()
    powers = (torch.where(inside, each, 0.0).unsqueeze(-2) for each in (root, 1 / root))
    one, other = ((vectors * each) @ vectors.mT for each in powers)
    return one, other


def narrow_products(left: Tensor, right: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Return P, R (heads, size, d) that keep the products of two kinds of vectors with second moments (heads, d, d)."""
    (left, from_left), (right, from_right) = roots_of(left), roots_of(right)
    U, S, Vh = torch.linalg.svd(left @ right)
    scale = S[..., :size].sqrt().unsqueeze(-1)
    return scale * U[..., :size].mT @ from_left, scale * Vh[..., :size, :] @ from_right


def narrow_values(gram: Tensor, cross: Tensor, heads: int, size: int, *, steps: int = 100) -> Tensor:
    """Return directions E (heads, size, d) of every head's output z, kept as E z, that best reproduce the target.

    The target is reconstructed from them by a linear map.

    Reduced-rank regression of one head after the other on what the others leave, since heads are partly redundant,
    gives the start. Further sweeps converge slowly (thousands of them if heads are nearly redundant): L-BFGS continues
    from there, over all directions at once with the best map after them, until nothing is gained, for at most `steps`
    (for 12 heads that share most of their information, cut from 32 dimensions to 16: 0.00391 is lost after 100 steps,
    0.00386 after 2,000, and after eight rounds of regressions 0.00454).

    Args:
        gram: (heads·d, heads·d), centred second moment of the heads' concatenated outputs, up to a factor.
        cross: (out, heads·d), the second moment of the target with them, up to the same factor.
        heads: number of heads.
        size: directions kept per head.
    """
    dim, out = len(gram) // heads, len(cross)
    gram = gram.clone()
    gram.diagonal().add_(1e-4 * gram.diagonal().mean().clamp_min(torch.finfo(gram.dtype).tiny))
    whiten = torch.stack([roots_of(gram[at : at + dim, at : at + dim])[1] for at in range(0, len(gram), dim)])
    whole = torch.block_diag(*whiten)
    gram, cross = whole @ gram @ whole, cross @ whole  # each head whitened
    best = torch.linalg.solve(gram, cross.mT).mT
    told = float((best * cross).sum())  # part of the target explained by all directions
    readout, kept = best.clone(), []  # (out, heads·d)
    for head in range(heads):
        own = slice(head * dim, (head + 1) * dim)
        readout[:, own] = 0
        U, S, Vh = torch.linalg.svd(cross[:, own] - readout @ gram[:, own], full_matrices=False)
        kept.append(Vh[:size])
        readout[:, own] = (U[:, :size] * S[:size]) @ Vh[:size]
    start = torch.stack(kept)
    if size == dim or told <= 0:
        return start @ whiten
    by_head, target = gram.reshape(heads, dim, heads * dim), cross.mT.reshape(heads, dim, out)

    def lost(rows: Tensor) -> Tensor:
        """Return the share that the best map of the kept directions misses; rows E (heads, size, d)."""
        among = (rows @ by_head).reshape(heads * size, heads, dim).transpose(0, 1) @ rows.mT  # E gram Eᵀ, head by head
        among = among.transpose(0, 1).reshape(heads * size, heads * size)
        seen = (rows @ target).reshape(heads * size, out)
        root, failed = torch.linalg.cholesky_ex(among)
        share = torch.linalg.solve_triangular(root, seen, upper=False).square().sum() / told
        return torch.where(failed > 0, torch.inf, 1 - share)

    before = float(lost(start))
    if before < FLOOR:
        return start @ whiten
    return minimize(lambda rows: lost(rows) / before, [start], steps=steps)[0] @ whiten


def principal_factors(weight: Tensor, moment: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Return U (out, rank) and V (in, rank) that minimise tr (U Vᵀ − W) S (U Vᵀ − W)ᵀ, balanced (UᵀU = VᵀV); fp64."""
    weight, moment = weight.double(), moment.double()
    out, columns = weight.shape
    if out <= columns:
        components = torch.linalg.eigh(weight @ moment @ weight.T).eigenvectors[:, out - rank :]
    else:  # the same from the smaller matrix: left singular vectors of W S^½
        values, vectors = torch.linalg.eigh(moment)
        scaled = weight @ (vectors * values.clamp_min(0).sqrt())
        right = torch.linalg.eigh(scaled.T @ scaled).eigenvectors[:, columns - rank :]
        components = torch.linalg.qr(scaled @ right).Q
    left, values, right = torch.linalg.svd(components.T @ weight, full_matrices=False)
    root = values.sqrt()
    return components @ left * root, right.T * root
