"""SNNKConfig and what a model cannot be asked: every bad input is named, all at once, before a model is touched."""

from __future__ import annotations

import copy
import dataclasses
import importlib
import json
from typing import Any

import peft
import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    BertModel,
    EncoderDecoderConfig,
    EncoderDecoderModel,
    GPTJConfig,
    GPTJModel,
    RobertaConfig,
    RobertaModel,
    ViTConfig,
    ViTForMaskedImageModeling,
)

from snnk_peft import (
    FAMILIES,
    AdapterPart,
    AttentionPart,
    FFNPart,
    NarrowFFNPart,
    PoolerPart,
    SNNKConfig,
    bundle,
    convert,
    get_snnk_model,
    register_family,
)
from snnk_peft.config_parts import SHORTCUTS
from snnk_peft.errors import ConfigError, UnsupportedError
from snnk_peft.parts import PARTS, Part, layers_faults, resolve_layers
from snnk_peft.tuner.given_model import plain_model
from snnk_peft.tuner.slot_layer import SlotLayer
from tests.by_hand import edit_json
from tests.tiny_families import build, main_head
from tests.tiny_models import TEXT, tiny, trained

TINY = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}


def bert(**changes) -> BertForSequenceClassification:
    return BertForSequenceClassification(BertConfig(vocab_size=20, **{**TINY, **changes})).eval()


def refused(model: nn.Module, config: SNNKConfig, error: type[Exception]) -> str:
    """The message with which both entry points refuse the config; the model must stay as it is."""
    messages = []
    for entry in (get_snnk_model, peft.get_peft_model):
        state = {key: value.clone() for key, value in model.state_dict().items()}
        modules = [type(module) for module in model.modules()]
        trainable = [p.requires_grad for p in model.parameters()]
        with pytest.raises(error) as caught:
            entry(model, copy.deepcopy(config))
        messages.append(str(caught.value))
        assert [type(module) for module in model.modules()] == modules
        assert [p.requires_grad for p in model.parameters()] == trainable
        assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
        assert state.keys() == model.state_dict().keys()
    assert messages[0] == messages[1]
    return messages[0]


# --- the config alone -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", list(PARTS))
@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("num_features", 0, "num_features is 0; expected an integer >= 1"),
        ("num_features", -3, "num_features is -3"),
        ("num_features", 8.0, "num_features is 8.0"),
        ("num_features", True, "num_features is True"),
        ("component", "rleu", "unknown component 'rleu'; did you mean 'relu'?"),
        ("component", None, "unknown component None"),
        ("projection", "ofr", "unknown projection 'ofr'; did you mean 'orf'?"),
        ("component_params", {"ordre": 1}, "parameter 'ordre' is unknown"),
        ("projection_params", {"norm": "chi"}, "parameter 'norm' is unknown"),
        ("projection_params", {"seed": 3}, "parameter 'seed' is unknown"),
        ("init", "nystroem", "init is 'nystroem'; expected '"),
        ("component_params", None, "component_params is None; expected a dict"),
        ("projection_params", "norms", "projection_params is 'norms'; expected a dict"),
        ("layers", "middle-2", "layers is 'middle-2'"),
        ("layers", "top-0", "layers is 'top-0'"),
        ("layers", [], r"layers is \[\]"),
        ("layers", [-1], r"layers is \[-1\]"),
        ("layers", 3, "layers is 3"),
        ("layers", [True], r"layers is \[True\]"),
    ],
)
def test_bad_fields(name, field, value, message):
    if field not in {f.name for f in dataclasses.fields(PARTS[name])}:
        pytest.skip(f"{name} has no {field}")
    part = PARTS[name](**{field: value})
    where, given = (name, {name: part}) if name in SHORTCUTS else (r"parts\[0\]", {"parts": [part]})
    with pytest.raises(ConfigError, match=f"^{where}.*{message}") as caught:
        SNNKConfig(**given)
    assert len(caught.value.faults) == 1


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ({"placement": "hulsby"}, "adapter.placement is 'hulsby'; expected 'houlsby', .* Did you mean 'houlsby'?"),
        ({"projection": "landmark"}, "an adapter replaces no pretrained weight"),
        ({"scaling": 0}, "adapter.scaling is 0"),
        ({"scaling": "1"}, "adapter.scaling is '1'"),
        ({"init": "random", "gate": False}, "use gate=True"),
        ({"init": "paper", "gate": False}, "the paper's form has a gate"),
        ({"init": "default", "gate": True}, "would both start at zero"),
    ],
)
def test_bad_adapters(part, message):
    with pytest.raises(ConfigError, match=message):
        SNNKConfig(adapter=AdapterPart(**part))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "no part given; set at least one of adapter, pooler, ffn"),
        ({"adapter": 16}, r"adapter is an int; expected AdapterPart\(...\), a dict of its fields or None"),
        ({"adapter": FFNPart()}, "adapter is a FFNPart; expected AdapterPart"),
        ({"adapter": {"num_feature": 8}}, "adapter.unknown field 'num_feature'; did you mean 'num_features'?"),
        ({"adapter": {"num_features": 0}}, "adapter.num_features is 0"),
        ({"adapter": {}, "seed": -1}, "seed is -1"),
        ({"adapter": {}, "seed": "0"}, "seed is '0'"),
        (
            {"ffn": {}, "save_projection": False},
            "'landmark'.* cannot be drawn again",
        ),
        ({"pooler": {"layers": [0]}}, "a model has one pooler"),
        ({"adapter": {}, "modules_to_save": "classifier"}, r"expected a list, \['classifier'\]"),
    ],
)
def test_bad_configs(arguments, message):
    with pytest.raises(ConfigError, match=message) as caught:
        SNNKConfig(**arguments)
    assert len(caught.value.faults) == 1


def test_all_faults_at_once():
    with pytest.raises(ConfigError) as caught:
        SNNKConfig(
            adapter={"num_features": 0, "component": "rleu", "placement": "x", "layers": "top"},
            ffn={"init": "x", "num_features": -1},
            pooler={"colour": 1},
            seed=-1,
        )
    assert len(caught.value.faults) == 8
    assert str(caught.value).startswith("8 faults:\n  - ")


def test_layers():
    assert layers_faults("x", "top-3") == []
    assert resolve_layers("x", "all", 3) == ([0, 1, 2], [])
    assert resolve_layers("x", "top-2", 6) == ([4, 5], [])
    assert resolve_layers("x", "bottom-2", 6) == ([0, 1], [])
    assert resolve_layers("x", [2, 0, 2], 3) == ([0, 2], [])
    assert resolve_layers("x", "top-7", 6) == ([], ["x is 'top-7'; the model has 6 layers"])
    assert resolve_layers("x", [1, 6, 9], 6)[1] == ["x has [6, 9]; the model has 6 layers, indices 0 to 5"]


def test_resolved_adapter_options():
    assert [(p.uses_gate, p.uses_normalize) for p in (AdapterPart(init=i) for i in ("default", "paper", "random"))] == [
        (False, True),
        (True, False),
        (True, True),
    ]
    assert AdapterPart(normalize=False).uses_normalize is False


# --- config and model -----------------------------------------------------------------------------------------------


def test_layers_the_model_lacks_in_every_part():
    config = SNNKConfig(adapter={"layers": [1, 7]}, ffn={"layers": "top-3", "num_features": 4})
    message = refused(bert(), config, ConfigError)
    assert "adapter.layers has [7]; the model has 2 layers, indices 0 to 1" in message
    assert "ffn.layers is 'top-3'; the model has 2 layers" in message


def test_more_landmarks_than_rows():
    config = SNNKConfig(ffn={"num_features": 25}, pooler={"projection": "landmark", "num_features": 17})
    message = refused(bert(), config, ConfigError)
    assert "layer 0 has only 24 hidden units" in message
    assert "the pooler has only 16 rows" in message


def test_faults_of_the_config_and_of_the_model_come_together():
    config = SNNKConfig(adapter={"layers": [5]}, pooler={"num_features": 4})
    vit = ViTForMaskedImageModeling(ViTConfig(**TINY, image_size=8, patch_size=4))
    message = refused(vit, config, ConfigError)
    assert "adapter.layers has [5]" in message
    assert "ViTForMaskedImageModeling (family 'vit') has no pooler to replace" in message


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (
            lambda: RobertaModel(RobertaConfig(vocab_size=20, **TINY)),
            ["no module at 'classifier.dense' in RobertaModel", "transformers 5", "register_family"],
        ),
        (
            lambda: BertModel(BertConfig(vocab_size=20, **TINY), add_pooling_layer=False),
            ["no module at 'pooler.dense' in BertModel"],
        ),
        (lambda: ViTForMaskedImageModeling(ViTConfig(**TINY, image_size=8, patch_size=4)), ["has no pooler"]),
    ],
    ids=["roberta-bare", "bert-without-pooler", "vit"],
)
def test_a_part_the_model_lacks(model, expected):
    message = refused(model(), SNNKConfig(pooler={"num_features": 4}, adapter={}), UnsupportedError)
    assert all(text in message for text in expected), message
    assert message.startswith("pooler")


def test_something_else_in_the_place_of_a_part():
    model = bert()
    model.bert.encoder.layer[1].intermediate.dense = nn.Conv1d(4, 4, 1)
    message = refused(model, SNNKConfig(ffn={"num_features": 4}), UnsupportedError)
    assert "FFN expansion" in message
    assert "Conv1d at 'bert.encoder.layer.1.intermediate.dense'; expected Linear" in message


def test_an_activation_that_is_no_module():
    """A hidden_act given as a function cannot be replaced; it must not be skipped silently."""
    model = BertForSequenceClassification(BertConfig(vocab_size=20, hidden_act="gelu", **TINY))
    for layer in model.bert.encoder.layer:
        del layer.intermediate.intermediate_act_fn
        layer.intermediate.intermediate_act_fn = torch.nn.functional.gelu
    message = refused(model, SNNKConfig(ffn={"num_features": 4}), UnsupportedError)
    assert "FFN activation" in message


def test_parameters_that_a_member_refuses():
    """What several values decide together shows when the model is patched."""
    series = {"component": "taylor", "projection": "rademacher", "component_params": {"series": [1.0], "degree": 3}}
    config = SNNKConfig(
        adapter={"component": "arccos", "component_params": {"order": 1}}, pooler=series | {"init": "random"}
    )
    assert "taylor degree is 3 but only 1 coefficients" in refused(bert(), config, ConfigError)
    config = SNNKConfig(adapter={}, pooler={"projection_params": {"redraw_every": 5}}, save_projection=False)
    assert "redraw_every=5 with save_projection=False" in refused(bert(), config, ConfigError)


def test_broken_weights_are_refused_before_anything_changes():
    model = bert()
    with torch.no_grad():
        model.bert.encoder.layer[1].intermediate.dense.weight[0, 0] = float("nan")
        model.config.problem_type = None
    with pytest.raises(ValueError, match="NaN"):
        get_snnk_model(model, SNNKConfig(adapter={}, ffn={"num_features": 4, "component": "relu", "projection": "orf"}))
    assert not any(isinstance(module, SlotLayer) for module in model.modules())


def test_two_parts_that_cannot_meet():
    config = SNNKConfig(
        adapter={"placement": "parallel", "layers": [0]}, ffn={"num_features": 4, "train_contraction": True}
    )
    message = refused(bert(), config, ConfigError)
    assert "'bert.encoder.layer.0.output.dense' cannot be saved in full" in message


def test_modules_to_save_that_are_not_there():
    message = refused(bert(), SNNKConfig(adapter={}, modules_to_save=["clasifier", "pooler"]), ConfigError)
    assert "modules_to_save: no module path ends in 'clasifier'; did you mean 'classifier'?" in message


def test_wrapped_models():
    with pytest.raises(
        UnsupportedError, match=r"DataParallel; patch the bare model first, get_snnk_model\(model.module"
    ):
        get_snnk_model(nn.DataParallel(bert()), SNNKConfig(adapter={}))
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        wrapped = nn.parallel.DistributedDataParallel(bert())
        for entry in (get_snnk_model, peft.get_peft_model):
            with pytest.raises(
                UnsupportedError, match="wrapped in DistributedDataParallel; patch the bare model first"
            ):
                entry(wrapped, SNNKConfig(adapter={}))
    finally:
        torch.distributed.destroy_process_group()


def test_models_of_no_known_family():
    model = GPTJModel(GPTJConfig(vocab_size=20, n_embd=16, n_layer=1, n_head=2, rotary_dim=4))
    message = refused(model, SNNKConfig(adapter={}), UnsupportedError)
    assert "unknown model family 'gptj'" in message
    assert "register_family" in message
    assert all(name in message for name in FAMILIES)
    with pytest.raises(UnsupportedError, match=r"Linear has no config.model_type"):
        get_snnk_model(nn.Linear(2, 2), SNNKConfig(adapter={}))


def test_a_config_of_another_method():
    with pytest.raises(ConfigError, match="config is a LoraConfig; expected SNNKConfig"):
        get_snnk_model(bert(), peft.LoraConfig())


def test_families_of_ones_own(monkeypatch):
    monkeypatch.setattr(FAMILIES, "_members", dict(FAMILIES._members) if FAMILIES.names() else {})
    register_family(dataclasses.replace(FAMILIES["bert"], name="my-bert", classifier=None))
    model = bert()
    model.config.model_type = "my-bert"
    patched = get_snnk_model(model, SNNKConfig(adapter={"num_features": 4}))
    assert patched.peft_config["default"].modules_to_save is None
    assert patched.peft_config["default"].made_for["model_type"] == "my-bert"
    with pytest.raises(ConfigError, match="model family 'bert' is already registered"):
        register_family(dataclasses.replace(FAMILIES["bert"], classifier=None))
    register_family(dataclasses.replace(FAMILIES["bert"], name="wrong", ffn_in="intermediate.dens"))
    model = bert()
    model.config.model_type = "wrong"
    assert "no module at 'bert.encoder.layer.0.intermediate.dens'" in refused(
        model, SNNKConfig(adapter={}), UnsupportedError
    )
    corrected = register_family(dataclasses.replace(FAMILIES["bert"], name="wrong", ffn_norm=None))
    assert FAMILIES["wrong"] is corrected  # a description is made by trying
    assert "'wrong' has no ffn_norm" in refused(model, SNNKConfig(ffn=FFNPart(num_features=4)), UnsupportedError)


# --- round trips ----------------------------------------------------------------------------------------------------

FULL = {
    "adapter": AdapterPart("cos", "gaussian", 4, [0, 1], placement="parallel", init="paper", scaling=2.0),
    "pooler": PoolerPart("arccos", num_features=4, component_params={"order": 2}),
    "ffn": FFNPart(layers="top-1", num_features=4, linear_path=True),
    "attention": AttentionPart(layers=[0], num_features=4, per_head=True, near_field=2),
    "seed": 3,
    "modules_to_save": ["classifier"],
    "task_type": "SEQ_CLS",
}


def test_parts_from_dicts():
    plain = {name: dataclasses.asdict(value) if name in PARTS else value for name, value in FULL.items()}
    assert SNNKConfig(**plain) == SNNKConfig(**FULL)
    assert list(SNNKConfig(**plain).named_parts()) == [name for name in SHORTCUTS if name in FULL]
    assert SNNKConfig(adapter={}).adapter == AdapterPart()


def test_json_round_trip(tmp_path):
    config = SNNKConfig(**FULL)
    config.save_pretrained(tmp_path)
    for loaded in (SNNKConfig.from_pretrained(tmp_path), peft.PeftConfig.from_pretrained(tmp_path)):
        assert type(loaded) is SNNKConfig
        for name in ("adapter", "pooler", "ffn", "seed", "save_projection", "modules_to_save", "task_type"):
            assert getattr(loaded, name) == getattr(config, name), name
        assert loaded.peft_type == "SNNK" == loaded.peft_type.value
    again = tmp_path / "again"
    SNNKConfig.from_pretrained(tmp_path).save_pretrained(again)
    first, second = (json.loads((d / "adapter_config.json").read_text()) for d in (tmp_path, again))
    assert {**first, "inference_mode": None} == {**second, "inference_mode": None}


def test_a_damaged_config_file_is_refused(tmp_path):
    SNNKConfig(adapter={}).save_pretrained(tmp_path)
    damage = {"num_features": 0, "components": "relu"}
    edit_json(tmp_path / "adapter_config.json", lambda content: content["adapter"].update(damage), signed=True)
    with pytest.raises(ConfigError, match="unknown field 'components'"):
        SNNKConfig.from_pretrained(tmp_path)


def test_the_callers_config_is_not_written_to():
    config = SNNKConfig(adapter={"num_features": 4})
    before = copy.deepcopy(config)
    first = get_snnk_model(bert(), config)
    assert config == before
    other = get_snnk_model(bert(hidden_size=32, num_hidden_layers=3), config)  # so it serves models of other sizes
    assert first.peft_config["default"].made_for["hidden_size"] == 16
    assert other.peft_config["default"].made_for["layers"] == 3


def test_a_saved_config_serves_a_fresh_start_on_another_model(tmp_path):
    get_snnk_model(bert(), SNNKConfig(adapter={"num_features": 4})).save_pretrained(tmp_path)
    config = SNNKConfig.from_pretrained(tmp_path)
    model = get_snnk_model(bert(hidden_size=32, num_labels=3), config)
    assert model.peft_config["default"].made_for["hidden_size"] == 32
    assert config.made_for["hidden_size"] == 16


def test_every_part_has_a_field_and_a_docstring_for_each_of_its_own():
    assert set(SHORTCUTS) <= {f.name for f in dataclasses.fields(SNNKConfig)}
    for cls in map(PARTS.__getitem__, PARTS):
        for field in dataclasses.fields(cls):
            assert f"    {field.name}: " in cls.__doc__, (cls, field.name)


@dataclasses.dataclass
class UndocumentedPart(Part):
    """A user's own, with no decorator of this package."""

    strength: float = 1.0


@pytest.mark.parametrize(
    ("make", "found"),
    [
        (lambda: FFNPart(num_feature=8), [("FFNPart", "num_feature", "num_features")]),
        (
            lambda: AdapterPart("relu", componnent="x", placment="y"),
            [("AdapterPart", "componnent", "component"), ("AdapterPart", "placment", "placement")],
        ),
        (lambda: UndocumentedPart(strenght=2), [("UndocumentedPart", "strenght", "strength")]),
        (lambda: dataclasses.replace(FFNPart(), layrs=[0]), [("FFNPart", "layrs", "layers")]),
        (lambda: SNNKConfig(adaptor=AdapterPart()), [("SNNKConfig", "adaptor", "adapter")]),
        (lambda: dataclasses.replace(FAMILIES["bert"], polar="x"), [("ModelFamily", "polar", "pooler")]),
    ],
    ids=["part", "two", "own part", "replace", "config", "family"],
)
def test_misspelt_options_in_python(make, found):
    with pytest.raises(ConfigError) as caught:
        make()
    assert len(caught.value.faults) == len(found)
    for fault, (name, given, meant) in zip(caught.value.faults, found, strict=True):
        assert fault.startswith(f"{name}: unknown option {given!r}; did you mean {meant!r}? Available: ")


def test_options_that_exist_are_taken_as_before():
    part = UndocumentedPart(2.0)
    assert copy.copy(part) == copy.deepcopy(part) == dataclasses.replace(part) == UndocumentedPart(strength=2.0)
    with pytest.raises(TypeError, match="positional"):
        UndocumentedPart(1.0, 2.0)


def test_entries_of_a_newer_file_are_left_out_with_a_warning(tmp_path):
    """What PEFT does for its own configs."""
    SNNKConfig(adapter={"num_features": 4}).save_pretrained(tmp_path)
    edit_json(tmp_path / "adapter_config.json", signed=True, of_peft_99=True)
    for door in (SNNKConfig, peft.PeftConfig):
        with pytest.warns(UserWarning, match="Unexpected keyword arguments .'of_peft_99'"):
            assert door.from_pretrained(tmp_path).adapter == AdapterPart(num_features=4)


# === models that cannot be patched, and what to do instead ============================================================


ADAPTER = SNNKConfig(adapter=AdapterPart(num_features=4))
FFN = SNNKConfig(ffn=FFNPart(num_features=4))


def doors(model, config=ADAPTER):
    """Every way to patch a model."""
    yield lambda: get_snnk_model(model, config)
    yield lambda: get_peft_model(model, copy.deepcopy(config))
    yield lambda: peft.inject_adapter_in_model(copy.deepcopy(config), model)


def refused_at_every_door(model, error, match, config=ADAPTER):
    before = list(model.state_dict())
    for door in doors(model, config):
        with pytest.raises(error, match=match):
            door()
        assert list(model.state_dict()) == before


def test_a_lora_model():
    lora = get_peft_model(tiny("bert"), LoraConfig(target_modules=["query"]))
    match = r"PeftModel holds adapters already: 'default' \(.*LORA\); expected a plain.*merge_and_unload.*unload\(\)"
    with pytest.raises(UnsupportedError, match=match):
        get_snnk_model(lora, ADAPTER)
    match = r"holds layers of another PEFT method \(Linear at 'bert.encoder.layer.0.attention.self.query', 2 in all\)"
    refused_at_every_door(lora.get_base_model(), UnsupportedError, match)
    get_snnk_model(lora.merge_and_unload(), ADAPTER)  # what the message says


def test_a_model_patched_twice():
    model = get_snnk_model(tiny("bert"), ADAPTER)
    with pytest.raises(UnsupportedError, match=r"'default' \(.*SNNK\).*model.add_adapter\(name, config\)"):
        get_snnk_model(model, ADAPTER)
    with pytest.raises(UnsupportedError, match=r"is patched already \(adapter 'default'\).*model.add_adapter"):
        get_snnk_model(model.get_base_model(), ADAPTER)
    model.add_adapter("second", SNNKConfig(adapter=AdapterPart(num_features=2)))  # what the message says
    get_snnk_model(model.unload(), ADAPTER)


def test_bundles_are_not_patched_and_not_bundled():
    small = bundle(get_snnk_model(tiny("bert"), ADAPTER))
    refused_at_every_door(
        small, UnsupportedError, "SnnkBertForSequenceClassification is a bundle; expected a plain.*original model"
    )
    with pytest.raises(ConfigError, match="is a bundle already; expected a patched model"):
        bundle(small)
    lora = get_peft_model(small, LoraConfig(target_modules=["query"]))  # what the message says
    with pytest.raises(ConfigError, match="is a bundle already"):
        bundle(lora)


class Int8Linear(nn.Linear):
    """As quantization libraries do: still an nn.Linear, whose weight holds integers."""

    def __init__(self, linear: nn.Linear):
        super().__init__(linear.in_features, linear.out_features, device="meta")
        self.scale = linear.weight.detach().abs().max() / 127
        self.weight = nn.Parameter((linear.weight.detach() / self.scale).round().to(torch.int8), requires_grad=False)
        self.bias = linear.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.weight.to(x.dtype) * self.scale, self.bias)


@pytest.mark.parametrize(
    "config",
    [FFN, SNNKConfig(pooler=PoolerPart())],
    ids=["ffn", "pooler"],
)
def test_a_quantized_base(config):
    model = tiny("bert")
    for name, module in list(model.named_modules()):
        if type(module) is nn.Linear:
            parent, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(parent), leaf, Int8Linear(module))
    refused_at_every_door(
        model, UnsupportedError, "Int8Linear at .* holds int8 numbers, so the model is quantized.*its bundle", config
    )
    whole = tiny("bert")
    whole.is_quantized = True  # what transformers sets
    refused_at_every_door(
        whole, UnsupportedError, "is quantized; expected weights in floating point.*quantization_config", config
    )


def test_a_model_made_floating_point_out_of_a_gguf_file(tmp_path):
    """transformers calls it quantized all the same: it is patched, converted and saved as one in floating point."""
    gguf = pytest.importorskip("transformers.quantizers.quantizer_gguf", reason="transformers without GGUF")

    def read() -> Any:
        model = tiny("bert")
        model.config.quantization_config = gguf.GgufConfig()
        model.hf_quantizer = gguf.GgufHfQuantizer(model.config.quantization_config, pre_quantized=True)
        model.is_quantized = True
        return model

    given = read()
    batches = [{"input_ids": torch.randint(3, 100, (4, 7))} for _ in range(8)]
    done = convert(given, batches, None, parts=[FFNPart(num_features=8)], recover=0, progress=False)
    assert given.is_quantized  # as it was
    for model in (done.model, get_snnk_model(read(), SNNKConfig(ffn=FFNPart(num_features=8)))):
        assert not getattr(plain_model(model), "is_quantized", False)
        model.save_pretrained(tmp_path / type(model).__name__)
        assert "quantization_config" not in plain_model(model).config.to_dict()
    packed = read()
    packed.classifier.weight = torch.nn.Parameter(
        packed.classifier.weight.detach().to(torch.uint8), requires_grad=False
    )
    with pytest.raises(UnsupportedError, match="is quantized"):
        get_snnk_model(packed, SNNKConfig(ffn=FFNPart(num_features=8)))


def test_a_model_quantized_after_patching():
    model = get_snnk_model(tiny("bert"), FFN)
    model.get_base_model().is_quantized = True  # what transformers sets
    with pytest.raises(UnsupportedError, match="the model is quantized; load it in full precision"):
        bundle(model)


def test_weighted_sums_of_adapters():
    model = get_snnk_model(tiny("bert"), ADAPTER)
    model.add_adapter("second", ADAPTER)
    with pytest.raises(UnsupportedError, match=r"add_weighted_adapter was called on SNNK adapters.*set_adapter\("):
        model.add_weighted_adapter(["default", "second"], [0.5, 0.5], "mean")


def test_lora_targets_that_match_nothing():
    models, settings = (importlib.import_module(f"snnk_cli.{name}") for name in ("models", "settings"))
    method = settings.MethodSection(name="lora", lora=settings.LoraSection(target_modules=["qurey"]))
    with pytest.raises(ConfigError, match=r"target_modules is \['qurey'\], which matches no module.*query, value"):
        models.build_model(tiny("bert"), method, seed=0, calibration=None)


HALF = {"layers": 1, "attention_heads": 2, "ffn_dim": 24}
SEQ2SEQ = {"vocab_size": 50, "d_model": 16, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
BARTS = {f"{side}_{name}": size for side in ("encoder", "decoder") for name, size in HALF.items()} | SEQ2SEQ
T5 = {**SEQ2SEQ, "d_kv": 8, "d_ff": 24, "num_layers": 1, "num_heads": 2, "decoder_start_token_id": 0}
ENCODER_DECODERS = {
    "BartForConditionalGeneration": ("BartConfig", BARTS, "register_family"),
    "MarianMTModel": ("MarianConfig", {**BARTS, "decoder_start_token_id": 2}, "register_family"),
    "PegasusModel": ("PegasusConfig", BARTS, "register_family"),
    "T5Model": ("T5Config", T5, "register_family"),
    "MT5ForConditionalGeneration": ("MT5Config", T5, "register_family"),
    "WhisperModel": ("WhisperConfig", {**BARTS, "decoder_start_token_id": 2, "num_mel_bins": 4}, "get_encoder"),
}


@pytest.mark.parametrize("config", [ADAPTER, FFN], ids=["adapter", "ffn"])
@pytest.mark.parametrize("name", ENCODER_DECODERS)
def test_encoder_decoders(name, config):
    config_class, sizes, remedy = ENCODER_DECODERS[name]
    with torch.device("meta"):
        model = getattr(transformers, name)(getattr(transformers, config_class)(**sizes))
    with pytest.raises(UnsupportedError) as caught:
        get_snnk_model(model, config)
    text = str(caught.value)
    assert "encoder-decoder" in text.lower()
    assert "not supported" in text
    assert remedy in text
    assert "did you mean" not in text


def test_the_encoder_of_an_encoder_decoder():
    """What the message says, where its family is known."""
    half = BertConfig(**{**TEXT, "num_hidden_layers": 1})
    both = EncoderDecoderModel(EncoderDecoderConfig.from_encoder_decoder_configs(half, half))
    config = SNNKConfig(adapter=AdapterPart(num_features=4), modules_to_save=[])
    match = r"not supported.*BertModel of the family 'bert'.*model\.get_encoder\(\), config\)"
    refused_at_every_door(both, UnsupportedError, match, config)
    get_snnk_model(both.get_encoder(), config)


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma", "modernbert"])
def test_a_gated_ffn_names_the_part_that_converts_it(family):
    model = build(family, main_head(family))
    with pytest.raises(UnsupportedError, match=r"NarrowFFNPart.*narrower.*two expansions multiplied"):
        get_snnk_model(model, FFN)
    narrow = NarrowFFNPart(num_features=8)  # what the message says
    get_snnk_model(model, SNNKConfig(parts=[narrow], modules_to_save=[]))


def test_a_resized_vocabulary_saved_in_full(tmp_path):
    """Loaded onto a base of the old size: both sizes, and what to call; then it loads."""
    model = tiny("bert")
    model.resize_token_embeddings(110)
    config = SNNKConfig(adapter=AdapterPart(num_features=4), modules_to_save=["classifier", "word_embeddings"])
    model = trained(get_snnk_model(model, config)).eval()
    model.save_pretrained(tmp_path)
    match = r"(?s)shape \(110, 32\); the model needs \(100, 32\).*call model.resize_token_embeddings\(110\) first"
    for door in (peft.PeftModel.from_pretrained, lambda base, folder: base.load_adapter(folder)):
        with pytest.raises(ConfigError, match=match):
            door(tiny("bert"), tmp_path)
    base = tiny("bert")
    base.resize_token_embeddings(110)  # what the message says
    again = peft.PeftModel.from_pretrained(base, tmp_path).eval()
    ids = {"input_ids": torch.tensor([[5, 104, 109]])}
    with torch.no_grad():
        torch.testing.assert_close(again(**ids).logits, model(**ids).logits)
