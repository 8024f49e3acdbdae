"""Linear attention over given features by the weight of every pair, in fp64, and comparisons with it."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from snnk_peft.functional.linear_attention import AttentionState, causal_linear_attention, key_sums
from tests.exponential_oracle import TOLERANCE, error

LOW = -1e6  # the scale of a key that does not count: its exponential beside any other is 0
NAMES = ("q", "k", "v", "scales", "S", "z")
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "signed": {"signed": True},
    "masked, grouped": {"masked": True, "B": 2, "H": 2, "G": 1},
    "odd sizes": {"D": 20, "m": 11},
    "state": {"state": 0.0, "H": 4, "G": 2},
    "scales": {"scales": (0, 0), "masked": True, "B": 2, "G": 2, "H": 2},
    "scales and state": {"scales": (0, 0), "state": 2.0, "masked": True, "B": 2, "H": 2, "G": 1, "signed": True},
    "growing": {"scales": (-200, 200), "state": -150.0},
    "shrinking": {"scales": (200, -200), "state": 150.0},
    "a state beside which keys are nothing": {"scales": (0, 0), "state": 300.0},
    "narrow values": {"scales": (0, 0), "values": torch.bfloat16},
}


def given(
    dtype: torch.dtype, B=1, H=1, G=1, L=65, D=32, m=16, signed=False, masked=False, scales=None, state=None,
    values=None,
) -> tuple[dict[str, Tensor], Tensor | None, Tensor | None]:  # fmt: skip
    """Tensors by NAMES, laid out as a model hands them, the scale of a state and a mask.

    Where keys have scales, the second text's state is of no key.
    """

    def features(*shape: int) -> Tensor:
        return (torch.randn(*shape) + 0.7 if signed else torch.rand(*shape)).to(dtype).transpose(1, 2)

    v = torch.randn(B, L, G, D).to(values or dtype).transpose(1, 2)
    found = {"q": features(B, L, H, m), "k": features(B, L, G, m), "v": v}
    mask = None
    if masked:
        mask = torch.rand(B, L) > 0.3
        mask[0, :40] = False
    if scales is not None:
        found["scales"] = torch.randn(B, L, G).transpose(1, 2) + torch.linspace(*scales, L)
        found["scales"][..., :3] = -math.inf  # of keys that do not count
    if state is None:
        return found, None, mask
    kept = torch.rand(B, G, 9, m)
    found["S"], found["z"] = kept.mT @ torch.randn(B, G, 9, D), kept.sum(-2)
    apart = torch.arange(B * G).view(B, G, 1) * (0.0 if scales is None else 1.5)  # each state has its own
    scale = state + apart
    if scales is not None:
        found["S"][1:], found["z"][1:], scale[1:] = 0.0, 0.0, -math.inf
    return found, scale, mask


def dense(x: dict[str, Tensor], scale: Tensor | None, mask: Tensor | None) -> list[Tensor]:
    """Outputs, S, z and the scale of both, by the weight of every pair; a state without scales has scale 0."""
    rep = x["q"].shape[1] // x["k"].shape[1]
    s = x.get("scales", x["k"].new_zeros(x["k"].shape[:-1]))
    if mask is not None:
        s = s.masked_fill(~mask[:, None], LOW)
    P = s.new_full((*s.shape[:2], 1), LOW) if scale is None else scale.to(s)
    rho = torch.maximum(s.detach().cummax(-1).values, P).unsqueeze(-1)
    carry, top = (P.unsqueeze(-1) - rho).exp(), rho[..., -1, :]
    unseen = torch.ones(s.shape[-1], s.shape[-1], dtype=torch.bool, device=s.device).triu(1)
    within = (s.unsqueeze(-2) - rho).masked_fill(unseen | (s.unsqueeze(-2) < LOW / 2), LOW).exp()
    q, k, v, factor, carry = (
        each if name == "q" else each.repeat_interleave(rep, 1)
        for name, each in (("q", x["q"]), ("k", x["k"]), ("v", x["v"]), ("", within), ("", carry))
    )
    weights = q @ k.mT * factor
    num, den = weights @ v, weights.sum(-1, keepdim=True)
    share = torch.where(s > LOW / 2, (s - top).exp(), 0.0).unsqueeze(-1)
    S, z = (x["k"] * share).mT @ x["v"], (x["k"] * share).sum(-2)
    if scale is not None:
        num = num + q * carry @ x["S"].repeat_interleave(rep, 1)
        den = den + (q * carry * x["z"].repeat_interleave(rep, 1).unsqueeze(-2)).sum(-1, keepdim=True)
        S, z = S + x["S"] * (P - top).exp().unsqueeze(-1), z + x["z"] * (P - top).exp()
    return [num / torch.where(den == 0, 1.0, den), S, z, top]


def compare(x: dict[str, Tensor], scale: Tensor | None, mask: Tensor | None, causal: bool) -> dict[str, float]:
    """Relative errors of results and gradients of the operation, of whatever form, against fp64."""
    own, wide = (
        {name: each.clone().to(kind or each.dtype).requires_grad_() for name, each in x.items()}
        for kind in (None, torch.float64)
    )
    state = None if scale is None else AttentionState(own["S"], own["z"], scale)
    scales = own["scales"].unsqueeze(-1) if "scales" in own else None
    found: list[Tensor] = []
    if causal:
        out, behind = causal_linear_attention(own["q"], own["k"], own["v"], mask, state=state, log_scale=scales)
        assert out.dtype == x["v"].dtype
        found = [out]
    else:
        behind = key_sums(own["k"], own["v"], mask, state=state, log_scale=scales)
    found += behind[:2]
    *expected, top = dense(wide, scale, mask)
    assert not behind.log_scale.requires_grad
    torch.testing.assert_close(behind.log_scale, top.float())
    expected = expected if causal else expected[1:]
    names = ("out", "S'", "z'") if causal else ("S'", "z'")
    report = {name: error(f, e) for name, f, e in zip(names, found, expected, strict=True)}
    directions = [torch.randn_like(e) for e in expected]
    gradients = [
        torch.autograd.grad(
            sum((f.double() * w).sum() for f, w in zip(outs, directions, strict=True)),
            [leaf for name, leaf in leaves.items() if causal or name != "q"],
        )
        for outs, leaves in ((found, own), (expected, wide))
    ]
    names = [name for name in x if causal or name != "q"]
    return report | {f"gradient of {n}": error(f, e) for n, f, e in zip(names, *gradients, strict=True)}


def check(report: dict[str, float], dtype: torch.dtype, values: torch.dtype) -> None:
    """Fail where an error is larger than its roundings explain."""
    bound = max(TOLERANCE[dtype], TOLERANCE[values])
    bounds = {name: bound * (8 if "gradient" in name else 1) for name in report}
    wrong = {name: f"{value:.1e}" for name, value in report.items() if not value < bounds[name]}
    assert not wrong, wrong


def quadratic_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, *, causal: bool = False
) -> tuple[Tensor, Tensor]:
    """The definition, through the weight of every pair.

    Returns:
        (B, H, L, D) and the weights (B, H, L, N), whose rows sum to 1 (or are 0 where no key counts).
    """
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    products = q @ k.transpose(-1, -2)
    if mask is not None:
        products = products * mask[:, None, None, :]
    if causal:
        products = products.tril(k.shape[-2] - q.shape[-2])
    sums = products.sum(-1, keepdim=True)
    weights = products / sums.where(sums != 0, 1.0)
    return weights @ v, weights
