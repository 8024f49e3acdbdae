"""Passes of `calibrate` begin at the layer whose inputs are stored: fewer layers run, and nothing else differs."""

from __future__ import annotations

import copy

import pytest
import torch

from snnk_peft import FFNPart, NarrowFFNPart, PoolerPart, SNNKConfig, calibrate, get_snnk_model
from snnk_peft.bundling.report import probe_inputs
from snnk_peft.calibrating.passes import StoredInputs
from snnk_peft.families import FAMILIES
from tests.tiny_families import build, main_head

LAYERS = 4


def given(model, count: int = 5) -> list[dict[str, torch.Tensor]]:
    """Batches that differ, with padding where there is text."""
    made = []
    for number in range(count):
        generator, batch = torch.Generator().manual_seed(number), probe_inputs(model)
        for name, value in batch.items():
            if value.is_floating_point():
                batch[name] = torch.randn(value.shape, generator=generator)
            elif name == "input_ids":
                batch[name] = torch.randint(4, 50, value.shape, generator=generator)
        made.append(batch)
    return made


def calibrated(model, config, batches, monkeypatch, *, full: bool) -> tuple[dict[str, torch.Tensor], int]:
    """What the slots hold afterwards, and how often the first layer ran."""
    family = FAMILIES[model.config.model_type]
    patched = get_snnk_model(copy.deepcopy(model), copy.deepcopy(config))
    first = patched.get_base_model().get_submodule(f"{family.layer_paths(model)[0]}.{family.attention}")
    runs: list[int] = []
    first.register_forward_pre_hook(lambda module, args: runs.append(1))
    with monkeypatch.context() as patch:
        if full:
            patch.setattr(StoredInputs, "load", lambda *args: None)
        calibrate(patched, batches, progress=False)
    return {name: value for name, value in patched.state_dict().items() if "snnk_slots" in name}, len(runs)


@pytest.mark.parametrize("family", sorted({"bert", "gpt2", "llama", "modernbert", "mpnet", "deberta-v2", "vit"}))
def test_what_is_fitted_is_the_same(family, monkeypatch):
    layers = {"n_layer": LAYERS} if family == "gpt2" else {"num_hidden_layers": LAYERS}
    model = build(family, main_head(family), **layers)
    config = SNNKConfig(parts=[NarrowFFNPart()], modules_to_save=[])
    batches = given(model)
    short, few = calibrated(model, config, batches, monkeypatch, full=False)
    full, many = calibrated(model, config, batches, monkeypatch, full=True)
    for name, value in full.items():
        torch.testing.assert_close(short[name], value, rtol=1e-4, atol=1e-5)
    assert many == 1 + LAYERS * len(batches)
    if family == "deberta-v2":  # whose layers give more than they are given; the first look at this costs three runs
        assert few == many + 3
        return
    # To see the order; the first pass; the second, which begins here, its first batch three times; checks of others.
    assert few == 1 + len(batches) + len(batches) + 2 + LAYERS - 2


def test_a_pooler_behind_the_layers(monkeypatch):
    model = build("bert", "BertForSequenceClassification")
    config = SNNKConfig(ffn=FFNPart(num_features=6), pooler=PoolerPart(num_features=6), modules_to_save=[])
    short, few = calibrated(model, config, given(model), monkeypatch, full=False)
    full, many = calibrated(model, config, given(model), monkeypatch, full=True)
    assert few < many
    for name, value in full.items():
        torch.testing.assert_close(short[name], value, rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("ignore:batch .* is not what it was")
def test_other_batches_than_before_run_in_full(monkeypatch):
    """A loader that shuffles: what was stored belongs to other texts."""
    model = build("llama", "LlamaForSequenceClassification", num_hidden_layers=LAYERS)
    config = SNNKConfig(parts=[NarrowFFNPart()], modules_to_save=[])
    found = []
    for full in (False, True):
        batches, reads = given(model), []

        def turning(batches=batches, reads=reads):
            reads.append(1)
            return batches[len(reads) % 5 :] + batches[: len(reads) % 5]

        found.append(calibrated(model, config, turning, monkeypatch, full=full))
    (short, few), (full_slots, many) = found
    assert few == many
    assert all(torch.equal(short[name], value) for name, value in full_slots.items())


def test_layers_that_tell_each_other_more_run_in_full(monkeypatch):
    """The third layer adds what the first one saw, which no hidden state holds."""
    model = build("bert", "BertForSequenceClassification", num_hidden_layers=LAYERS)
    layers, told = model.bert.encoder.layer, {}

    def tell(module, args):
        told["mean"] = args[0].mean(1, keepdim=True)

    layers[0].register_forward_pre_hook(tell)
    layers[2].attention.register_forward_pre_hook(lambda module, args: (args[0] + told["mean"], *args[1:]))
    config = SNNKConfig(parts=[NarrowFFNPart()], modules_to_save=[])
    short, _ = calibrated(model, config, given(model), monkeypatch, full=False)
    full, _ = calibrated(model, config, given(model), monkeypatch, full=True)
    assert all(torch.equal(short[name], value) for name, value in full.items())


def test_a_full_disk_costs_time_only(monkeypatch):
    model = build("llama", "LlamaForSequenceClassification", num_hidden_layers=LAYERS)
    config, batches = SNNKConfig(parts=[NarrowFFNPart()], modules_to_save=[]), given(model)
    full, many = calibrated(model, config, batches, monkeypatch, full=True)

    def fail(*args):
        raise OSError("No space left on device")

    monkeypatch.setattr("snnk_peft.calibrating.passes.save_file", fail)
    with pytest.warns(RuntimeWarning, match="No space left.*Set TMPDIR") as warned:
        short, few = calibrated(model, config, batches, monkeypatch, full=False)
    assert len([each for each in warned if "TMPDIR" in str(each.message)]) == 1
    assert few == many
    assert all(torch.equal(short[name], value) for name, value in full.items())


def test_what_was_stored_is_deleted(monkeypatch, tmp_path):
    """Also by Ctrl-C."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    patched = get_snnk_model(
        build("bert", "BertForSequenceClassification"), SNNKConfig(parts=[NarrowFFNPart()], modules_to_save=[])
    )
    seen: list[int] = []

    def look(module, args):
        seen.append(len(list(tmp_path.rglob("*.safetensors"))))
        if len(seen) == 4:
            raise KeyboardInterrupt

    patched.get_base_model().bert.encoder.layer[0].attention.register_forward_pre_hook(look)
    with pytest.raises(KeyboardInterrupt):
        calibrate(patched, given(patched.get_base_model()), progress=False)
    assert seen == [0, 1, 2, 3]
    assert not list(tmp_path.iterdir())
