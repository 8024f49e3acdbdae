"""Attention over exponential features by the weight of every pair, in fp64, and comparisons with it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from snnk_peft.functional.exponential_attention import KeyMeans, exponential_attention
from snnk_peft.functional.exponential_causal import causal_exponential_attention
from snnk_peft.functional.log_linear import ABSENT, LogLinear

HIDDEN = -1e6  # a logarithm beside which every other is everything, also in its gradients


def dense(
    q: Tensor, k: Tensor, v: Tensor, maps: list[Tensor], square: float, mask: Tensor | None, state: Any, causal: bool
) -> list[Tensor]:
    """Outputs, logarithms of denominators, and M and log Z of all keys, by the weight of every pair."""
    rows, offset, key_rows = maps
    B, G, m = *k.shape[:2], rows.shape[-2]

    def of_heads(x: Tensor) -> Tensor:
        return x.repeat_interleave(q.shape[1] // G, 1)

    a = q @ of_heads(rows.expand(B, G, *rows.shape[-2:])).mT + of_heads(offset.expand(B, G, m)).unsqueeze(-2)
    b = k @ key_rows.expand(B, G, *key_rows.shape[-2:]).mT - square * k.square().sum(-1, keepdim=True)
    if mask is not None:
        b = b.masked_fill(~mask[:, None, :, None], HIDDEN)
    logs = (a.unsqueeze(-2) + of_heads(b).unsqueeze(-3)).logsumexp(-1)
    if causal:
        logs = logs.masked_fill(torch.ones(logs.shape[-2:], dtype=torch.bool, device=q.device).triu(1), 2 * HIDDEN)
    weights, values, log_weight = b.softmax(-2).mT, v, b.logsumexp(-2)
    means = weights @ v
    if state is not None:
        logs = torch.cat((a + of_heads(state[1]).unsqueeze(-2), logs), -1)
        values = torch.cat((state[0], v), -2)
        both = torch.logaddexp(log_weight, state[1])
        means = means * (log_weight - both).exp().unsqueeze(-1) + state[0] * (state[1] - both).exp().unsqueeze(-1)
        log_weight = both
    seen = logs.detach().amax(-1) > HIDDEN / 2
    out = (logs.softmax(-1) @ of_heads(values)).masked_fill(~seen.unsqueeze(-1), 0.0)
    return [out, logs.logsumexp(-1), means, log_weight]


def error(found: Tensor, expected: Tensor) -> float:
    """|found − expected| / |expected|."""
    return float((found.detach().double() - expected.detach()).norm() / expected.detach().norm().clamp_min(1e-30))


# Of a result; of gradients eight times as much. The interpreter truncates to bf16 where a card rounds.
TOLERANCE = {torch.float32: 2e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "masked, rows of each text": {"masked": True, "B": 2, "H": 2, "G": 1, "rows": "text"},
    "grouped, rows of each head": {"H": 4, "G": 2, "rows": "head"},
    "odd sizes": {"d": 12, "D": 20, "m": 11},
    "state": {"state": True, "masked": True, "B": 2, "H": 2, "G": 1},
    "a state that hides keys": {"state": True, "before": 200.0},
    "large": {"size": 6.0},
    "shrinking": {"ramp": -1},
    "growing": {"ramp": 1},
}


def given(
    dtype: torch.dtype, B=1, H=2, G=2, L=65, d=16, D=32, m=16,
    size=1.0, rows="one", masked=False, state=False, before=0.0, ramp=0,
) -> tuple[list[Tensor], float, Tensor | None]:  # fmt: skip
    """Tensors, laid out as a model hands them, Q of the keys' norms and a mask, for `compare`.

    The logarithms of a state's weights lie about `before`; the second text's state is of no key.
    """
    q, k, v = (torch.randn(B, L, n, w).transpose(1, 2) * s for n, w, s in ((H, d, size), (G, d, size), (G, D, 1.0)))
    if ramp:  # log weights of keys span hundreds within a chunk
        k = k * (torch.linspace(0, 20, L) if ramp > 0 else torch.linspace(20, 0, L))[:, None]
    shape = {"one": (m, d), "head": (G, m, d), "text": (B, G, m, d)}[rows]
    maps = [torch.randn(shape) * d**-0.25, torch.randn(shape[:-1]) * 0.3, torch.randn(shape) * d**-0.25]
    mask = None
    if masked:
        mask = torch.rand(B, L) > 0.3
        mask[0, :40], mask[1:, :3] = False, False
    kept = [torch.randn(B, G, m, D), torch.randn(B, G, m) + before] if state else []
    for x, nothing in zip(kept, (0.0, ABSENT), strict=False):
        x[1:] = nothing
    return [x.to(dtype) for x in (q, k, v)] + maps + kept, 0.5 * d**-0.5, mask


NAMES = ("q", "k", "v", "rows", "offset", "key rows", "M", "log Z")


def compare(
    tensors: list[Tensor], square: float, mask: Tensor | None, causal: bool, alone: bool = False
) -> dict[str, float]:
    """Relative errors of results and gradients of the operation, of whatever form, against fp64.

    Args:
        tensors: q, k, v, rows, offset, key rows, and M and log Z of a state or nothing.
        square: Q of the keys' norms.
        mask: (B, L) or None.
        causal: which operation.
        alone: as a model with fixed rows trains: the outputs in their own dtype have a gradient, and q, k and v.
    """
    dtype, learned = tensors[0].dtype, 3 if alone else len(tensors)
    own, wide = (
        [x.clone().to(kind or x.dtype).requires_grad_(place < learned) for place, x in enumerate(tensors)]
        for kind in (None, torch.float64)
    )
    state = KeyMeans(*own[6:]) if len(own) > 6 else None
    maps = LogLinear(own[3], own[4], 0.0), LogLinear(own[5], own[4].new_zeros(own[5].shape[-2]), square)
    if causal:
        both, means = causal_exponential_attention(*own[:3], *maps, mask, state, weighed=True)
        found = [both[..., :-1], both[..., -1], *means]
        narrow = causal_exponential_attention(*own[:3], *maps, mask, state)[0]
        assert narrow.dtype == dtype
        assert error(narrow, found[0].double()) < TOLERANCE[dtype]
        found[0] = narrow if alone else found[0]
    else:
        out, means = exponential_attention(*own[:3], *maps, mask, state)
        assert out.dtype == dtype
        found = [out, *means]
    expected = dense(*wide[:3], wide[3:6], square, mask, tuple(wide[6:]) or None, causal)
    if causal:
        seen = expected[1] > HIDDEN / 2
        assert (found[1][~seen] < -1e8).all()
        found[1], expected[1] = found[1][seen], expected[1][seen]
    else:
        del expected[1]
    names = ("out", "lse", "M", "log Z") if causal else ("out", "M", "log Z")
    report = {name: error(f, e) for name, f, e in zip(names, found, expected, strict=True)}
    if alone:
        found, expected = found[:1], expected[:1]
    directions = [torch.randn_like(e) for e in expected]
    gradients = [
        torch.autograd.grad(
            sum((f.double() * w).sum() for f, w in zip(outs, directions, strict=True)), leaves[:learned]
        )
        for outs, leaves in ((found, own), (expected, wide))
    ]
    report |= {f"gradient of {n}": error(f, e) for n, f, e in zip(NAMES, *gradients, strict=False)}
    return report


def check(report: dict[str, float], dtype: torch.dtype, case: str) -> None:
    """Fail where an error is larger than its roundings explain: of weights large keys leave few.

    log Z is summed in fp32 from products without a rounding, whatever the dtype of keys.
    """
    times = 4 if CASES[case].keys() & {"size", "ramp"} else 1
    bounds = {name: times * TOLERANCE[dtype] * (8 if "gradient" in name else 1) for name in report}
    bounds["log Z"] = times * min(TOLERANCE[dtype], 1e-4)
    wrong = {name: f"{value:.1e}" for name, value in report.items() if not value < bounds[name]}
    assert not wrong, wrong
