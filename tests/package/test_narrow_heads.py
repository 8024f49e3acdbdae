"""Narrower attention heads: exact where rank allows, best otherwise, plain Linears in a bundle."""

from __future__ import annotations

import math

import numpy as np
import peft
import pytest
import scipy.linalg
import torch
from torch import nn

from snnk_peft import (
    FAMILIES,
    AdapterPart,
    AttentionPart,
    NarrowHeadsPart,
    SNNKConfig,
    bundle,
    calibrate,
    get_snnk_model,
)
from snnk_peft.errors import ConfigError, UnsupportedError
from snnk_peft.solvers.narrow import narrow_products, narrow_values
from tests.tiny_families import CONFIGS, build, main_head
from tests.tiny_models import inputs_for, logits, tiny, trained


def narrow(model: nn.Module, **options) -> peft.PeftModel:
    part = NarrowHeadsPart(**{"head_dim": 6, **options})
    return get_snnk_model(model, SNNKConfig(parts=[part], modules_to_save=[])).eval()


def with_low_rank(family: str, rank: int):
    """A model whose keys and values have this rank in every head, with biases everywhere."""
    model = tiny(family)
    generator = torch.Generator().manual_seed(3)
    spec, layers = FAMILIES[family], FAMILIES[family].layer_paths(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.2)
        for path in [f"{layer}.{name}" for layer in layers for name in (spec.key, spec.value)]:
            weight = model.get_submodule(path).weight
            for head in weight.view(2, 16, -1):
                left, values, right = torch.linalg.svd(head)
                head.copy_((left[:, :rank] * values[:rank]) @ right[:rank])
    return model


def batches(model: nn.Module, count: int = 8) -> list[dict[str, torch.Tensor]]:
    """Batches with padding of sentences (or pictures) that lie in few directions, as real ones do."""
    found = []
    for number in range(count):
        batch, generator = inputs_for(model, 8, 12, seed=number), torch.Generator().manual_seed(number)
        if "pixel_values" in batch:
            base = torch.randn(5, 3 * 64, generator=torch.Generator().manual_seed(9))
            batch["pixel_values"] = (torch.randn(8, 5, generator=generator) @ base).view(8, 3, 8, 8)
        found.append(batch)
    return found


@pytest.mark.parametrize("white", [True, False])
def test_products_are_cut_as_eckart_and_young_say(white):
    """The error of the product of two narrowed projections is that of the best matrix of this rank."""
    generator = torch.Generator().manual_seed(0)
    randn = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)  # noqa: E731
    query, key, mix = randn(8, 20), randn(8, 20), randn(20, 20)
    moment = torch.eye(20, dtype=torch.float64) if white else mix @ mix.T
    P, R = narrow_products((query @ moment @ query.T)[None], (key @ moment @ key.T)[None], 3)
    root = torch.from_numpy(scipy.linalg.sqrtm(moment.numpy()).real)
    exact = root @ query.T @ key @ root
    found = root @ (P[0] @ query).T @ (R[0] @ key) @ root
    tail = torch.linalg.svdvals(exact)[3:].square().sum()
    torch.testing.assert_close((exact - found).square().sum(), tail)


def test_values_of_one_head_are_cut_as_reduced_rank_regression_does():
    generator = torch.Generator().manual_seed(0)
    z, w = torch.randn(400, 8, generator=generator), torch.randn(8, 30, generator=generator)
    z = (z @ torch.randn(8, 8, generator=generator)).double()
    y = z @ w.double()
    kept = narrow_values(z.T @ z, y.T @ z, 1, 3)[0]
    hidden = z @ kept.T
    error = (y - hidden @ torch.linalg.lstsq(hidden, y).solution).square().sum()
    assert error < 1.001 * torch.linalg.svdvals(y)[3:].square().sum()


def reduced_rank_of_heads(z: np.ndarray, y: np.ndarray, heads: int, size: int) -> float:
    """Share of y that is lost, by exact regressions of one head after the other until a round gains nothing."""
    columns = np.split(np.linalg.qr(z)[0], 1, 1)[0]
    parts = [np.linalg.qr(each)[0] for each in np.split(z, heads, 1)]
    start = columns @ (columns.T @ y)
    given = [u @ (u.T @ start) / heads for u in parts]
    lost = math.inf
    while True:
        for head, u in enumerate(parts):
            rest = y - sum(given[:head] + given[head + 1 :])
            left, values, right = np.linalg.svd(u.T @ rest, full_matrices=False)
            given[head] = u @ ((left[:, :size] * values[:size]) @ right[:size])
        before, lost = lost, ((y - sum(given)) ** 2).sum() / (y**2).sum()
        if before - lost < 1e-5 * lost:
            return lost


@pytest.mark.parametrize("own", [0.1, 0.5, 2.0])
@pytest.mark.parametrize("seed", [0, 1])
def test_values_are_kept_as_well_as_by_regressions_until_nothing_is_gained(seed, own):
    """Heads that partly say the same: eight rounds lose up to 1.4 times as much."""
    draw = np.random.default_rng(seed)
    shared = draw.normal(size=(300, 6))
    z = np.concatenate([shared @ draw.normal(size=(6, 8)) + own * draw.normal(size=(300, 8)) for _ in range(4)], 1)
    y = z @ draw.normal(size=(32, 16))
    given, target = torch.from_numpy(z), torch.from_numpy(y)
    kept = narrow_values(given.T @ given, target.T @ given, 4, 2)
    hidden = z @ torch.block_diag(*kept).T.numpy()
    error = y - hidden @ np.linalg.lstsq(hidden, y, rcond=None)[0]
    assert (error**2).sum() / (y**2).sum() < 1.01 * reduced_rank_of_heads(z, y, 4, 2)


@pytest.mark.parametrize("init", ["spectral", "data"])
@pytest.mark.parametrize("family", ["bert", "vit", "distilbert"])
def test_nothing_changes_where_the_rank_is_enough(family, init):
    """Biases of queries, keys, values and outputs, the scale and padding are all as they were."""
    model = with_low_rank(family, 6)
    batch = batches(model, 1)[0]
    expected = logits(model, batch)
    patched = narrow(model, init=init)
    torch.testing.assert_close(logits(patched, batch), expected, rtol=1e-4, atol=1e-4)
    if init == "data":
        report = calibrate(patched, batches(model), progress=False, ridges=[1e-10])
        assert len(report.slots) == 2
        assert all(slot.num_features == 6 and slot.error_after < 1e-6 for slot in report.slots)
        torch.testing.assert_close(logits(patched, batch), expected, rtol=1e-3, atol=1e-3)
    folded = bundle(patched)
    torch.testing.assert_close(logits(folded, batch), logits(patched, batch), rtol=1e-5, atol=1e-5)
    with patched.disable_adapter():
        assert torch.equal(logits(patched, batch), expected)


@pytest.mark.parametrize("family", ["bert", "vit"])
def test_data_is_better_than_the_weights_alone(family):
    model = with_low_rank(family, 16)
    given = batches(model, 24)
    patched = narrow(model)
    report = calibrate(patched, given, progress=False)
    assert all(slot.error_after < 0.7 * slot.error_before for slot in report.slots), str(report)
    spectral = narrow(with_low_rank(family, 16), init="spectral")
    with pytest.raises(ConfigError, match="no active part that can be calibrated"):
        calibrate(spectral, given, progress=False)


def test_a_bundle_has_narrow_linears_and_no_more(tmp_path):
    model = tiny("bert")
    before = model.num_parameters()
    patched = trained(narrow(model, layers=[1]), 0.2)
    folded = bundle(patched)
    first, second = (layer.attention for layer in folded.bert.encoder.layer)
    assert (first.self.attention_head_size, second.self.attention_head_size) == (16, 6)
    assert first.self.query.out_features == 32
    assert [tuple(m.weight.shape) for m in (second.self.query, second.self.key, second.self.value)] == [(12, 32)] * 3
    assert tuple(second.output.dense.weight.shape) == (32, 12)
    assert second.self.scaling == first.self.scaling
    assert folded.num_parameters() == before - 4 * 20 * 32 - 20 - 2 * 32
    assert all(type(m) is nn.Linear for m in (second.self.query, second.output.dense))


def test_every_number_is_trained():
    model = tiny("bert")
    state = torch.get_rng_state()
    patched = narrow(model)
    assert torch.equal(torch.get_rng_state(), state)
    patched.train()(**batches(patched, 1)[0]).logits.square().sum().backward()
    own = [p for name, p in patched.named_parameters() if "snnk_slots" in name]
    assert len(own) == 2 * 6  # four matrices, the biases of queries and outputs
    assert all(p.grad is not None and p.grad.any() for p in own)


@pytest.mark.parametrize("family", sorted(name for name in CONFIGS if FAMILIES[name].key is not None))
def test_every_family_that_names_its_keys(family):
    model = build(family, main_head(family))
    folded = bundle(trained(narrow(model, head_dim=3), 0.2))  # compares the outputs
    assert folded.num_parameters() < model.num_parameters()


@pytest.mark.parametrize(
    ("family", "match"),
    [
        ("llama", "multiplies queries and keys only after changing them"),
        ("esm", "multiplies queries and keys only after changing them"),
        ("mpnet", "multiplies queries and keys only after changing them"),
        ("gpt2", "has one matrix for queries, keys and values; expected projections of their own"),
    ],
)
def test_what_has_no_plain_product_is_refused(family, match):
    model = build(family, main_head(family))
    before = list(model.state_dict())
    with pytest.raises(UnsupportedError, match=match):
        narrow(model)
    assert list(model.state_dict()) == before


def test_a_wrong_description_is_refused():
    """A family of one's own that names the keys of an attention with rotary positions and shared key heads."""
    import dataclasses

    model = build("llama", "LlamaForSequenceClassification")
    named = {"key": "self_attn.k_proj", "attention_out": "self_attn.o_proj"}
    FAMILIES._members = {**FAMILIES._members, "llama": dataclasses.replace(FAMILIES["llama"], **named)}
    with pytest.raises(UnsupportedError) as caught:
        narrow(model)
    for reason in ("turns queries and keys by their positions", "several query heads share a key head"):
        assert reason in str(caught.value)


def test_sizes_that_do_not_fit():
    with pytest.raises(ConfigError) as caught:
        narrow(tiny("bert"), head_dim=16, layers=[0, 2])
    assert len(caught.value.faults) == 2
    assert "has [2]; the model has 2 layers" in caught.value.faults[0]
    assert "head_dim is 16; BertForSequenceClassification has heads of 16 dimensions" in caught.value.faults[1]
    with pytest.raises(ConfigError) as caught:
        SNNKConfig(parts=[{"part": "narrow_heads", "head_dim": 0, "init": "dta", "layers": "some"}])
    assert len(caught.value.faults) == 3


@pytest.mark.parametrize(
    "other", [AttentionPart(num_features=8), AdapterPart(num_features=4, placement="query_value")], ids=["linear", "qv"]
)
def test_what_cannot_be_folded_together_says_so(other):
    parts = [NarrowHeadsPart(head_dim=6), other]
    model = get_snnk_model(tiny("bert"), SNNKConfig(parts=parts, modules_to_save=[])).eval()
    with pytest.raises(UnsupportedError, match="has no folded form in this place"):
        bundle(model)


def test_beside_other_parts():
    """An adapter behind the output projection folds around the narrower Linear."""
    parts = [NarrowHeadsPart(head_dim=6), AdapterPart(num_features=4)]
    for family in ("bert", "vit"):
        bundle(trained(get_snnk_model(tiny(family), SNNKConfig(parts=parts, modules_to_save=[])).eval(), 0.2))
