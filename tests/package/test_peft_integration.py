"""The PEFT side: what a PEFT user does, on tiny models of every family with every part, and on the real MiniLM."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import peft
import pytest
import torch
import transformers
from peft.utils import ModulesToSaveWrapper
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForSequenceClassification, Trainer, TrainingArguments

from snnk_peft import FAMILIES, AdapterPart, AttentionPart, FFNPart, PoolerPart, SNNKConfig, get_snnk_model
from snnk_peft.errors import ConfigError, UnsupportedError
from snnk_peft.layers.feature_stage import FeatureStage
from snnk_peft.layers.slots import Retrained
from snnk_peft.tuner.slot_layer import SlotLayer
from tests.by_hand import edit_json
from tests.every_part import takes
from tests.tiny_models import CLASSIFIERS, SIZES, inputs_for, same, tiny

# PEFT's own methods ask transformers by a deprecated name.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")

DIM = SIZES["hidden_size"]
PARTS: dict[str, dict[str, Any]] = {
    "houlsby": {"adapter": AdapterPart(num_features=4)},
    "pfeiffer": {"adapter": AdapterPart("cos", num_features=4, placement="pfeiffer", init="paper")},
    "parallel": {"adapter": AdapterPart(num_features=4, placement="parallel", init="random", scaling=2.0)},
    "query_value": {"adapter": AdapterPart(projection="free", num_features=4, placement="query_value")},
    "ffn": {"ffn": FFNPart(num_features=6, layers=[1])},
    "ffn-drawn": {"ffn": FFNPart("relu", "orf", 6, linear_path=True, train_contraction=True)},
    "pooler": {"pooler": PoolerPart(num_features=6)},
    "attention": {"attention": AttentionPart(num_features=6, near_field=2)},
    "everything": {
        "adapter": AdapterPart(num_features=4, placement="parallel"),
        "ffn": FFNPart(num_features=6, layers="top-1"),
        "pooler": PoolerPart(num_features=6),
    },
}


def build(family: str, bare: bool = False, **changes: Any) -> nn.Module:
    """A tiny random model of a family: with its classification head, or the encoder alone."""
    model = tiny(family, **changes)
    return model.base_model if bare else model


def inputs(family: str, rows: int = 2) -> dict[str, torch.Tensor]:
    read = "pixel_values" if family in ("vit", "deit") else "input_ids"
    return inputs_for(SimpleNamespace(main_input_name=read, config=SimpleNamespace(vocab_size=100)), rows, 6)


def output(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    with torch.no_grad():
        return model(**batch)[0]


def perturb(model: nn.Module) -> nn.Module:
    """Give every trainable number a value of its own, as training does."""
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter += 0.3 * torch.randn(parameter.shape, generator=generator)
    return model.eval()


def patched(family: str = "bert", part: str = "houlsby", **options: Any) -> peft.PeftModel:
    return perturb(get_snnk_model(build(family), SNNKConfig(**PARTS[part], **options)))


def loaded(base: nn.Module, folder: Path) -> list[nn.Module]:
    """An adapter on copies of its base, in three ways."""
    by_transformers = copy.deepcopy(base)
    by_transformers.load_adapter(str(folder))
    return [
        peft.PeftModel.from_pretrained(copy.deepcopy(base), folder),
        peft.PeftModel.from_pretrained(copy.deepcopy(base), folder, low_cpu_mem_usage=True),
        by_transformers,
    ]


def wrappers(model: nn.Module) -> list[str]:
    return [n for n, m in model.named_modules() if isinstance(m, (SlotLayer, ModulesToSaveWrapper))]


CASES = [(f, p) for f, p in itertools.product(CLASSIFIERS, PARTS) if takes(f, PARTS[p])]


@pytest.mark.parametrize("placement", ["houlsby", "parallel", "query_value"])
def test_learned_rows_take_the_scale_of_their_inputs(placement):
    """The same function at the start, and rows that an optimizer moves as far as those of LoRA."""

    def stages(projection: str) -> list[FeatureStage]:
        part = AdapterPart(projection=projection, num_features=4, placement=placement)
        modules = get_snnk_model(build("bert"), SNNKConfig(adapter=part, seed=5)).modules()
        return [module for module in modules if isinstance(module, FeatureStage)]

    pairs = list(zip(stages("gaussian"), stages("free"), strict=True))
    assert pairs
    for drawn, learned in pairs:
        rows = learned.feature_map.projection.weight
        torch.testing.assert_close(rows, drawn.feature_map.projection.weight * DIM**-0.5)
        assert (drawn.scale, learned.scale) == (DIM**-0.5, 1.0)
        x = torch.randn(3, DIM)
        torch.testing.assert_close(learned(x), drawn(x))


# --- patching -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "part", "task_type"),
    [(f, p, None) for f, p in CASES] + [(f, p, "SEQ_CLS") for f, p in CASES if f not in ("vit", "deit")],
)
def test_patch_train_save_load(family, part, task_type, tmp_path):
    base, batch = build(family), inputs(family)
    reference = output(base, batch)
    config = SNNKConfig(**copy.deepcopy(PARTS[part]), task_type=task_type)
    model = get_snnk_model(copy.deepcopy(base), config).eval()
    other = peft.get_peft_model(copy.deepcopy(base), copy.deepcopy(config)).eval()
    assert type(model) is type(other)
    assert type(model) is (peft.PeftModelForSequenceClassification if task_type else peft.PeftModel)
    assert same(output(model, batch), output(other, batch))
    assert [n for n, p in model.named_parameters() if p.requires_grad] == [
        n for n, p in other.named_parameters() if p.requires_grad
    ]
    if set(config.named_parts()) == {"adapter"}:
        # Adapters start as the identity, bitwise where they stand behind a module. The parallel one hands the
        # contraction a part of a wider tensor, which matrix kernels may sum in another order.
        exact = {"rtol": 0, "atol": 0} if part != "parallel" else {}
        torch.testing.assert_close(output(model, batch), reference, **exact)

    # only the new parameters and the head are trained, and all of them are reached
    model.train()(**batch)[0].square().sum().backward()
    for name, parameter in model.named_parameters():
        new = ".snnk_slots." in name or ".modules_to_save." in name
        assert parameter.requires_grad == new, name
        assert (parameter.grad is not None) == new, name
    head = FAMILIES[family].head_output if "pooler" in config.named_parts() else None
    trained_head = [n for n, p in model.named_parameters() if p.requires_grad and (head or "classifier") in n]
    assert trained_head

    perturb(model)
    expected = output(model, batch)
    assert not torch.equal(expected, reference)
    with model.disable_adapter():
        assert same(output(model, batch), reference)
    assert same(output(model, batch), expected)

    # the file holds the new tensors and nothing of the base model
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "adapter_model.safetensors")
    saved = model.peft_config["default"].modules_to_save or []
    assert all(".snnk_slots." in key or any(f"{name}." in key for name in saved) for key in tensors), list(tensors)
    count = sum(p.numel() for p in model.parameters() if p.requires_grad)
    buffers = sum(b.numel() for n, b in model.named_buffers() if ".snnk_slots." in n)
    assert sum(t.numel() for t in tensors.values()) == count + buffers

    again = [*loaded(base, tmp_path), peft.PeftModel.from_pretrained(base, tmp_path, is_trainable=True).eval()]
    for each in again:
        assert same(output(each, batch), expected)
    assert [n for n, p in again[-1].named_parameters() if p.requires_grad] == [
        n for n, p in model.named_parameters() if p.requires_grad
    ]
    assert not any(p.requires_grad for p in again[0].parameters())


@pytest.mark.parametrize(("family", "part"), [(f, p) for f, p in CASES if p in ("houlsby", "parallel", "ffn")])
def test_bare_encoders(family, part, tmp_path):
    base, batch = build(family, bare=True), inputs(family)
    reference = output(base, batch)
    model = get_snnk_model(copy.deepcopy(base), SNNKConfig(**PARTS[part]))
    assert model.peft_config["default"].modules_to_save is None
    perturb(model)
    expected = output(model, batch)
    assert not torch.equal(expected, reference)
    model.save_pretrained(tmp_path)
    assert same(output(peft.PeftModel.from_pretrained(copy.deepcopy(base), tmp_path), batch), expected)
    assert same(output(model.unload(), batch), reference)


@pytest.mark.parametrize("part", list(PARTS))
@pytest.mark.parametrize("layers", [12, 24])
def test_deep_models(part, layers):
    """PEFT condenses twenty targets or more into common endings; patching must not depend on that."""
    model = get_snnk_model(build("bert", num_hidden_layers=layers), SNNKConfig(**PARTS[part]))
    targets = model.peft_config["default"].target_modules
    assert len(targets) == len([m for m in model.modules() if isinstance(m, SlotLayer)])
    assert all(isinstance(model.base_model.model.get_submodule(path), SlotLayer) for path in targets)


def test_the_distilbert_head_beside_its_pooler():
    """PEFT's "classifier" would also catch "pre_classifier", which the pooler part has replaced."""
    model = get_snnk_model(build("distilbert"), SNNKConfig(**PARTS["pooler"]))
    head = model.base_model.model.classifier
    assert isinstance(head, SlotLayer)
    assert isinstance(head.slots_of("default")[0], Retrained)
    assert head.slots_of("default")[0].module.weight.requires_grad


def test_modules_to_save_by_hand(tmp_path):
    nothing = get_snnk_model(build("bert"), SNNKConfig(**PARTS["houlsby"], modules_to_save=[]))
    assert all(".snnk_slots." in name for name, p in nothing.named_parameters() if p.requires_grad)
    assert same(output(perturb(nothing).unload(), inputs("bert")), output(build("bert"), inputs("bert")))
    model = perturb(
        get_snnk_model(build("bert"), SNNKConfig(**PARTS["houlsby"], modules_to_save=["pooler.dense", "classifier"]))
    )
    model.save_pretrained(tmp_path)
    loaded = peft.PeftModel.from_pretrained(build("bert"), tmp_path)
    assert same(output(loaded, inputs("bert")), output(model, inputs("bert")))
    assert "base_model.model.bert.pooler.dense.weight" in load_file(tmp_path / "adapter_model.safetensors")


# --- several adapters -----------------------------------------------------------------------------------------------


@pytest.fixture
def three() -> peft.PeftModel:
    """A model with adapters of different parts in different places; each output is known."""
    model = get_snnk_model(build("bert"), SNNKConfig(adapter=AdapterPart(num_features=4, layers=[0])), "first")
    model.add_adapter("second", SNNKConfig(ffn=FFNPart(num_features=6, layers=[1]), seed=1))
    model.add_adapter("third", SNNKConfig(**PARTS["everything"], seed=2))
    for name in ("first", "second", "third"):
        model.set_adapter(name)
        perturb(model)
    model.set_adapter("first")
    return model


class TestSeveralAdapters:
    def outputs(self, model) -> dict[str, torch.Tensor]:
        result = {}
        for name in list(model.peft_config):
            model.set_adapter(name)
            result[name] = output(model, inputs("bert"))
        return result

    def test_set_adapter(self, three):
        found = self.outputs(three)
        base = output(build("bert"), inputs("bert"))
        for a, b in itertools.combinations([*found.values(), base], 2):
            assert not torch.equal(a, b)
        for name in found:
            three.set_adapter(name)
            assert three.active_adapter == name
            trained = [n for n, p in three.named_parameters() if p.requires_grad]
            assert trained
            assert all(f".{name}." in n for n in trained)
        with three.disable_adapter():
            assert same(output(three, inputs("bert")), base)

    def test_each_is_saved_and_loaded_alone(self, three, tmp_path):
        found = self.outputs(three)
        three.save_pretrained(tmp_path)
        for name, expected in found.items():
            alone = peft.PeftModel.from_pretrained(build("bert"), tmp_path / name)
            assert same(output(alone, inputs("bert")), expected)
        again = peft.PeftModel.from_pretrained(build("bert"), tmp_path / "third", adapter_name="third")
        for name in ("second", "first"):
            result = again.load_adapter(tmp_path / name, adapter_name=name)
            assert not result.missing_keys
            assert not result.unexpected_keys
        assert again.active_adapter == "third"
        for name, value in self.outputs(again).items():
            assert torch.equal(value, found[name])
        transformers_model = build("bert")
        for name in found:
            transformers_model.load_adapter(str(tmp_path / name), adapter_name=name)
        for name, expected in found.items():
            transformers_model.set_adapter(name)
            assert same(output(transformers_model, inputs("bert")), expected)

    @pytest.mark.parametrize("active", ["first", "second", "third"])
    @pytest.mark.parametrize("deleted", ["first", "second", "third"])
    @pytest.mark.filterwarnings("ignore:Adapter .* was active")
    def test_delete_adapter(self, three, active, deleted):
        found = self.outputs(three)
        three.set_adapter(active)
        three.delete_adapter(deleted)
        rest = [name for name in found if name != deleted]
        assert list(three.peft_config) == rest
        assert not any(f".{deleted}." in name for name in three.state_dict())
        now = three.active_adapter if isinstance(three.active_adapter, str) else three.active_adapter[0]
        assert now == (active if active != deleted else rest[0])
        assert same(output(three, inputs("bert")), found[now])
        status = three.get_model_status()
        assert "irregular" not in (status.active_adapters, status.requires_grad)
        for name, value in self.outputs(three).items():
            assert torch.equal(value, found[name])

    @pytest.mark.filterwarnings("ignore:Adapter .* was active")
    def test_deleting_all_gives_the_base_model(self, three):
        for name in ("first", "second", "third"):
            three.delete_adapter(name)
        # PeftModel itself cannot run without an adapter
        assert same(output(three.base_model.model, inputs("bert")), output(build("bert"), inputs("bert")))

    def test_two_at_once(self):
        """A replacement and adapters around it compose, in any order of activation."""
        results = []
        for order in (["ffn", "a", "b"], ["a", "ffn", "b"]):
            model = get_snnk_model(build("bert"), SNNKConfig(**PARTS["ffn"], modules_to_save=[]), "ffn")
            model.add_adapter("a", SNNKConfig(**PARTS["parallel"], modules_to_save=[]))
            wider = dataclasses.replace(PARTS["parallel"]["adapter"], num_features=7)
            model.add_adapter("b", SNNKConfig(adapter=wider, modules_to_save=[], seed=1))
            for name in ("ffn", "a", "b"):
                model.set_adapter(name)
                perturb(model)
            model.base_model.set_adapter(order)
            results.append(output(model, inputs("bert")))
            model.set_adapter("ffn")
            assert not torch.equal(output(model, inputs("bert")), results[-1])
        torch.testing.assert_close(*results)

    def test_two_replacements_at_once_are_refused(self):
        model = get_snnk_model(build("bert"), SNNKConfig(**PARTS["ffn"], modules_to_save=[]), "a")
        model.add_adapter("b", SNNKConfig(**PARTS["ffn"], modules_to_save=[], seed=1))
        model.base_model.set_adapter(["a", "b"])
        with pytest.raises(ConfigError, match=r"replace the same Linear; activate one of them with set_adapter"):
            output(model, inputs("bert"))

    @pytest.mark.parametrize(
        ("first", "second", "message"),
        [
            ({"adapter": {}}, {"pooler": {}}, "'classifier.dense' cannot be changed: another adapter saves it"),
            ({"pooler": {}}, {"adapter": {}}, "'classifier' cannot be saved in full: an SNNK part changes"),
        ],
        ids=["head-then-pooler", "pooler-then-head"],
    )
    def test_adapters_that_exclude_each_other(self, first, second, message):
        """RoBERTa's pooler lies inside the head that an adapter trains in full."""
        model = perturb(get_snnk_model(build("roberta"), SNNKConfig(**first), "first"))
        before = output(model, inputs("roberta"))
        with pytest.raises((ConfigError, UnsupportedError), match=message):
            model.add_adapter("second", SNNKConfig(**second))
        assert list(model.peft_config) == ["first"]
        assert same(output(model, inputs("roberta")), before)

    def test_a_config_that_does_not_fit_leaves_the_others_alone(self, three):
        before = {key: value.clone() for key, value in three.state_dict().items()}
        with pytest.raises(ConfigError, match="has \\[9\\]"):
            three.add_adapter("fourth", SNNKConfig(adapter=AdapterPart(layers=[9])))
        assert list(three.peft_config) == ["first", "second", "third"]
        assert before.keys() == three.state_dict().keys()


# --- loading what is wrong ------------------------------------------------------------------------------------------


def tamper(folder: Path, change) -> None:
    path = folder / "adapter_model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


def load_in_every_way(base: nn.Module, folder: Path):
    yield lambda: peft.PeftModel.from_pretrained(base, folder)
    yield lambda: peft.PeftModel.from_pretrained(base, folder, low_cpu_mem_usage=True)
    other = SNNKConfig(adapter=AdapterPart(num_features=4, layers=[0]), modules_to_save=[])
    host = get_snnk_model(copy.deepcopy(base), other, "host")
    yield lambda: host.load_adapter(folder, adapter_name="guest")
    assert list(host.peft_config) == ["host"]


def refused_everywhere(base: nn.Module, folder: Path, message: str) -> None:
    """PEFT's loaders raise ConfigError and leave the model in memory as it was."""
    batch = inputs("bert")
    reference, keys = output(base, batch), base.state_dict().keys()
    for load in load_in_every_way(base, folder):
        with pytest.raises(ConfigError, match=message):
            load()
        assert not wrappers(base)
        assert base.state_dict().keys() == keys
        assert same(output(base, batch), reference)


class TestBadCheckpoints:
    @pytest.mark.parametrize("part", ["houlsby", "parallel", "ffn", "pooler"])
    def test_matrices_come_from_the_file(self, part, tmp_path):
        """W is drawn, or copied, when the model is patched; what counts is the checkpoint's."""
        model = patched("bert", part)
        before = output(model, inputs("bert"))
        for module in model.modules():
            if hasattr(module, "redraw"):
                module.weight.mul_(1.5)
        expected = output(model, inputs("bert"))
        assert not torch.equal(before, expected)
        model.save_pretrained(tmp_path)
        for again in loaded(build("bert"), tmp_path):
            assert same(output(again, inputs("bert")), expected)

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"num_hidden_layers": 3}, "layers is 3, the adapter's is 2"),
            ({"num_hidden_layers": 1}, "layers is 1, the adapter's is 2"),
            ({"hidden_size": 64}, "hidden_size is 64, the adapter's is 32"),
            ({"intermediate_size": 40}, "ffn_size is 40, the adapter's is 64"),
        ],
    )
    def test_another_base_model(self, changes, message, tmp_path):
        patched("bert", "everything").save_pretrained(tmp_path)
        base = build("bert", **changes)
        refused_everywhere(base, tmp_path, f"belongs to another base model.*{message}")
        with pytest.raises(ConfigError, match=message):
            base.load_adapter(str(tmp_path))
        assert not wrappers(base)

    def test_another_family(self, tmp_path):
        patched("bert").save_pretrained(tmp_path)
        with pytest.raises(ConfigError, match="model_type is 'roberta', the adapter's is 'bert'"):
            peft.PeftModel.from_pretrained(build("roberta"), tmp_path)

    def test_another_number_of_classes(self, tmp_path):
        patched("bert").save_pretrained(tmp_path)
        message = "a classifier of 2 labels .* has 3. Load the base model with num_labels=2"
        refused_everywhere(build("bert", num_labels=3), tmp_path, message)

    @pytest.mark.parametrize("keep", [0, 4, 200, 0.5, -1])
    def test_truncated_weights(self, keep, tmp_path):
        patched("bert").save_pretrained(tmp_path)
        path = tmp_path / "adapter_model.safetensors"
        content = path.read_bytes()
        path.write_bytes(content[: int(keep * len(content)) if isinstance(keep, float) else keep])
        refused_everywhere(build("bert"), tmp_path, "truncated or corrupted")

    def test_missing_superfluous_and_misshapen_tensors(self, tmp_path):
        patched("bert").save_pretrained(tmp_path)

        def change(tensors):
            key = next(k for k in tensors if k.endswith("layer.0.output.dropout.snnk_slots.0.adapter.readout.A"))
            tensors[key.replace("layer.0", "layer.7")] = tensors.pop(key)
            tensors["base_model.model.classifier.bias"] = torch.zeros(5)

        tamper(tmp_path, change)
        with pytest.raises(ConfigError) as caught:
            peft.PeftModel.from_pretrained(build("bert"), tmp_path)
        assert len(caught.value.faults) == 4
        assert "layer.0.output.dropout.snnk_slots.0.adapter.readout.A is missing" in str(caught.value)
        assert "layer.7.output.dropout.snnk_slots.0.adapter.readout.A has no place in this model" in str(caught.value)
        assert "classifier.bias has shape (5,); the model needs (2,)" in str(caught.value)

    def test_a_changed_config_file(self, tmp_path):
        patched("bert").save_pretrained(tmp_path)
        # With its digests, the change itself is named: test_loading.py
        edit_json(tmp_path / "adapter_config.json", lambda content: content["adapter"].update(num_features=5))
        refused_everywhere(build("bert"), tmp_path, r"has shape \(4, 32\); the model needs \(5, 32\)")

    @pytest.mark.parametrize("part", ["houlsby", "parallel", "ffn-drawn", "pooler"])
    def test_checksums_instead_of_matrices(self, part, tmp_path):
        model = patched("bert", part, save_projection=False)
        full = patched("bert", part)
        expected = output(model, inputs("bert"))
        assert same(output(full, inputs("bert")), expected)
        model.save_pretrained(tmp_path)
        tensors = load_file(tmp_path / "adapter_model.safetensors")
        assert not [key for key in tensors if key.endswith("projection.weight")]
        assert all(tensors[key].shape == (32,) for key in tensors if key.endswith("checksum"))
        for again in loaded(build("bert"), tmp_path):
            assert same(output(again, inputs("bert")), expected)

        def change(tensors):
            key = next(k for k in tensors if k.endswith("checksum"))
            tensors[key] = tensors[key].flip(0).contiguous()

        tamper(tmp_path, change)
        refused_everywhere(build("bert"), tmp_path, "checksum of the redrawn projection")
        with pytest.raises(ConfigError, match="checksum of the redrawn projection"):
            build("bert").load_adapter(str(tmp_path))

    def test_a_changed_seed(self, tmp_path):
        patched("bert", save_projection=False).save_pretrained(tmp_path)
        edit_json(tmp_path / "adapter_config.json", seed=1)
        refused_everywhere(build("bert"), tmp_path, "seed 1")


# --- the rest of PEFT and transformers --------------------------------------------------------------------------------


def test_auto_peft_model(tmp_path):
    build("bert").save_pretrained(tmp_path / "base")
    base = AutoModelForSequenceClassification.from_pretrained(tmp_path / "base").eval()
    model = perturb(get_snnk_model(base, SNNKConfig(**PARTS["everything"], task_type="SEQ_CLS")))
    model.save_pretrained(tmp_path / "adapter")
    loaded = peft.AutoPeftModelForSequenceClassification.from_pretrained(tmp_path / "adapter")
    assert same(output(loaded, inputs("bert")), output(model, inputs("bert")))
    # transformers' own Auto class finds the base model behind an adapter folder
    direct = AutoModelForSequenceClassification.from_pretrained(tmp_path / "adapter").eval()
    assert same(output(direct, inputs("bert")), output(model, inputs("bert")))
    config = peft.PeftConfig.from_pretrained(tmp_path / "adapter")
    assert config.base_model_name_or_path == str(tmp_path / "base")


@pytest.mark.parametrize("part", ["houlsby", "parallel", "everything"])
def test_inject_adapter_in_model(part):
    config = SNNKConfig(**PARTS[part])
    injected = peft.inject_adapter_in_model(config, build("bert"))
    assert isinstance(injected, transformers.BertForSequenceClassification)
    wrapped = patched("bert", part)
    state = {k.removeprefix("base_model.model."): v for k, v in peft.get_peft_model_state_dict(wrapped).items()}
    result = peft.set_peft_model_state_dict(injected, state)
    assert not result.unexpected_keys
    assert same(output(injected.eval(), inputs("bert")), output(wrapped, inputs("bert")))


def test_add_adapter_of_transformers():
    model = build("bert")
    # without a trained head: enable_adapters of transformers forgets to switch modules_to_save on again
    model.add_adapter(SNNKConfig(**PARTS["houlsby"], modules_to_save=[]), adapter_name="mine")
    assert model.active_adapters() == ["mine"]
    trained = [n for n, p in model.named_parameters() if p.requires_grad]
    assert trained
    assert all(".mine." in name for name in trained)
    perturb(model)
    changed = output(model, inputs("bert"))
    model.disable_adapters()
    assert same(output(model, inputs("bert")), output(build("bert"), inputs("bert")))
    model.enable_adapters()
    assert same(output(model, inputs("bert")), changed)


class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 16

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        ids = torch.randint(3, 100, (6,), generator=generator)
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": torch.tensor(index % 2)}


def train(folder: Path, steps: int, resume: bool | str = False) -> nn.Module:
    model = get_snnk_model(build("bert"), SNNKConfig(**PARTS["houlsby"], task_type="SEQ_CLS"))
    arguments = TrainingArguments(
        folder,
        per_device_train_batch_size=4,
        max_steps=steps,
        save_steps=2,
        learning_rate=1e-2,
        lr_scheduler_type="constant",
        seed=0,
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        dataloader_pin_memory=False,
        logging_strategy="no",
    )
    trainer = Trainer(model, arguments, train_dataset=Rows())
    trainer.train(resume_from_checkpoint=resume)
    return trainer.model


def test_trainer_resumes_to_the_same_weights(tmp_path):
    through = train(tmp_path / "a", 4)
    train(tmp_path / "b", 2)
    files = {path.name for path in (tmp_path / "b" / "checkpoint-2").iterdir()}
    assert {"adapter_config.json", "adapter_model.safetensors"} <= files
    assert "model.safetensors" not in files
    resumed = train(tmp_path / "b", 4, resume=str(tmp_path / "b" / "checkpoint-2"))
    fresh = get_snnk_model(build("bert"), SNNKConfig(**PARTS["houlsby"], task_type="SEQ_CLS")).state_dict()
    moved = [key for key, value in through.state_dict().items() if not torch.equal(value, fresh[key])]
    assert moved
    for key, value in through.state_dict().items():
        assert torch.equal(value, resumed.state_dict()[key]), key


@pytest.mark.parametrize("part", ["houlsby", "everything"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_gives_the_same_gradients(part, reentrant):
    def gradients(checkpointing: bool) -> dict[str, torch.Tensor]:
        model = patched("bert", part).train()
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
            model.enable_input_require_grads()
        model(**inputs("bert"))[0].square().sum().backward()
        return {n: p.grad for n, p in model.named_parameters() if p.requires_grad}

    plain, recomputed = gradients(False), gradients(True)
    assert plain.keys() == recomputed.keys()
    for name, gradient in plain.items():
        torch.testing.assert_close(recomputed[name], gradient, msg=name)


@pytest.mark.parametrize(
    ("family", "part"), [(f, "everything") for f in ("bert", "roberta", "distilbert")] + [("vit", "parallel")]
)
def test_compiles_as_one_graph(family, part):
    model = patched(family, part)
    batch = inputs(family)
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    torch.testing.assert_close(output(compiled, batch), output(model, batch))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("part", ["houlsby", "parallel", "ffn-drawn", "everything"])
def test_models_in_other_dtypes(dtype, part, tmp_path):
    base = build("bert").to(dtype)
    model = get_snnk_model(copy.deepcopy(base), SNNKConfig(**PARTS[part]))
    trainable = [p.dtype for n, p in model.named_parameters() if p.requires_grad and ".snnk_slots." in n]
    assert set(trainable) == {torch.float64 if dtype == torch.float64 else torch.float32}  # PEFT's rule for training
    batch = inputs("bert")
    model(**batch)[0].float().square().sum().backward()
    perturb(model)
    out = output(model, batch)
    assert out.dtype == dtype
    reference = perturb(get_snnk_model(build("bert"), SNNKConfig(**PARTS[part])))
    torch.testing.assert_close(out.float(), output(reference, batch), rtol=0.1, atol=0.15)
    with model.disable_adapter():
        assert same(output(model, batch), output(base, batch))
    model.save_pretrained(tmp_path)
    assert same(output(peft.PeftModel.from_pretrained(copy.deepcopy(base), tmp_path), batch), out)
    lean = get_snnk_model(copy.deepcopy(base), SNNKConfig(**PARTS[part])).to(dtype)
    assert output(lean, batch).dtype == dtype


@pytest.mark.parametrize("part", ["houlsby", "parallel", "everything"])
def test_autocast(part):
    model, batch = patched("bert", part), inputs("bert")
    with torch.autocast("cpu", torch.bfloat16):
        mixed = model(**batch)[0]
    torch.testing.assert_close(mixed.float(), output(model, batch), rtol=0.1, atol=0.1)
    mixed.float().sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters() if p.requires_grad)


def test_reports(capsys):
    model = get_snnk_model(build("bert"), SNNKConfig(**PARTS["houlsby"], modules_to_save=[]))
    model.print_trainable_parameters()
    trainable, total = model.get_nb_trainable_parameters()
    assert trainable == 4 * DIM * 4  # four adapters, A is (dim, 4)
    assert f"trainable params: {trainable:,} || all params: {total:,}" in capsys.readouterr().out
    status = model.get_model_status()
    assert (status.peft_types, status.num_adapter_layers) == ({"default": "SNNK"}, 4)
    assert (status.enabled, status.active_adapters, status.merged_adapters) == (True, ["default"], [])
    assert (status.requires_grad, status.available_adapters) == ({"default": True}, ["default"])
    layers = model.get_layer_status()
    assert len(layers) == 4
    assert {layer.module_type for layer in layers} == {"SlotLayer"}
    assert "SlotLayer" in repr(model)


class TestUnloading:
    @pytest.mark.parametrize("part", list(PARTS))
    def test_unload_gives_the_base_model_back(self, part):
        base, batch = build("bert"), inputs("bert")
        options = {} if part == "ffn-drawn" else {"modules_to_save": []}
        model = perturb(get_snnk_model(copy.deepcopy(base), SNNKConfig(**PARTS[part], **options)))
        unloaded = model.unload()
        assert type(unloaded) is type(base)
        assert not [m for m in unloaded.modules() if isinstance(m, SlotLayer)]
        if options:
            assert same(output(unloaded, batch), output(base, batch))
            assert unloaded.state_dict().keys() == base.state_dict().keys()
        again = get_snnk_model(unloaded, SNNKConfig(**PARTS["houlsby"], modules_to_save=[]))
        assert again.get_model_status().num_adapter_layers == 4

    def test_merging_is_refused(self):
        model = patched("bert")
        before = output(model, inputs("bert"))
        for merge in (model.merge_and_unload, model.merge_adapter):
            with pytest.raises(ConfigError, match=r"snnk_peft.bundle\(model\)"):
                merge()
        with pytest.raises(ConfigError, match="nothing to unmerge"):
            model.unmerge_adapter()
        assert same(output(model, inputs("bert")), before)


def test_deepcopy_and_pickle(tmp_path):
    model = patched("bert", "everything", save_projection=True)
    copied = copy.deepcopy(model)
    torch.save(model, tmp_path / "model.pt")
    for other in (copied, torch.load(tmp_path / "model.pt", weights_only=False)):
        assert same(output(other, inputs("bert")), output(model, inputs("bert")))
    before = output(model, inputs("bert"))
    perturb(copied)
    assert same(output(model, inputs("bert")), before)


def test_training_mode_follows_the_model():
    base = build("bert").train()
    model = get_snnk_model(base, SNNKConfig(**PARTS["everything"]))
    assert all(module.training for module in model.modules())
    first, second = (model(**inputs("bert"))[0] for _ in range(2))
    assert not torch.equal(first, second)  # dropout of the base model is on
    model.eval()
    assert not any(module.training for module in model.modules())
    assert same(output(model, inputs("bert")), output(model, inputs("bert")))
    evaluated = get_snnk_model(build("bert").eval(), SNNKConfig(**PARTS["everything"]))
    slots = [m for m in evaluated.modules() if isinstance(m, SlotLayer)]
    assert slots
    assert not any(m.training for slot in slots for m in slot.modules())


def test_get_snnk_model_warns_of_nothing():
    base = build("bert")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        get_snnk_model(base, SNNKConfig(adapter=AdapterPart(num_features=4)))
    with pytest.warns(FutureWarning, match="is_gradient_checkpointing"):  # whoever asks by the old name is still told
        assert not base.is_gradient_checkpointing


def test_the_global_random_state_is_untouched():
    model = build("bert")
    state = torch.get_rng_state()
    get_snnk_model(model, SNNKConfig(**PARTS["everything"]))
    assert torch.equal(torch.get_rng_state(), state)


def test_the_draw_does_not_depend_on_other_parts_or_layers():
    together = patched("bert", "everything").state_dict()
    alone = get_snnk_model(
        build("bert"), SNNKConfig(adapter=dataclasses.replace(PARTS["parallel"]["adapter"], init="default", layers=[1]))
    ).state_dict()
    (one,) = (value for name, value in alone.items() if name.endswith("projection.weight"))
    assert any(torch.equal(one, value) for name, value in together.items() if name.endswith("projection.weight"))
    drawn = [v for n, v in together.items() if n.endswith("projection.weight") and v.shape == one.shape]
    assert len(drawn) == 2
    assert not torch.equal(*drawn)


def test_real_minilm(minilm_dir, tmp_path):
    """The real weights: identity of fresh adapters, a usable data-free FFN, and a round trip."""
    base = AutoModelForSequenceClassification.from_pretrained(minilm_dir, num_labels=2).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(minilm_dir)
    batch = dict(
        tokenizer(
            ["a kernel of truth", "the film is a delight from start to finish"], padding=True, return_tensors="pt"
        )
    )
    with torch.no_grad():
        reference = base.bert(**batch).last_hidden_state
    model = get_snnk_model(
        copy.deepcopy(base),
        SNNKConfig(
            adapter=AdapterPart(num_features=16, placement="parallel"), ffn=FFNPart(layers="top-2", num_features=384)
        ),
    ).eval()
    model.print_trainable_parameters()
    with torch.no_grad():
        converted = model.base_model.model.bert(**batch).last_hidden_state
    cosine = nn.functional.cosine_similarity(converted, reference, dim=-1).mean()
    assert 0.8 < cosine < 0.9999
    perturb(model)
    model.save_pretrained(tmp_path)
    again = peft.PeftModel.from_pretrained(base, tmp_path)
    assert same(output(again, batch), output(model, batch))
