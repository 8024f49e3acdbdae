"""Damaged, swapped and foreign files are refused by name, through every door, before anything changes."""

from __future__ import annotations

import copy
import json
import logging
import math
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSequenceClassification, BertForSequenceClassification
from transformers.modeling_utils import LoadStateDictConfig

from snnk_peft import AdapterPart, FFNPart, NormsPart, SNNKConfig, bundle, get_snnk_model
from snnk_peft.digests import content_faults, open_tensors
from snnk_peft.errors import ConfigError, UnsupportedError
from snnk_peft.stamps import stamp_tensors
from tests.by_hand import edit_json
from tests.mutate_folders import Folders, _by_code_file, logits, run
from tests.tensor_sizes import LargestTensor
from tests.tiny_models import inputs_for, tiny

ROOT = Path(__file__).resolve().parents[2]
WEIGHTS = "adapter_model.safetensors"
A = "base_model.model.bert.encoder.layer.1.output.dropout.snnk_slots.0.adapter.readout.A"
OTHER = A.replace("layer.1", "layer.0")
WORDS = "base_model.model.bert.embeddings.word_embeddings.weight"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    return Folders(tmp_path_factory.mktemp("folders"))


@pytest.fixture
def adapter(folders: Folders, tmp_path: Path) -> Path:
    return Path(shutil.copytree(folders.top / "adapter-adapter", tmp_path / "adapter"))


@pytest.fixture
def bundled(folders: Folders, tmp_path: Path) -> Path:
    return Path(shutil.copytree(folders.top / "bundle-adapter", tmp_path / "bundled"))


def rewrite(path: Path, edit: Callable[[dict[str, torch.Tensor]], object], digests: bool = False) -> None:
    """Change the tensors of a file; its digests are left out, or kept as they were."""
    with safe_open(path, "pt") as file:
        metadata = file.metadata() if digests else {"format": "pt"}
    tensors = load_file(path)
    edit(tensors)
    save_file(tensors, path, metadata)


def hub_cache(folder: Path, top: Path) -> Path:
    """A cache of the Hub client that holds the folder as me/mine."""
    repository = top / "cache" / "models--me--mine"
    shutil.rmtree(repository, ignore_errors=True)
    shutil.copytree(folder, repository / "snapshots" / ("0" * 40))
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0" * 40)
    return repository.parent


def doors(folders: Folders, folder: Path) -> dict[str, Callable[[], Any]]:
    """Every way in which an adapter comes into a model."""
    cache = hub_cache(folder, folder.parent)
    base, doors = copy.deepcopy(folders.base), dict(folders.doors("adapter-adapter"))

    def again() -> Any:
        model = get_snnk_model(copy.deepcopy(base), folders.configs["adapter"])
        before = logits(model.eval())
        try:
            model.load_adapter(folder, "default", is_trainable=True)
        finally:
            folders.touched, folders.plain_again = model, before
        return model.eval()

    return {
        **{label: (lambda load=load: load(folder)) for label, load in doors.items()},
        "another load": again,
        "Hub": lambda: peft.PeftModel.from_pretrained(copy.deepcopy(base), "me/mine", cache_dir=cache),
        "Hub, transformers": lambda: from_hub(copy.deepcopy(base), cache),
        "Hub, load_config": lambda: from_hub(copy.deepcopy(base), cache, by_config=True),
    }


def from_hub(base: Any, cache: Path, by_config: bool = False) -> Any:
    options = {"cache_dir": str(cache)}
    config = LoadStateDictConfig(pretrained_model_name_or_path="me/mine", download_kwargs=options)
    given = {"load_config": config} if by_config else {"peft_model_id": "me/mine", "adapter_kwargs": options}
    base.load_adapter(**given)
    return base


def shorten(tensors: dict[str, torch.Tensor]) -> None:
    tensors[A] = tensors[A][:-1].clone()


def poison(value: float) -> Callable[[dict[str, torch.Tensor]], object]:
    return lambda tensors: tensors[A].view(-1)[3:4].fill_(value)


def retype(dtype: torch.dtype) -> Callable[[dict[str, torch.Tensor]], object]:
    return lambda tensors: tensors.update({A: tensors[A].to(dtype)})


DAMAGE: dict[str, tuple[Callable[[dict[str, torch.Tensor]], object], str]] = {
    "missing": (lambda tensors: tensors.pop(A), r"layer\.1\.output.*readout\.A is missing"),
    "missing head": (lambda tensors: tensors.pop("base_model.model.classifier.bias"), r"classifier\.bias is missing"),
    "extra": (lambda tensors: tensors.update({A + "x": torch.zeros(2)}), r"readout\.Ax has no place in this model"),
    "renamed": (lambda tensors: tensors.update({A + "x": tensors.pop(A)}), r"readout\.A is missing"),
    "reshaped": (shorten, r"readout\.A has shape \(15, 4\); the model needs \(16, 4\)"),
    "base weight": (lambda tensors: tensors.update({WORDS: torch.zeros(30, 16)}), "embeddings.*would overwrite it"),
    "NaN": (poison(float("nan")), r"readout\.A holds NaN or infinity"),
    "infinity": (poison(float("inf")), r"readout\.A holds NaN or infinity"),
    "NaN in bf16": (
        lambda tensors: tensors.update({A: tensors[A].bfloat16() / 0}),
        r"readout\.A holds NaN or infinity",
    ),
    "int": (retype(torch.int64), r"readout\.A has dtype torch\.int64"),
    "bool": (retype(torch.bool), r"readout\.A has dtype torch\.bool"),
    "fp8": (retype(torch.float8_e4m3fn), r"readout\.A has dtype torch\.float8_e4m3fn"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_adapters_are_refused_through_every_door(damage, folders, adapter):
    """Files without digests, so that each fault is found for itself."""
    edit, message = DAMAGE[damage]
    rewrite(adapter / WEIGHTS, edit)
    for label, load in doors(folders, adapter).items():
        with pytest.raises(ConfigError, match=message):
            pytest.fail(f"{label}: {load()}")
        if label == "another load":
            assert torch.equal(logits(folders.touched), folders.plain_again)
        elif label != "PEFT's load_adapter":
            assert torch.equal(logits(folders.touched), folders.plain), label


def test_whole_adapters_load_through_every_door(folders, adapter):
    for label in doors(folders, adapter):
        load = doors(folders, adapter)[label]  # into a model of its own
        torch.testing.assert_close(logits(load()), folders.expected["adapter-adapter"], rtol=1e-5, atol=1e-6)


def test_tensors_in_memory_are_checked_by_transformers_door(folders, adapter):
    tensors = {key.removeprefix("base_model.model."): value for key, value in load_file(adapter / WEIGHTS).items()}
    base = copy.deepcopy(folders.base)
    config = SNNKConfig.from_pretrained(adapter)
    lacking = {key: value for key, value in tensors.items() if not key.endswith("readout.A")}
    with pytest.raises(ConfigError, match=r"readout\.A is missing"):
        base.load_adapter(adapter_state_dict=lacking, peft_config=config)
    base.load_adapter(adapter_state_dict=tensors, peft_config=config)
    torch.testing.assert_close(logits(base), folders.expected["adapter-adapter"], rtol=1e-5, atol=1e-6)


def test_a_flipped_bit_and_swapped_tensors_have_a_name(folders, adapter):
    content = bytearray((adapter / WEIGHTS).read_bytes())
    place = content.find(load_file(adapter / WEIGHTS)[A].numpy().tobytes())
    content[place + 5] ^= 1
    (adapter / WEIGHTS).write_bytes(content)
    for load in doors(folders, adapter).values():
        with pytest.raises(ConfigError, match=r"layer\.1\.output\.dropout.*readout\.A is not what was saved"):
            load()
    content[place + 5] ^= 1
    (adapter / WEIGHTS).write_bytes(content)
    rewrite(adapter / WEIGHTS, lambda tensors: tensors.update({A: tensors[OTHER], OTHER: tensors[A]}), digests=True)
    with pytest.raises(ConfigError, match="is not what was saved"):
        peft.PeftModel.from_pretrained(copy.deepcopy(folders.base), adapter)


def test_digests_cover_names_and_shapes_and_are_not_left_out_by_damage(folders, adapter):
    path = adapter / WEIGHTS
    whole = path.read_bytes()
    for edit, message in (
        (lambda tensors: tensors.pop(A), r"readout\.A was saved in this file and is missing"),
        (lambda tensors: tensors.update({A: tensors[A].reshape(4, 16)}), r"readout\.A is not what was saved"),
    ):
        path.write_bytes(whole)
        rewrite(path, edit, digests=True)
        with open_tensors(path) as file:
            assert any(re.search(message, fault) for fault in content_faults(path, file))
        with pytest.raises(ConfigError, match=r"readout\.A (is missing|has shape)"):
            peft.PeftModel.from_pretrained(copy.deepcopy(folders.base), adapter)
    path.write_bytes(whole)
    tensors = load_file(path)
    for digests in ("{", "[]", "{}"):
        save_file(tensors, path, {"format": "pt", "snnk_digests": digests})
        with pytest.raises(ConfigError, match="is not what was saved"):
            peft.PeftModel.from_pretrained(copy.deepcopy(folders.base), adapter)


def test_files_without_digests_load_with_a_note(folders, adapter, bundled, caplog):
    for path, config, load in (
        (
            adapter / WEIGHTS,
            adapter / "adapter_config.json",
            lambda: peft.PeftModel.from_pretrained(copy.deepcopy(folders.base), adapter),
        ),
        (
            bundled / "model.safetensors",
            bundled / "config.json",
            lambda: AutoModelForSequenceClassification.from_pretrained(bundled),
        ),
    ):
        with caplog.at_level(logging.WARNING, "snnk_peft"):
            load()
            rewrite(path, lambda tensors: None)  # the config still knows a digest of them all
            load()
            assert not caplog.records
            edit_json(config)
            torch.testing.assert_close(logits(load()), folders.expected["adapter-adapter"], rtol=1e-5, atol=1e-6)
            assert f"{path} carries no digests" in caplog.text
        caplog.clear()


def test_only_safetensors_are_read(folders, adapter):
    torch.save(load_file(adapter / WEIGHTS), adapter / "adapter_model.bin")
    with pytest.raises(ConfigError, match="use_safetensors is False"):
        copy.deepcopy(folders.base).load_adapter(str(adapter), use_safetensors=False)
    (adapter / WEIGHTS).unlink()
    for label, load in doors(folders, adapter).items():
        message = "adapter_model.safetensors"
        if "Hub" not in label:
            message = r"has no adapter_model.safetensors; .*adapter_model\.bin is not read, because unpickling"
        with pytest.raises(Exception, match=message) as caught:
            load()
        assert "Hub" in label or isinstance(caught.value, ConfigError), label


def test_a_pickled_bundle_is_not_read(bundled):
    torch.save(load_file(bundled / "model.safetensors"), bundled / "pytorch_model.bin")
    (bundled / "model.safetensors").unlink()
    for load in bundle_doors(bundled).values():
        with pytest.raises(ValueError, match=r"pytorch_model\.bin: only safetensors files are read"):
            load()


@pytest.mark.parametrize("name", ["adapter", "seeds", "replaced", "attention"])
def test_a_config_that_asks_for_too_much_allocates_nothing(name, folders, tmp_path):
    folder = Path(shutil.copytree(folders.top / f"adapter-{name}", tmp_path / "adapter"))

    def enlarge(content: dict[str, Any]) -> None:
        part = next(part for part in ("adapter", "ffn", "attention") if content[part] is not None)
        content[part] |= {"num_features": 10_000_000, "projection": "gaussian"}  # drawn at once, not in a loop

    edit_json(folder / "adapter_config.json", enlarge)
    for load in (peft.PeftModel.from_pretrained, lambda base, folder: base.load_adapter(str(folder))):
        with LargestTensor(10_000_000), pytest.raises(ConfigError, match=r"asks for modules of [\d,]+ parameters"):
            load(copy.deepcopy(folders.base), folder)


def test_a_changed_config_names_the_field(folders, adapter):
    path = adapter / "adapter_config.json"
    path.write_text(path.read_text().replace('"scaling": null', '"scaling": 2.0'))
    with pytest.raises(ConfigError, match=r"adapter\.scaling is '2\.0', which is not what was saved"):
        peft.PeftModel.from_pretrained(copy.deepcopy(folders.base), adapter)
    path.write_text(path.read_text().replace('"SNNK"', '"LORA"'))
    with pytest.raises(ConfigError, match="its peft_type is 'LORA'"):
        peft.PeftModel.from_pretrained(copy.deepcopy(folders.base), adapter)


@pytest.mark.parametrize("base", [None, "", 3])
def test_a_config_without_its_base_model_is_named_where_that_is_needed(base, folders, adapter):
    path = adapter / "adapter_config.json"
    edit_json(path, signed=True, base_model_name_or_path=base)
    with pytest.raises(ConfigError, match=rf"{path}: base_model_name_or_path is {base!r}; expected a folder"):
        doors(folders, adapter)["AutoPeftModel"]()
    peft.PeftModel.from_pretrained(copy.deepcopy(folders.base), adapter)


def test_a_config_changed_in_python_is_meant(folders, adapter):
    config = SNNKConfig.from_pretrained(adapter)
    config.adapter.scaling = 2.0
    peft.PeftModel.from_pretrained(copy.deepcopy(folders.base), adapter, config=config)


def test_embeddings_that_peft_saves_are_named_in_the_config(folders, tmp_path):
    model = get_snnk_model(copy.deepcopy(folders.base), SNNKConfig(adapter=AdapterPart(num_features=4)))
    with torch.no_grad():
        model.get_input_embeddings().weight.mul_(1.5)
    model.eval().save_pretrained(tmp_path, save_embedding_layers=True)
    assert json.loads((tmp_path / "adapter_config.json").read_text())["saved_embeddings"] == [WORDS]
    again = peft.PeftModel.from_pretrained(copy.deepcopy(folders.base), tmp_path)
    torch.testing.assert_close(logits(again), logits(model), rtol=1e-5, atol=1e-6)
    again.save_pretrained(tmp_path / "without")
    assert json.loads((tmp_path / "without" / "adapter_config.json").read_text())["saved_embeddings"] is None


def test_no_other_weight_of_the_base_is_let_in_by_the_config(folders, adapter):
    query = "base_model.model.bert.encoder.layer.0.attention.self.query.weight"
    rewrite(adapter / WEIGHTS, lambda tensors: tensors.update({query: torch.zeros(16, 16)}))
    edit_json(adapter / "adapter_config.json", saved_embeddings=[query])
    with pytest.raises(ConfigError, match=r"query\.weight is a tensor of the base model and would overwrite it"):
        peft.PeftModel.from_pretrained(copy.deepcopy(folders.base), adapter)


# Bundles


def bundle_doors(folder: Path) -> dict[str, Callable[[], Any]]:
    cache = hub_cache(folder, folder.parent)
    return {
        "folder": lambda: AutoModelForSequenceClassification.from_pretrained(folder),
        "Hub": lambda: AutoModelForSequenceClassification.from_pretrained("me/mine", cache_dir=cache),
        "code file": lambda: _by_code_file(folder),
    }


@pytest.mark.parametrize("damage", ["missing", "extra", "reshaped", "NaN", "int", "bit", "truncated"])
def test_damaged_bundles_are_refused_through_every_door(damage, bundled, folders):
    path = bundled / "model.safetensors"
    key = "bert.encoder.layer.1.output.dense.weight"
    edits: dict[str, Callable[[dict[str, torch.Tensor]], object]] = {
        "missing": lambda tensors: tensors.pop(key),
        "extra": lambda tensors: tensors.update({"bert.x": torch.zeros(2)}),
        "reshaped": lambda tensors: tensors.update({key: torch.zeros(16, 25)}),
        "NaN": lambda tensors: tensors[key].view(-1)[7:8].fill_(float("nan")),
        "int": lambda tensors: tensors.update({key: tensors[key].to(torch.int8)}),
        "bit": lambda tensors: tensors[key].view(torch.int32).view(-1)[7:8].bitwise_xor_(1),
    }
    if damage == "truncated":
        path.write_bytes(path.read_bytes()[:-9])
    else:
        rewrite(path, edits[damage], digests=damage == "bit")
    if damage not in ("truncated", "bit"):
        edit_json(bundled / "config.json")
    name = {"extra": r"bert\.x", "truncated": r"model\.safetensors is truncated"}.get(damage, key.replace(".", r"\."))
    for label, load in bundle_doors(bundled).items():
        with pytest.raises(ValueError, match=name) as caught:
            load()
        assert type(caught.value).__name__ == "ConfigError", label


def test_shards_carry_digests_too(folders, tmp_path):
    model = AutoModelForSequenceClassification.from_pretrained(folders.top / "bundle-adapter")
    model.save_pretrained(tmp_path / "bundled", max_shard_size="8KB")
    shards = sorted((tmp_path / "bundled").glob("model-*.safetensors"))
    assert len(shards) > 1
    for load in bundle_doors(tmp_path / "bundled").values():
        torch.testing.assert_close(logits(load()), folders.expected["bundle-adapter"], rtol=1e-5, atol=1e-6)
    content = shards[1].read_bytes()
    shards[1].write_bytes(content[:-1] + bytes([content[-1] ^ 64]))
    for load in bundle_doors(tmp_path / "bundled").values():
        with pytest.raises(ValueError, match="is not what was saved"):
            load()


def test_a_changed_bundle_config_names_the_entry(bundled):
    path = bundled / "config.json"
    original = path.read_text()
    for edit, name in (
        (lambda content: content.update(hidden_act="relu"), "hidden_act is 'relu'"),
        (lambda content: content.update(new=1), "new was not saved"),
        (lambda content: content.pop("layer_norm_eps"), "layer_norm_eps is missing"),
        (lambda content: content["snnk_plan"]["modules"].popitem(), r"snnk_plan\.modules"),
    ):
        path.write_text(original)
        edit_json(path, edit, signed=True)
        for load in bundle_doors(bundled).values():
            with pytest.raises(ValueError, match=name):
                load()
    path.write_text(original)
    edit_json(path, signed=True, id2label={"0": "bad", "1": "good"}, label2id={"bad": 0, "good": 1})
    model = AutoModelForSequenceClassification.from_pretrained(bundled, num_labels=2, output_hidden_states=True)
    assert model.config.id2label[1] == "good"


def test_another_methods_adapter_goes_onto_a_bundle(bundled, tmp_path):
    """Its file is checked against nothing here: the tensors are not those of the bundle."""
    small = AutoModelForSequenceClassification.from_pretrained(bundled)
    lora = peft.get_peft_model(small, peft.LoraConfig(target_modules=["query"], init_lora_weights=False)).eval()
    lora.save_pretrained(tmp_path / "lora")
    again = AutoModelForSequenceClassification.from_pretrained(bundled)
    before = logits(again)
    again.load_adapter(str(tmp_path / "lora"))
    torch.testing.assert_close(logits(again), logits(lora))
    assert not torch.allclose(logits(again), before)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_heads": "2"}, r"num_heads is '2'; expected an integer >= 1"),
        ({"near_field": 0}, r"near_field is '0'; expected an integer >= 1"),
        ({"attention_implementation": "eager"}, "attention_implementation is 'eager'; expected 'snnk"),
        ({"terms": {}}, "terms is '{}'; expected a list of terms"),
        ({"terms": [{"stages": 3, "key_stages": None}]}, r"terms\[0\]\.stages is '3'; expected a list of stages"),
        ({"kind": ["x"]}, "unknown kind of bundled module"),
        ({"what": 1}, "unknown field 'what'"),
        (None, "unknown kind of bundled module None"),
        ({"stage": {"scale": "1"}}, r"scale is '1'; expected a finite number"),
        ({"stage": {"component": 5}}, "unknown component 5"),
        ({"stage": {"component_params": {"x": 1}}}, "parameter 'x' is unknown"),
        # Drawn at once, not in a loop: without the check this ends, and is found out.
        (
            {"stage": {"num_features": 2**25 + 1, "projection": "gaussian", "projection_params": {}}},
            r"num_features × dim is 33554433 × 8; expected <=",
        ),
        ({"stage": None}, "expected an object with component"),
        ({"stage": {"projection_params": {"x": 1}}}, "parameter 'x' is unknown"),
        ({"stage": {"projection": "rademacher"}}, "needs rows drawn from 'gaussian'"),
        ({"stage": {"scale": math.inf}}, r"scale is 'inf'; expected a finite number"),
        ({"num_heads": True}, r"num_heads is 'True'; expected an integer >= 1"),
        ({"num_heads": ...}, r"lacks 'num_heads'"),
        ({"kind": "sequence", "modules": 3}, r"modules is '3'; expected a list of modules"),
    ],
)
def test_plans_are_validated_like_configs(folders, change, message):
    """In files without digests, and in configs made by hand."""
    model = AutoModelForSequenceClassification.from_pretrained(folders.top / "bundle-attention")
    config = copy.deepcopy(model.config)
    modules = config.snnk_plan["modules"]
    path, spec = next((path, spec) for path, spec in modules.items() if spec["kind"] == "attention")
    if change is not None and "stage" in change:
        stages = spec["terms"][0]["stages"]
        stages[0] = None if change["stage"] is None else stages[0] | change["stage"]
    else:
        modules[path] = None if change is None else {k: v for k, v in (spec | change).items() if v is not ...}
    with pytest.raises(ConfigError, match=message):
        type(model)(config)


def test_a_plan_that_is_none_is_refused(folders):
    model = AutoModelForSequenceClassification.from_pretrained(folders.top / "bundle-attention")
    config = copy.deepcopy(model.config)
    config.snnk_plan["modules"] = [3]
    with pytest.raises(ConfigError, match=r"snnk_plan\.modules is '\[3\]'; expected an object"):
        type(model)(config)


# Where models are saved, and what they are loaded into


def test_the_inside_of_a_peft_model_says_where_to_save(folders, tmp_path):
    model = get_snnk_model(copy.deepcopy(folders.base), SNNKConfig(ffn=FFNPart(num_features=4)))
    with pytest.raises(ConfigError, match=r"inside of a PeftModel.*bundle\(model\)"):
        model.get_base_model().save_pretrained(tmp_path / "base")
    assert not (tmp_path / "base").exists()
    with pytest.raises(ConfigError, match="inside of a PeftModel"):
        copy.deepcopy(model).get_base_model().save_pretrained(tmp_path / "base")
    bundle(model).save_pretrained(tmp_path / "bundled")
    model.unload().save_pretrained(tmp_path / "base")
    again = BertForSequenceClassification.from_pretrained(tmp_path / "base")
    assert torch.equal(logits(again), folders.plain)


def test_an_adapter_of_transformers_is_saved_with_digests(folders, tmp_path):
    model = copy.deepcopy(folders.base)
    model.add_adapter(SNNKConfig(adapter=AdapterPart(num_features=4), modules_to_save=[]))
    model.save_pretrained(tmp_path)
    with safe_open(tmp_path / WEIGHTS, "pt") as file:
        assert set(json.loads(file.metadata()["snnk_digests"])) == set(file.keys())
    peft.PeftModel.from_pretrained(copy.deepcopy(folders.base), tmp_path)


def test_an_adapter_folder_is_no_base_model(folders, adapter, monkeypatch):
    model = AutoModelForSequenceClassification.from_pretrained(adapter)
    with pytest.raises(UnsupportedError, match="was loaded with an adapter in it"):
        get_snnk_model(model, SNNKConfig(ffn=FFNPart(num_features=4)))


def test_what_was_saved_with_nan_is_refused_by_name(folders, tmp_path):
    """The file is whole and as it was written; what was written is of no use."""
    model = get_snnk_model(copy.deepcopy(folders.base), folders.configs["adapter"])
    readouts = [name for name, _ in model.named_parameters() if "readout" in name]
    folded = bundle(model)
    with torch.no_grad():
        model.get_parameter(readouts[0]).view(-1)[3] = float("nan")
        folded.classifier.weight[0, 0] = float("inf")
    model.save_pretrained(tmp_path / "adapter")
    folded.save_pretrained(tmp_path / "bundled")
    with pytest.raises(ConfigError, match=r"readout.* holds NaN or infinity"):
        peft.PeftModel.from_pretrained(copy.deepcopy(folders.base), tmp_path / "adapter")
    with pytest.raises(ConfigError, match=r"classifier\.weight holds NaN or infinity"):
        AutoModelForSequenceClassification.from_pretrained(tmp_path / "bundled")


def test_stamping_twice_changes_nothing(adapter):
    before = (adapter / WEIGHTS).read_bytes()
    stamp_tensors(adapter / WEIGHTS)
    assert (adapter / WEIGHTS).read_bytes() == before
    assert not list(adapter.glob("*.tmp"))


@pytest.mark.slow
def test_a_sample_of_mutants(tmp_path):
    """All thousand: python tests/mutate_folders.py --count 1000."""
    bad: list[str] = []
    outcomes = run(60, 7, tmp_path, bad.append)
    assert not bad
    assert sum(outcomes.values()) == 60
    assert outcomes["refused"] > 20


def test_an_adapter_takes_the_weights_of_another_one_in_place(tmp_path: Path) -> None:
    """As PEFT's hotswap_adapter does for LoRA: nothing is patched or compiled anew; other options are refused."""
    base, inputs = tiny("bert"), inputs_for(tiny("bert"))
    rows = AdapterPart(num_features=4, placement="query_value", layers=(0, 1))  # a list in the file

    def answers(model: Any) -> torch.Tensor:
        with torch.no_grad():
            found: torch.Tensor = model(**inputs).logits
        return found

    wanted = []
    for number in range(2):
        model = get_snnk_model(copy.deepcopy(base), SNNKConfig(adapter=rows, parts=[NormsPart()], seed=number))
        torch.manual_seed(number)
        with torch.no_grad():
            for value in model.parameters():
                if value.requires_grad:
                    value.add_(torch.randn_like(value) / 10)
        wanted.append(answers(model.eval()))
        model.save_pretrained(tmp_path / str(number))
    graphs: list[Any] = []

    def counting(graph: Any, example: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    model = peft.PeftModel.from_pretrained(base, tmp_path / "0").eval()
    places = {name: value.data_ptr() for name, value in model.named_parameters()}
    compiled = torch.compile(model, backend=counting)
    assert torch.equal(answers(compiled), wanted[0])
    seen = len(graphs)
    assert seen
    for number in (1, 0, 1):
        model.load_adapter(tmp_path / str(number), "default")
        assert torch.equal(answers(compiled), wanted[number])
    assert len(graphs) == seen
    assert {name: value.data_ptr() for name, value in model.named_parameters()} == places

    other = get_snnk_model(tiny("bert"), SNNKConfig(adapter=replace(rows, scaling=2.0), parts=[NormsPart()]))
    other.save_pretrained(tmp_path / "other")
    with pytest.raises(ConfigError, match=r"a name of its own(?s:.*)adapter.scaling is 2.0 there and None"):
        model.load_adapter(tmp_path / "other", "default")
    lora = peft.get_peft_model(tiny("bert"), peft.LoraConfig(task_type="SEQ_CLS", target_modules=["query"]))
    lora.save_pretrained(tmp_path / "lora")
    with pytest.raises(ConfigError, match="lora is an adapter of LORA"):
        model.load_adapter(tmp_path / "lora", "default")
    assert torch.equal(answers(model), wanted[1])
