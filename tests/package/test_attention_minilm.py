"""Half-precision attention on the queries and keys of a real BERT (MiniLM), layer by layer, against its definition."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModel, AutoTokenizer

from snnk_peft import build_feature_map
from snnk_peft.layers.kernel_attention import KernelAttention

HEADS, DIM = 12, 32
TEXT = (
    "It was a bright cold day in April, and the clocks were striking thirteen. Nobody in the office had expected the "
    "letter, which lay unopened between two cups of tea and a map of the harbour; prices rose by 4.2 per cent since "
    "March, and the committee, having met twice, adjourned without a word about fish, taxes or the weather."
)


@pytest.fixture(scope="module")
def layers(minilm_dir) -> list[tuple[torch.Tensor, ...]]:
    """Queries, keys and values (1, 12, L, 32) of each layer."""
    model = AutoModel.from_pretrained(minilm_dir).eval()
    seen: list[torch.Tensor] = []
    for layer in model.encoder.layer:
        own = layer.attention.self
        for linear in (own.query, own.key, own.value):
            linear.register_forward_hook(lambda module, args, out: seen.append(out))
    with torch.no_grad():
        model(**AutoTokenizer.from_pretrained(minilm_dir)(TEXT, return_tensors="pt"))
    heads = [x.unflatten(-1, (HEADS, DIM)).transpose(1, 2) for x in seen]
    return [tuple(heads[i : i + 3]) for i in range(0, len(heads), 3)]


def definition(name: str, W: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """FAVOR+ (posrf), or OPRF with the parameter that is best for these tokens; all pairs, fp64."""
    q, k = q * DIM**-0.25, k * DIM**-0.25
    a = torch.zeros(())
    if name == "oprf":
        S = (q.unsqueeze(-2) + k.unsqueeze(-3)).square().sum(-1).mean((-2, -1))[..., None, None]
        rho = (((2 * S + DIM) ** 2 + 8 * DIM * S).sqrt() - 2 * S - DIM) / (4 * S)
        a = (1 - 1 / rho) / 8
    phi, psi = (
        a * W.square().sum(-1) + (1 - 4 * a).sqrt() * (x @ W.mT) - x.square().sum(-1, keepdim=True) / 2 for x in (q, k)
    )
    return (phi.unsqueeze(-2) + psi.unsqueeze(-3)).logsumexp(-1).softmax(-1) @ v


@pytest.mark.parametrize("factor", [1, 3])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float16, 2e-3), (torch.bfloat16, 2e-2)], ids=str)
@pytest.mark.parametrize("name", ["posrf", "oprf"])
def test_real_queries_and_keys(layers, name, dtype, tolerance, factor):
    kernel = KernelAttention([build_feature_map(name, "orf", DIM, 64)], HEADS)
    W = kernel.maps()[0].projection.materialize().double()
    assert len(layers) == 6
    for number, (q, k, v) in enumerate(layers):
        leaves = [t.to(dtype).requires_grad_() for t in (q * factor, k * factor, v)]
        out = kernel(*leaves)
        exact = definition(name, W, *(leaf.detach().double() for leaf in leaves))
        assert out.dtype == dtype
        assert ((out.double() - exact).norm() / exact.norm()).item() < tolerance, number
        assert not (out == 0).all(-1).any()
        for gradient in torch.autograd.grad(out.float().square().sum(), leaves):
            assert gradient.isfinite().all()
