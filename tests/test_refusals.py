"""What a model cannot be asked: each answer says what was given, what was expected and what to do."""

from __future__ import annotations

import copy
import importlib

import peft
import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import MPNetConfig, MPNetForSequenceClassification

from snnk_peft import (
    FAMILIES,
    AdapterPart,
    FFNPart,
    ModelFamily,
    PoolerPart,
    SNNKConfig,
    bundle,
    calibrate,
    get_snnk_model,
)
from snnk_peft.errors import ConfigError, UnsupportedError
from tests.tiny_models import TEXT, TOKENS, inputs_for, tiny, trained

ADAPTER = SNNKConfig(adapter=AdapterPart(num_features=4))
FFN = SNNKConfig(ffn=FFNPart(num_features=4))


def doors(model, config=ADAPTER):
    """Every way to patch a model."""
    yield lambda: get_snnk_model(model, config)
    yield lambda: get_peft_model(model, copy.deepcopy(config))
    yield lambda: peft.inject_adapter_in_model(copy.deepcopy(config), model)


def refused(model, error, match, config=ADAPTER):
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
    refused(lora.get_base_model(), UnsupportedError, match)
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
    refused(small, UnsupportedError, "SnnkBertForSequenceClassification is a bundle; expected a plain.*original model")
    with pytest.raises(ConfigError, match="is a bundle already; expected a patched model"):
        bundle(small)
    lora = get_peft_model(small, LoraConfig(target_modules=["query"]))  # what the message says
    with pytest.raises(ConfigError, match="is a bundle already"):
        bundle(lora)


def test_calibration_without_data():
    model = get_snnk_model(tiny("bert"), FFN)
    for batches in ([], list):
        with pytest.raises(ConfigError, match="batches is empty; expected dicts of model inputs"):
            calibrate(model, batches, progress=False)
    with pytest.raises(ConfigError, match="batches holds 1"):
        calibrate(model, [inputs_for(tiny("bert"))], progress=False)


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
    [ADAPTER, FFN, SNNKConfig(pooler=PoolerPart()), SNNKConfig(adapter=AdapterPart(placement="query_value"))],
    ids=["houlsby", "ffn", "pooler", "query_value"],
)
def test_a_quantized_base(config):
    model = tiny("bert")
    for name, module in list(model.named_modules()):
        if type(module) is nn.Linear:
            parent, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(parent), leaf, Int8Linear(module))
    refused(
        model, UnsupportedError, "Int8Linear at .* holds int8 numbers, so the model is quantized.*its bundle", config
    )
    whole = tiny("bert")
    whole.is_quantized = True  # what transformers sets
    refused(whole, UnsupportedError, "is quantized; expected weights in floating point.*quantization_config", config)


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


def test_lora_targets_that_match_nothing(monkeypatch, root):
    monkeypatch.syspath_prepend(str(root / "recipes"))
    models, settings = (importlib.import_module(f"_lib.{name}") for name in ("models", "settings"))
    method = settings.MethodSection(name="lora", lora=settings.LoraSection(target_modules=["qurey"]))
    with pytest.raises(ConfigError, match=r"target_modules is \['qurey'\], which matches no module.*query, value"):
        models.build_model(tiny("bert"), method, seed=0, calibration=None)


def test_a_pooler_whose_activation_is_a_function(monkeypatch):
    """MPNet's head calls tanh between its dense layer and out_proj: the two cannot be multiplied together."""
    family = ModelFamily(
        name="mpnet",
        layers="{base}.encoder.layer",
        attention="attention.attn",
        attention_adapter="attention.attn.o",
        ffn_in="intermediate.dense",
        activation="intermediate.intermediate_act_fn",
        ffn_out="output.dense",
        ffn_adapter="output.dropout",
        ffn_norm="attention.LayerNorm",
        pooler="classifier.dense",
        classifier="classifier",
        classifier_of_pooler="classifier.out_proj",
        head_output="classifier.out_proj",
    )
    monkeypatch.setitem(FAMILIES._members, "mpnet", family)
    torch.manual_seed(0)
    special = {key: TOKENS[key] for key in ("pad_token_id", "bos_token_id", "eos_token_id")}
    model = MPNetForSequenceClassification(MPNetConfig(**TEXT, **special))
    patched = trained(get_snnk_model(model, SNNKConfig(pooler=PoolerPart("relu", "orf"))))
    match = r"'classifier.out_proj' reads what 'classifier.dense' gives \(classifier_of_pooler\).*pooler_activation"
    with pytest.raises(UnsupportedError, match=match):
        bundle(patched)
