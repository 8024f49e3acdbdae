"""Narrower FFN blocks: the kept units and their contraction against brute force, and every door that users have."""

from __future__ import annotations

import copy
import dataclasses

import numpy as np
import peft
import pytest
import torch
from sklearn.linear_model import Ridge
from torch import nn

from snnk_peft import (
    FAMILIES,
    AdapterPart,
    AttentionPart,
    FFNPart,
    NarrowFFNPart,
    NarrowHeadsPart,
    Part,
    SNNKConfig,
    bundle,
    calibrate,
    check_family,
    get_snnk_model,
)
from snnk_peft.errors import ConfigError, UnsupportedError
from snnk_peft.solvers import descent
from snnk_peft.solvers.landmarks import SecondMoments
from snnk_peft.solvers.narrow import choose_units, narrow_units, second_moment
from tests.tiny_families import build, main_head
from tests.tiny_models import inputs_for, logits, tiny, trained

F64 = torch.float64


def narrow(model: nn.Module, *others, **options) -> peft.PeftModel:
    return get_snnk_model(model, SNNKConfig(parts=[NarrowFFNPart(**options), *others], modules_to_save=[])).eval()


def batches(model: nn.Module, count: int = 10) -> list[dict[str, torch.Tensor]]:
    return [inputs_for(model, 8, 12, seed=number) for number in range(count)]


def _seeded(number: int) -> torch.Generator:
    return torch.Generator().manual_seed(number)


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=_seeded(seed), dtype=F64)


def moments(hidden: torch.Tensor, parts: int = 3) -> SecondMoments:
    found = SecondMoments(hidden.shape[1])
    for each in hidden.chunk(parts):
        found.update(each)
    return found


def correlated(tokens: int, units: int = 8) -> torch.Tensor:
    """Hidden units that partly say the same, with means."""
    return (randn(tokens, 5, seed=1) @ randn(5, units, seed=2)).relu() + 0.3 * randn(tokens, units, seed=3) + 0.5


# --- solver -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("intercept", [True, False])
@pytest.mark.parametrize("ridge", [1e-3, 0.3])
def test_the_contraction_is_scikit_learns_ridge_of_what_is_lost(ridge, intercept):
    hidden, weight = correlated(200), randn(3, 8, seed=4)
    train = moments(hidden)
    fit = narrow_units(train, moments(correlated(50)), weight, 5, ridges=[ridge], intercept=intercept)
    lost = np.setdiff1d(np.arange(8), fit.kept)
    centred = hidden[:, fit.kept] - (hidden[:, fit.kept].mean(0) if intercept else 0)
    strength = ridge * float(centred.square().mean(0).mean()) * len(hidden)
    expected = Ridge(alpha=strength, fit_intercept=intercept).fit(
        hidden[:, fit.kept].numpy(), (hidden[:, lost] @ weight[:, lost].T).numpy()
    )
    np.testing.assert_allclose(fit.weight - weight[:, fit.kept], expected.coef_, rtol=1e-7, atol=1e-9)
    if intercept:
        np.testing.assert_allclose(fit.offset, expected.intercept_, rtol=1e-7, atol=1e-9)
    else:
        assert fit.offset is None


@pytest.mark.parametrize("intercept", [True, False])
def test_the_error_is_that_of_the_held_out_tokens(intercept):
    hidden, other, weight = correlated(200), correlated(60) * 1.1 + 0.2, randn(3, 8, seed=4)
    fit = narrow_units(moments(hidden), moments(other), weight, 5, ridges=[1e-2, 1e-1, 1e-4], intercept=intercept)
    wanted = other @ weight.T
    given = other[:, fit.kept] @ fit.weight.T + (0 if fit.offset is None else fit.offset)
    error = (given - wanted).square().sum() / (wanted - wanted.mean(0)).square().sum()
    assert fit.error == pytest.approx(float(error), rel=1e-9)


def test_the_ridge_is_the_best_on_held_out_tokens():
    hidden, weight = correlated(12), randn(3, 8, seed=4)
    ridges = [10.0**power for power in range(-6, 2)]
    train, test = moments(hidden), moments(correlated(500)[200:])
    alone = {ridge: narrow_units(train, test, weight, 6, ridges=[ridge], intercept=False).error for ridge in ridges}
    fit = narrow_units(train, test, weight, 6, ridges=ridges, intercept=False)
    assert fit.error == pytest.approx(min(alone.values()))
    assert fit.error == pytest.approx(alone[fit.ridge])
    assert fit.error < 0.999 * max(alone.values())


def test_refit_is_the_fit_to_all_tokens():
    hidden, weight = correlated(200), randn(3, 8, seed=4)
    both = narrow_units(
        moments(hidden[:150]), moments(hidden[150:]), weight, 7, ridges=[1e-2], intercept=True, refit=True
    )
    once = narrow_units(moments(hidden), moments(hidden), weight, 7, ridges=[1e-2], intercept=True)
    assert torch.equal(both.kept, once.kept)
    torch.testing.assert_close(both.weight, once.weight, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(both.offset, once.offset, rtol=1e-10, atol=1e-10)
    assert both.error != once.error


def _error(moment: torch.Tensor, weight: torch.Tensor, kept: list[int]) -> float:
    """Of the best contraction of these units, by least squares."""
    root = torch.linalg.cholesky(moment + 1e-12 * torch.eye(len(moment), dtype=F64))
    best = torch.linalg.lstsq(root[kept].T, root.T @ weight.T).solution
    return float((root.T @ weight.T - root[kept].T @ best).square().sum())


def test_greedy_takes_out_the_unit_that_costs_least():
    """One after the other, as by trying each."""
    moment, weight = second_moment(moments(correlated(300))), randn(3, 8, seed=4)
    left = list(range(8))
    for count in range(7, 2, -1):
        left.remove(min(left, key=lambda unit: _error(moment, weight, [u for u in left if u != unit])))
        assert choose_units(moment, weight, count, ridge=0.0).tolist() == left


def test_leverage_scores_are_those_of_the_definition():
    moment, weight = second_moment(moments(correlated(300))), randn(3, 8, seed=4)
    scores = (moment @ torch.linalg.inv(moment + moment.diagonal().mean() * torch.eye(8, dtype=F64))).diagonal()
    chosen = choose_units(moment, weight, 3, rule="leverage")
    assert set(chosen.tolist()) == set(scores.argsort()[-3:].tolist())


def test_units_that_are_silent_or_doubled_go_first():
    hidden = correlated(300)
    hidden[:, 2] = 0
    hidden[:, 6] = 2 * hidden[:, 1]
    weight = randn(3, 8, seed=4)
    fit = narrow_units(moments(hidden), moments(hidden), weight, 6, ridges=[1e-8], intercept=False)
    assert 2 not in fit.kept
    assert len({1, 6} & set(fit.kept.tolist())) == 1
    assert fit.error < 1e-6


@pytest.mark.parametrize(("count", "rule"), [(0, "greedy"), (9, "leverage"), (4, "best")])
def test_what_cannot_be_chosen(count, rule):
    with pytest.raises(ConfigError, match="expected"):
        choose_units(torch.eye(8, dtype=F64), randn(3, 8), count, rule=rule)


# --- in models --------------------------------------------------------------------------------------------------------

TRIED = ["albert", "bert", "gemma", "gpt2", "llama", "modernbert", "phi3", "vit"]


def with_twins(family: str) -> nn.Module:
    """A model of which a third of all hidden units do nothing new: they are others' doubles, with other weights."""
    model = build(family, main_head(family))
    spec = FAMILIES[family]
    with torch.no_grad():
        for layer in spec.layer_paths(model):
            ends = [name for name in (spec.ffn_in, spec.ffn_up) if name is not None]
            rows = [model.get_submodule(f"{layer}.{name}") for name in ends]
            units = model.get_submodule(f"{layer}.{spec.ffn_out}").weight.shape[0 if family == "gpt2" else 1]
            for linear in rows:
                tensors = [linear.weight.T if family == "gpt2" else linear.weight, getattr(linear, "bias", None)]
                for tensor in (each for each in tensors if each is not None):
                    for half in tensor.split(units):
                        half[: units // 3] = half[-(units // 3) :]
    return model


@pytest.mark.parametrize("rule", ["greedy", "leverage"])
@pytest.mark.parametrize("family", TRIED)
def test_what_adds_nothing_is_left_out(family, rule):
    """Twins share all rows: one of each goes, and the other takes over its column, in gated and plain FFNs alike."""
    model = with_twins(family)
    batch = batches(model)[0]
    expected = logits(model, batch)
    patched = narrow(model, keep=2 / 3, rule=rule)
    before = patched(**batch)[0].detach()
    report = calibrate(patched, batches(model), ridges=[1e-8], progress=False)
    after = patched(**batch)[0].detach()
    if rule == "greedy":
        assert all(slot.error_after < 1e-3 * slot.error_before for slot in report.slots), str(report)
    assert (after - expected).abs().max() < (before - expected).abs().max()
    folded = bundle(patched)
    assert folded.num_parameters() < model.num_parameters()
    torch.testing.assert_close(folded(**batch)[0], after, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("family", ["bert", "llama", "modernbert"])
def test_the_report_is_what_the_model_does(family):
    """Errors of the block itself, measured by hooks on held-out batches, before and after."""
    model = build(family, main_head(family), num_hidden_layers=1)
    spec = FAMILIES[family]
    layer = spec.layer_paths(model)[0]
    given = batches(model)

    def outputs(one: nn.Module, batch) -> torch.Tensor:
        found = []
        hook = one.get_submodule(f"{layer}.{spec.ffn_out}").register_forward_hook(
            lambda module, args, out: found.append(out.detach())
        )
        one(**batch)
        hook.remove()
        return found[0][batch["attention_mask"].bool()]

    def error(one: nn.Module) -> float:
        held_out = [batch for index, batch in enumerate(given) if index in (2, 7)]
        wanted = torch.cat([outputs(model, batch) for batch in held_out])
        found = torch.cat([outputs(one, batch) for batch in held_out])
        return float((found - wanted).square().sum() / (wanted - wanted.mean(0)).square().sum())

    patched = narrow(copy.deepcopy(model), num_features=9)
    before = error(patched.get_base_model())
    report = calibrate(patched, given, refit=False, metric="local", progress=False)
    assert report.slots[0].num_features == 9
    assert report.slots[0].error_before == pytest.approx(before, rel=1e-3)
    assert report.slots[0].error_after == pytest.approx(error(patched.get_base_model()), rel=1e-3)
    assert report.slots[0].error_after < report.slots[0].error_before


@pytest.mark.parametrize("family", ["bert", "llama", "modernbert"])
def test_steps_move_all_matrices_to_less_error(family):
    """Beyond what any contraction of kept units reaches; the same in every call."""
    model = build(family, main_head(family))
    given = batches(model, 20)
    closed, stepped, again = (narrow(copy.deepcopy(model), keep=0.5) for _ in range(3))
    before = calibrate(closed, given, refit=False, progress=False)
    after = calibrate(stepped, given, steps=60, progress=False)
    assert after.slots[0].error_after < 0.9 * before.slots[0].error_after
    assert after.slots[0].error_before == before.slots[0].error_before
    calibrate(again, given, steps=60, progress=False)
    state = again.state_dict()
    assert all(torch.equal(value, state[name]) for name, value in stepped.state_dict().items())
    own = {name for name in state if "snnk_slots" in name}
    assert all(not torch.equal(state[name], closed.state_dict()[name]) for name in own)


def test_steps_that_do_not_help_are_not_taken(monkeypatch):
    model = build("llama", "LlamaForSequenceClassification")
    closed, stepped = (narrow(copy.deepcopy(model)) for _ in range(2))
    calibrate(closed, batches(model), refit=False, progress=False)
    monkeypatch.setattr(descent, "BLOCK_LEARNING_RATE", 30.0)
    calibrate(stepped, batches(model), steps=5, progress=False)
    state = closed.state_dict()
    assert all(torch.equal(value, state[name]) for name, value in stepped.state_dict().items())


def test_a_bundle_has_narrower_linears_and_no_more():
    model = build("llama", "LlamaForCausalLM")
    before = model.num_parameters()
    folded = bundle(trained(narrow(model, layers=[1], num_features=10), 0.2))
    first, second = (layer.mlp for layer in folded.model.layers)
    assert tuple(first.gate_proj.weight.shape) == (24, 16)
    assert [tuple(m.weight.shape) for m in (second.gate_proj, second.up_proj, second.down_proj)] == [
        (10, 16),
        (10, 16),
        (16, 10),
    ]
    assert all(type(m) is nn.Linear and m.bias is None for m in (second.gate_proj, second.up_proj, second.down_proj))
    assert folded.num_parameters() == before - 3 * 14 * 16


def test_every_number_is_trained_and_can_be_switched_off():
    model = tiny("bert")
    batch = batches(model, 1)[0]
    expected, state = logits(model, batch), torch.get_rng_state()
    patched = narrow(model)
    assert torch.equal(torch.get_rng_state(), state)
    assert not torch.equal(logits(patched, batch), expected)
    with patched.disable_adapter():
        assert torch.equal(logits(patched, batch), expected)
    patched.add_adapter("small", SNNKConfig(parts=[NarrowFFNPart(keep=0.25)], modules_to_save=[]))
    wide = logits(patched, batch)
    patched.set_adapter("small")
    assert not torch.equal(logits(patched, batch), wide)
    assert bundle(patched).bert.encoder.layer[0].intermediate.dense.out_features == 16
    patched.set_adapter("default")
    assert torch.equal(logits(patched, batch), wide)
    optimizer = torch.optim.SGD([p for p in patched.parameters() if p.requires_grad], lr=1.0)
    own = {name: p.detach().clone() for name, p in patched.named_parameters() if "snnk_slots.default" in name}
    assert len(own) == 2 * 4
    patched.train()(**batch).logits.square().sum().backward()
    optimizer.step()
    assert all(not torch.equal(value, patched.get_parameter(name)) for name, value in own.items())


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_generation(family):
    """With dynamic and static caches, patched and bundled."""
    head = {"llama": "LlamaForCausalLM", "gpt2": "GPT2LMHeadModel"}[family]
    patched = trained(narrow(build(family, head)), 0.3)
    ids = torch.tensor([[5, 7, 9]])
    options = {"max_new_tokens": 6, "do_sample": False, "attention_mask": torch.ones_like(ids)}
    expected = patched.generate(input_ids=ids, use_cache=False, **options)
    for model in (patched, bundle(patched)):
        for cache in ("dynamic", "static"):
            assert torch.equal(model.generate(input_ids=ids, cache_implementation=cache, **options), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype):
    """Fitted in a half-precision model as in a full one, and bundled in its dtype."""
    model = build("llama", "LlamaForSequenceClassification")
    given = batches(model)
    full, half = narrow(copy.deepcopy(model)), narrow(copy.deepcopy(model).to(dtype))
    exact, report = (calibrate(each, given, metric="local", progress=False) for each in (full, half))
    for one, other in zip(exact.slots, report.slots, strict=True):
        assert other.error_after == pytest.approx(one.error_after, rel=0.2)
    found = logits(half, given[0])
    assert found.dtype == dtype
    folded = bundle(half)
    assert folded.dtype == dtype
    torch.testing.assert_close(logits(folded, given[0]), found, rtol=0.05, atol=0.01)


@pytest.mark.parametrize("placement", ["houlsby", "parallel", "query_value"])
@pytest.mark.parametrize("family", ["bert", "clip_vision_model"])
def test_beside_adapters_and_narrow_heads(family, placement):
    """clip: its activation stands before the expansion among the modules."""
    others: list[Part] = [AdapterPart(num_features=4, placement=placement)]
    if placement != "query_value":
        others.append(NarrowHeadsPart(head_dim=3))
    bundle(trained(narrow(build(family, main_head(family)), *others), 0.2))  # compares the outputs


def test_under_linear_attention():
    attention = AttentionPart(num_features=6)
    bundle(trained(narrow(build("llama", "LlamaForSequenceClassification"), attention), 0.2))


def test_two_parts_that_want_the_same_ffn():
    with pytest.raises((ConfigError, UnsupportedError), match=r"intermediate\.dense"):
        narrow(tiny("bert"), FFNPart(num_features=6))


def test_sizes_that_do_not_fit():
    with pytest.raises(ConfigError) as caught:
        narrow(tiny("bert"), num_features=64, layers=[0, 2])
    assert len(caught.value.faults) == 2
    assert "has [2]; the model has 2 layers" in caught.value.faults[0]
    assert "num_features is 64; layer 0 has 64 hidden units; expected fewer" in caught.value.faults[1]
    with pytest.raises(ConfigError) as caught:
        SNNKConfig(parts=[{"part": "narrow_ffn", "keep": 1.0, "num_features": 0, "rule": "greedi", "layers": "some"}])
    assert len(caught.value.faults) == 4
    assert "Did you mean 'greedy'?" in str(caught.value)


def test_descriptions_that_do_not_fit(monkeypatch):
    with pytest.raises(UnsupportedError, match="calls its activation as a function"):
        narrow(build("esm", main_head("esm")))
    halved = dataclasses.replace(FAMILIES["llama"], ffn_up=None)
    monkeypatch.setitem(FAMILIES._members, "llama", halved)
    with pytest.raises(UnsupportedError, match=r"gives 24 features and .* reads 24; expected 48"):
        narrow(build("llama", "LlamaForCausalLM"))


def test_a_gate_of_another_kind_is_found(monkeypatch):
    """Gate and value exchanged: shapes fit, the hidden units are others."""
    turned = {"ffn_in": "mlp.up_proj", "ffn_up": "mlp.gate_proj"}
    monkeypatch.setitem(FAMILIES._members, "llama", dataclasses.replace(FAMILIES["llama"], **turned))
    with pytest.raises(UnsupportedError, match=r"narrow_ffn: .*down_proj' reads something else than activation"):
        check_family(build("llama", "LlamaForCausalLM"))


def test_activations_that_are_not_finite():
    model = build("llama", "LlamaForSequenceClassification")
    patched = narrow(model)
    before = copy.deepcopy(patched.state_dict())
    with torch.no_grad():
        patched.get_base_model().model.layers[0].mlp.up_proj.base_layer.weight[0, 0] = 3e38
        before["base_model.model.model.layers.0.mlp.up_proj.base_layer.weight"][0, 0] = 3e38
    with pytest.raises(ValueError, match="NaN or infinity"):
        calibrate(patched, batches(model), progress=False)
    assert all(torch.equal(value, before[name]) for name, value in patched.state_dict().items())


@pytest.mark.parametrize(("keep", "units"), [(0.33, 21), (0.67, 43), (0.005, 1)])
def test_a_share_of_the_units_is_rounded_to_the_nearest(keep, units):
    """Of 64: 21.12 and 42.88, and never none."""
    model = bundle(get_snnk_model(tiny("bert"), SNNKConfig(parts=[NarrowFFNPart(keep=keep)])))
    assert model.bert.encoder.layer[0].intermediate.dense.weight.shape == (units, 32)
