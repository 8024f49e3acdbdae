"""Softmax over a band, sinks and what is known of far keys by the weight of every pair, in fp64, and comparisons."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from snnk_peft.functional.near_field import Sinks, near_attention
from tests.exponential_oracle import TOLERANCE, error

NOWHERE = -1e9  # what a far set says of its weight where a query sees none of it


def dense(
    q: Tensor, k: Tensor, v: Tensor, sinks: list[Tensor], far: list[Tensor], known: Tensor | None, mask: Tensor | None,
    width: int, causal: bool, scaling: float,
) -> Tensor:  # fmt: skip
    """Every pair's weight; `far` holds means and logarithms of weights in turn."""
    rep, L, N = q.shape[1] // k.shape[1], q.shape[2], k.shape[2]
    at = torch.arange(N, device=q.device)
    places = at[N - L :, None] - at
    pairs = (places.abs() < width) & ((places >= 0) | (not causal))
    pairs = pairs.expand(q.shape[0], 1, L, N)
    keys, values = k, v
    if mask is not None:
        pairs = pairs & mask[:, None, None]
    if known is not None:
        seen = torch.arange(sinks[0].shape[2], device=q.device) < known[:, :, None]
        keys, values = torch.cat((k, sinks[0]), 2), torch.cat((v, sinks[1]), 2)
        pairs = torch.cat((pairs, seen[:, None].expand(-1, 1, L, -1)), -1)
    logs = (q @ keys.repeat_interleave(rep, 1).mT * scaling).masked_fill(~pairs, -math.inf)
    known = [weight.masked_fill(weight < NOWHERE / 2, -math.inf).unsqueeze(-1) for weight in far[1::2]]
    logs = torch.cat((logs, *known), -1)
    nothing = (logs == -math.inf).all(-1, keepdim=True)
    weights = logs.masked_fill(nothing, 0.0).softmax(-1).masked_fill(nothing, 0.0)
    out = weights[..., : keys.shape[2]] @ values.repeat_interleave(rep, 1)
    for place, means in enumerate(far[::2]):
        out = out + weights[..., keys.shape[2] + place, None] * means
    return out


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "masked, grouped": {"B": 3, "H": 4, "masked": True, "sinks": 2, "L": 33, "far": 1},
    "one query head in four": {"H": 4, "G": 1, "sinks": 5, "L": 33},
    "width 1": {"width": 1, "masked": True, "B": 3, "sinks": 1},
    "odd sizes": {"d": 24, "D": 20, "width": 7, "sinks": 3},
    "wider than the text": {"width": 100, "L": 40},
    "as wide as the text": {"width": 40, "L": 40, "masked": True, "B": 3},
    "far": {"far": 1, "sinks": 2},
    "far, masked": {"far": 1, "sinks": 2, "masked": True, "B": 3, "G": 1},
    "two far": {"far": 2},
    "behind others": {"behind": True, "masked": True, "B": 3, "sinks": 2, "far": 1},
    "one query": {"behind": True, "L": 1, "masked": True, "B": 3, "sinks": 2},
    "fewer queries than the width": {"behind": True, "L": 9},
    "large": {"size": 20.0, "far": 1, "sinks": 2},
    "apart": {"ramp": 300.0, "sinks": 2, "far": 1},
}


def given(
    dtype: torch.dtype, B=1, H=2, G=2, L=45, d=16, D=32, width=18, sinks=0, far=0, masked=False, behind=False,
    size=1.0, ramp=0.0,
) -> tuple[list[Tensor], dict[str, Any]]:  # fmt: skip
    """q, k, v, the sinks' keys and values and far means and weights; and what is no tensor with a gradient.

    Tensors lie in memory as a model hands them: heads of one token beside each other.

    Args:
        dtype: of all but what is far.
        B: texts; masked, the second has padding on the left, the third is nothing but padding.
        H: query heads.
        G: key heads.
        L: queries.
        d: columns of keys.
        D: columns of values.
        width: of the band; 17 more than a block of 16 is one key in a third block.
        sinks: how many.
        far: how many sets of far keys.
        masked: with a mask.
        behind: `width` keys more stand before the first query.
        size: of queries and keys.
        ramp: logarithms of the keys' weights rise by so much along the text.
    """
    N = L + (width if behind else 0)
    shapes = [
        (H, L, d, size),
        (G, N, d, size),
        (G, N, D, 1.0),
        *([(G, sinks, d, 2 * size), (G, sinks, D, 1.0)] if sinks else []),
    ]
    tensors = [torch.randn(B, count, heads, w).transpose(1, 2) * s for heads, count, w, s in shapes]
    if ramp:  # along one direction, which all queries have; sinks stand in the middle
        tensors[0][..., 0], tensors[1][..., 0], tensors[3][..., 0] = d**0.5, torch.linspace(0, ramp, N), ramp / 2
    tensors = [x.to(dtype) for x in tensors]
    mask = known = None
    if masked:
        mask = torch.rand(B, N) > 0.2
        mask[1:2, : N // 2 + 1], mask[2:] = False, False
    if sinks:
        # Of a causal text they come one by one; otherwise, all queries see the same.
        known = (torch.arange(L) // 3).expand(B, L).clone()
        known[1:2], known[2:] = (known[1:2] - 4).clamp_min(0), 0
    for _ in range(far):
        # As large as those of single keys, now more, now less.
        weight = torch.randn(B, H, L) * 2 * size**2 + torch.linspace(0, ramp, N)[N - L :]
        weight[:, :, : L // 3] = NOWHERE + 3.0
        weight[2:] = NOWHERE
        tensors += [torch.randn(B, L, H, D).transpose(1, 2), weight]  # a mean of nothing can be anything
    return tensors, {"mask": mask, "known": known, "width": width, "scaling": d**-0.5}


def compare(tensors: list[Tensor], facts: dict[str, Any], causal: bool) -> dict[str, float]:
    """Relative errors of the result and of every gradient of the operation, of whatever form, against fp64."""
    known, rest = facts["known"], {"mask": facts["mask"], "causal": causal, "scaling": facts["scaling"]}
    if known is not None and not causal:
        known = known[:, -1:]
    own, wide = ([x.clone().to(kind or x.dtype).requires_grad_() for x in tensors] for kind in (None, torch.float64))
    split = 3 if known is None else 5
    sinks = None if known is None else Sinks(own[3], own[4], known)
    far = tuple(zip(own[split::2], own[split + 1 :: 2], strict=True))
    found = near_attention(*own[:3], facts["width"], **rest, sinks=sinks, far=far)
    assert found.dtype == tensors[2].dtype
    expected = dense(*wide[:3], wide[3:split], wide[split:], known, **rest, width=facts["width"])
    report = {"out": error(found, expected)}
    assert not found[expected.abs().amax(-1) == 0].any()
    direction = torch.randn_like(expected).to(found.dtype)
    mine = torch.autograd.grad(found, own, direction)
    theirs = torch.autograd.grad(expected, wide, direction.double())
    names = ["q", "k", "v", *(["sink keys", "sink values"] if known is not None else []), *(["far", "weight"] * 2)]
    for place, (m, t) in enumerate(zip(mine, theirs, strict=True)):
        if place >= split:  # of what is not there a gradient may be anything: it goes nowhere
            absent = tensors[place + 1 - (place - split) % 2] < NOWHERE / 2
            m = m.masked_fill(absent if m.dim() == 3 else absent.unsqueeze(-1), 0.0)
        report[f"gradient {place} of {names[place]}"] = error(m, t)
    return report


def check(report: dict[str, float], dtype: torch.dtype, case: str) -> None:
    """Fail where an error is larger than its roundings explain: logarithms of hundreds have fewer digits in fp32."""
    times = 4 if dtype == torch.float32 and CASES[case].keys() & {"size", "ramp"} else 1
    bounds = {name: times * TOLERANCE[dtype] * (8 if "gradient" in name else 1) for name in report}
    wrong = {name: f"{value:.1e}" for name, value in report.items() if not value < bounds[name]}
    assert not wrong, wrong
