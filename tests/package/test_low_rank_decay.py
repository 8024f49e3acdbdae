"""Frobenius decay of what the low-rank part makes: found in patched models, as strong as the part says."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from snnk_peft import FrobeniusDecay, LowRankPart, SNNKConfig, get_snnk_model
from snnk_peft.low_rank.frobenius_decay import decay_groups, find_factors
from tests.tiny_models import inputs_for, tiny


def network() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1), nn.Flatten(), nn.Linear(8 * 16, 10)
    )


@pytest.mark.parametrize("split", ["spatial", "channel"])
def test_convolutions_and_linears(split):
    part = LowRankPart(targets="*", rank=2, split=split, frobenius_decay=0.5)
    model = get_snnk_model(network(), SNNKConfig(parts=[part]))
    decay = FrobeniusDecay(model)
    assert [pair.strength for pair in decay.pairs] == [0.5, 0.5, 0.5]
    # The product has the norm of the kernel: the penalty means the same for all layers.
    for pair in decay.pairs:
        layer = model.get_submodule(pair.path)
        torch.testing.assert_close((pair.U @ pair.V.T).norm(), layer.weight_matrix().norm())
        weights = [p for m in layer.dense().modules() for p in m.parameters(recurse=False) if p.ndim > 1]
        torch.testing.assert_close((pair.U @ pair.V.T).norm(), weights[0].norm(), rtol=1e-4, atol=1e-5)
    before = decay.penalty().item()
    optimizer = torch.optim.AdamW(decay_groups(model, 0.0), lr=1e-2)
    decay.attach(optimizer)
    x = torch.randn(4, 3, 4, 4)
    for _ in range(5):
        optimizer.zero_grad()
        (0 * model(x).sum()).backward()
        optimizer.step()
    assert decay.penalty().item() < 0.98 * before


def test_a_family_by_role():
    part = LowRankPart(targets="ffn", rank_scale=0.25, frobenius_decay=1e-3)
    model = get_snnk_model(tiny("bert"), SNNKConfig(parts=[part]))
    decay = FrobeniusDecay(model)
    assert len(decay.pairs) == 4  # two Linears in each of two layers
    assert {pair.strength for pair in decay.pairs} == {1e-3}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    decay.attach(optimizer)
    inputs = inputs_for(model.get_base_model())
    truth = torch.autograd.grad(
        model(**inputs).logits.square().sum() + decay.penalty(), [f for pair in decay.pairs for f in pair[1:3]]
    )
    expected = [f - 0.1 * g for f, g in zip([f for pair in decay.pairs for f in pair[1:3]], truth, strict=True)]
    model(**inputs).logits.square().sum().backward()
    optimizer.step()
    found = [f for pair in find_factors(model) for f in (pair.U, pair.V)]
    for mine, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, wanted)
