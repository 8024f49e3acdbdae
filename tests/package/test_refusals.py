"""What a model cannot be asked: each answer says what was given, what was expected and what to do."""

from __future__ import annotations

import copy
import importlib

import peft
import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import (
    BertConfig,
    EncoderDecoderConfig,
    EncoderDecoderModel,
    MPNetConfig,
    MPNetForSequenceClassification,
)

from snnk_peft import (
    FAMILIES,
    AdapterPart,
    FFNPart,
    ModelFamily,
    NarrowFFNPart,
    PoolerPart,
    SNNKConfig,
    bundle,
    get_snnk_model,
)
from snnk_peft.errors import ConfigError, UnsupportedError
from tests.tiny_families import build, main_head
from tests.tiny_models import TEXT, TOKENS, tiny, trained

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
    models, settings = (importlib.import_module(f"lib.{name}") for name in ("models", "settings"))
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
    refused(both, UnsupportedError, match, config)
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
