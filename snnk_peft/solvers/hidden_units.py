"""Fewer hidden units in closed form: the units that an FFN keeps, and a contraction that makes up for the others.

An FFN gives W h, a narrower one A h_S for the kept units S. With the second moment C of all hidden units (centred where
a bias is fitted as well) no token is needed again:

    error     tr (W − A) C (W − A)ᵀ                 with zeros in A outside of S
    repair    A = W_S + W_R C_RS (C_SS + λ)⁻¹       R the other units: ridge regression of what they gave, so that a
                                                    large λ leaves the old columns

Two rules for S:
- "greedy": the unit without which the error, repaired, is least is taken out, one after the other. Its cost is
  ‖a‖² / P_jj with a its column of the repaired A and P the inverse of C_SS + λ, and both follow from one rank-one step
  (as in Optimal Brain Surgeon, Hassibi & Stork 1993).
- "leverage": the largest ridge leverage scores, the diagonal of C (C + λI)⁻¹ with λ the mean of the diagonal of C (in
  the manner of MoDeGPT, Lin et al. 2024, type I). It does not look at W.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from snnk_peft.errors import ConfigError
from snnk_peft.functional.relative_error import relative_error
from snnk_peft.solvers.landmarks import SecondMoments

RULES = ("greedy", "leverage")
RIDGE = 1e-3  # of the mean of the diagonal, while units are chosen


class NarrowFit(NamedTuple):
    """Kept units and the contraction after them.

    Attributes:
        kept: indices of the units, (m,), ascending.
        weight: A (o, m).
        offset: (o,), what to add to the bias, or None without intercept.
        ridge: the chosen λ as a fraction of the mean second moment of the kept units.
        error: squared error on the held-out tokens, relative to the variance of W h there.
    """

    kept: Tensor
    weight: Tensor
    offset: Tensor | None
    ridge: float
    error: float


def second_moment(moments: SecondMoments, centre: Tensor | None = None) -> Tensor:
    """E (h − c)(h − c)ᵀ, (l, l), about a point c (l,); None for the origin."""
    covariance = moments.covariance()
    step = moments.mean if centre is None else moments.mean - centre
    return covariance.addr(step, step)


def choose_units(moment: Tensor, weight: Tensor, count: int, *, rule: str = "greedy", ridge: float = RIDGE) -> Tensor:
    """Indices of the hidden units to keep, (count,), ascending.

    Args:
        moment: C (l, l), second moment of the hidden units.
        weight: W (o, l), the contraction after them.
        count: how many to keep, <= l.
        rule: "greedy" or "leverage", see the module's docstring.
        ridge: of "greedy", as a fraction of the mean of the diagonal of C.

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
) -> NarrowFit:
    """Choose units, and the contraction after them with its ridge chosen on held-out tokens.

    Args:
        train: moments of the hidden units (l,), of the tokens to fit.
        held_out: the same for other tokens.
        weight: W (o, l).
        count: units to keep.
        rule: see `choose_units`.
        ridges: candidates, as fractions of the mean second moment of the kept units.
        intercept: whether there is a bias that can take up what is lost of the mean.
        refit: once units and ridge are chosen, fit to all tokens, the held-out ones included; the error stays the one
            that was measured before.
    """
    centre = train.mean if intercept else None
    moment, other = second_moment(train, centre), second_moment(held_out, centre)
    weight = weight.to(moment)
    kept = choose_units(moment, weight, count, rule=rule)
    fit = _repair(moment, other, weight, kept, ridges)
    variance = float(torch.einsum("ol,lk,ok->", weight, held_out.covariance(), weight))
    square = variance + float((weight @ held_out.mean).square().sum())
    fit = fit._replace(error=relative_error(fit.error, variance, square))
    if refit:
        together = SecondMoments(len(train.mean))
        together.merge(train)
        together.merge(held_out)
        centre = together.mean if intercept else None
        moment = second_moment(together, centre)
        fit = fit._replace(weight=_repair(moment, moment, weight, kept, [fit.ridge]).weight)
    if centre is not None:
        fit = fit._replace(offset=weight @ centre - fit.weight @ centre[kept])
    return fit


def _repair(moment: Tensor, other: Tensor, weight: Tensor, kept: Tensor, ridges: Sequence[float]) -> NarrowFit:
    """The contraction of kept units with the best ridge, its error on the `other` moments not yet relative."""
    lost = torch.ones(len(moment), dtype=torch.bool, device=moment.device)
    lost[kept] = False
    rest = weight[:, lost]
    values, vectors = torch.linalg.eigh(moment[kept][:, kept])
    values = values.clamp_min(0)
    scale = max(float(values.mean()), 1e-300)
    rotated = rest @ (moment[lost][:, kept] @ vectors)
    # With d = 1 / (values + λ), what the repair gives is rotated · d · vectorsᵀ h_S: its error is quadratic in d.
    constant = (rest @ other[lost][:, lost] * rest).sum()
    linear = (rotated * (rest @ (other[lost][:, kept] @ vectors))).sum(0)
    quadratic = (rotated.T @ rotated) * (vectors.T @ other[kept][:, kept] @ vectors)
    best: tuple[float, float, Tensor] | None = None
    for ridge in sorted(ridges, reverse=True):
        d = 1 / (values + max(ridge * scale, 1e-300))
        error = float(constant - 2 * linear @ d + d @ quadratic @ d)
        if best is None or error < best[0]:
            best = error, ridge, d
    assert best is not None
    return NarrowFit(kept, weight[:, kept] + (rotated * best[2]) @ vectors.T, None, best[1], best[0])
