"""check_family: true descriptions pass, and each kind of false one is found and named by its path."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch
from transformers import (
    AlbertConfig,
    AlbertForSequenceClassification,
    BertModel,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    ModernBertModel,
)

from snnk_peft import (
    FAMILIES,
    AdapterPart,
    ModelFamily,
    SNNKConfig,
    bundle,
    check_family,
    get_snnk_model,
    register_family,
)
from snnk_peft.errors import UnsupportedError
from tests.tiny_families import build
from tests.tiny_models import CLASSIFIERS, TEXT, TOKENS, tiny

ALL = ["houlsby", "pfeiffer", "parallel", "query_value", "attention", "ffn", "narrow_ffn", "narrow_heads", "pooler"]
SPECIAL = {key: TOKENS[key] for key in ("pad_token_id", "bos_token_id", "eos_token_id")}


def albert_family(**changes: str) -> ModelFamily:
    """ALBERT with a single layer of its own; `ffn_output` ends the FFN, `dropout` is never called."""
    paths = {
        "name": "albert",
        "layers": "{base}.encoder.albert_layer_groups.0.albert_layers",
        "attention": "attention",
        "query": "attention.query",
        "value": "attention.value",
        "attention_adapter": "attention.dense",
        "ffn_in": "ffn",
        "activation": "activation",
        "ffn_out": "ffn_output",
        "ffn_adapter": "ffn_output",
        "ffn_norm": "attention.LayerNorm",
        "pooler": "{base}.pooler",
        "pooler_activation": "{base}.pooler_activation",
    }
    return ModelFamily(**{**paths, **changes})


def albert() -> AlbertForSequenceClassification:
    torch.manual_seed(0)
    return AlbertForSequenceClassification(AlbertConfig(embedding_size=16, **TEXT))


@pytest.mark.parametrize("family", sorted(CLASSIFIERS))
def test_every_classifier_is_as_described(family):
    model = tiny(family)
    before = copy.deepcopy(model.state_dict())
    report = check_family(model)
    assert {*report.checked, *report.left_out} == set(ALL)
    assert {"houlsby", "pfeiffer", "attention"} <= set(report.checked)
    gated = {"parallel", "ffn"} if FAMILIES[family].gated else set()
    fused = {"query_value"} if FAMILIES[family].query is None else set()
    fused |= {"narrow_heads"} if FAMILIES[family].key is None else set()
    assert set(report.left_out) == gated | fused
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert str(report).count("\n") == len(ALL)


@pytest.mark.parametrize("model_class", [BertModel, ModernBertModel], ids=lambda cls: cls.__name__)
def test_bare_encoders_are_as_described(model_class):
    family = model_class.config_class.model_type
    assert {"houlsby", "attention"} <= set(check_family(tiny(family, model_class.__name__)).checked)


def test_decoders_are_as_described():
    llama = LlamaForCausalLM(LlamaConfig(**{**TEXT, **SPECIAL}))
    assert check_family(llama).checked == ["houlsby", "pfeiffer", "query_value", "attention", "narrow_ffn"]
    gpt2 = GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=2, n_head=2, n_positions=64, vocab_size=100, **SPECIAL))
    assert "attention" in check_family(gpt2).checked


def test_a_new_description_is_checked():
    register_family(albert_family()) if "albert" not in FAMILIES else None
    assert "houlsby" in check_family(albert()).checked


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"ffn_adapter": "dropout"}, ["houlsby: ", "pfeiffer: ", "albert_layers.0.dropout'", "is not called"]),
        ({"activation": "dropout"}, ["albert_layers.0.dropout'", "is not called"]),
        ({"attention_adapter": "attention.key"}, []),
        ({"value": "attention.keys"}, ["value: there is no module", "albert_layers.0.attention.keys'"]),
        ({"attention": "ffn"}, ["attention: no gradient reaches", "albert_layers.0.ffn'"]),
        ({"ffn_in": "ffn_output", "ffn_out": "ffn"}, ["ffn: "]),
    ],
    ids=["never-runs", "activation-never-runs", "true-enough", "no-such-module", "no-attention", "exchanged"],
)
def test_a_false_description_is_found(changes, words, monkeypatch):
    monkeypatch.setitem(FAMILIES._members, "albert", albert_family(**changes))
    if not words:  # an adapter behind the keys works, though it is not where the paper puts it
        check_family(albert())
        return
    with pytest.raises(UnsupportedError, match="family 'albert' does not fit AlbertForSequenceClassification") as error:
        check_family(albert())
    assert not [word for word in words if word not in str(error.value)], str(error.value)


def test_a_family_that_takes_no_part_at_all_is_refused(monkeypatch):
    """DeBERTa takes no linear attention; with the FFN described wrongly and the rest left out, no part is left."""
    nothing = {"query": None, "value": None, "pooler": None, "activation": None, "ffn_norm": None}
    family = dataclasses.replace(FAMILIES["deberta-v2"], ffn_out="output.dropout", **nothing)
    monkeypatch.setitem(FAMILIES._members, "deberta-v2", family)
    with pytest.raises(UnsupportedError, match="family 'deberta-v2' does not fit DebertaV2Model") as error:
        check_family(build("deberta-v2", "DebertaV2Model"))
    assert [case for case in ALL if f"{case} left out: " not in str(error.value)] == []
    assert "expected Linear" in str(error.value)  # the reason tells what is wrong


class Blind(torch.autograd.Function):
    """Zero, with the gradient of its input: what is trained before it gets a gradient and changes nothing."""

    @staticmethod
    def forward(ctx, x):
        return torch.zeros_like(x)

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class Blinded(torch.nn.Module):
    def forward(self, x):
        return Blind.apply(x)


class Counting(torch.nn.Module):
    """Adds how often it was called: no call gives back what an earlier one gave."""

    calls = 0

    def forward(self, x):
        self.calls += 1
        return x + self.calls


@pytest.mark.parametrize(
    ("end", "message"),
    [
        (Blinded, "other trained parameters leave the output as it is"),
        (Counting, "with disable_adapter(), logits differs"),
    ],
)
def test_a_model_that_belies_its_gradients_or_cannot_be_restored(end, message):
    model = tiny("bert")
    model.classifier = torch.nn.Sequential(model.classifier, end())
    with pytest.raises(UnsupportedError) as error:
        check_family(model)
    assert f"houlsby: {message}" in str(error.value)


def test_a_head_that_cannot_be_folded_is_found(monkeypatch):
    """MPNet's head calls tanh between the pooler's dense layer and out_proj."""
    family = dataclasses.replace(FAMILIES["mpnet"], pooler="classifier.dense", head_output="classifier.out_proj")
    family = dataclasses.replace(family, pooler_activation=None, classifier_of_pooler="classifier.out_proj")
    monkeypatch.setitem(FAMILIES._members, "mpnet", family)
    with pytest.raises(UnsupportedError, match=r"- pooler: no bundle: .*'classifier.out_proj' reads what"):
        check_family(build("mpnet", "MPNetForSequenceClassification"))


def test_what_only_the_other_models_have_is_left_out_with_its_reason():
    report = check_family(tiny("bert", "BertForTokenClassification"))
    assert list(report.left_out) == ["pooler"]
    assert "bert.pooler" in report.left_out["pooler"]


def test_a_bundle_is_refused():
    with pytest.raises(UnsupportedError, match="is a bundle"):
        check_family(bundle(get_snnk_model(tiny("bert", "BertModel"), SNNKConfig(adapter=AdapterPart(num_features=4)))))


def test_inputs_can_be_given():
    ids, seen, model = torch.tensor([[1, 4, 2]]), [], tiny("bert", "BertModel")
    model.embeddings.word_embeddings.register_forward_hook(lambda module, args, out: seen.append(args[0]))
    assert check_family(model, probe={"input_ids": ids}).checked
    assert seen
    assert all(torch.equal(given, ids) for given in seen)
