"""What a new adapter trains: the head of every task model, or a warning where there is nothing, or nothing runs."""

from __future__ import annotations

import copy
import json
import pickle
import warnings

import pytest
import torch
from peft import LoraConfig, PeftModel, TaskType, get_peft_model
from transformers import (
    AlbertConfig,
    AlbertForSequenceClassification,
    GPT2Config,
    GPT2ForQuestionAnswering,
    GPT2ForTokenClassification,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForQuestionAnswering,
    LlamaForTokenClassification,
)

from snnk_peft import FAMILIES, AdapterPart, AttentionPart, PoolerPart, SNNKConfig, bundle, get_snnk_model
from snnk_peft.errors import ConfigError
from snnk_peft.feature_map import FeatureMap
from tests.package.test_families import albert_family
from tests.tiny_models import TEXT, TOKENS, inputs_for, tiny, trained

SPECIAL = {key: TOKENS[key] for key in ("pad_token_id", "bos_token_id", "eos_token_id")}
LLAMA = LlamaConfig(**TEXT, **SPECIAL)
GPT2 = GPT2Config(n_embd=32, n_layer=2, n_head=2, n_positions=64, vocab_size=100, **SPECIAL)
ADAPTER = {"adapter": AdapterPart(num_features=4)}
HEADS = {
    **{
        f"{f}-answers": (f, c)
        for f, c in [("bert", "BertForQuestionAnswering"), ("roberta", "RobertaForQuestionAnswering")]
    },
    "distilbert-answers": ("distilbert", "DistilBertForQuestionAnswering"),
    "electra-answers": ("electra", "ElectraForQuestionAnswering"),
    "modernbert-answers": ("modernbert", "ModernBertForQuestionAnswering"),
    "xlm-roberta-answers": ("xlm-roberta", "XLMRobertaForQuestionAnswering"),
    "bert-tokens": ("bert", "BertForTokenClassification"),
    "bert-choices": ("bert", "BertForMultipleChoice"),
    "deit-teacher": ("deit", "DeiTForImageClassificationWithTeacher"),
}
OTHERS = {
    "llama-answers": lambda: LlamaForQuestionAnswering(copy.deepcopy(LLAMA)),
    "llama-tokens": lambda: LlamaForTokenClassification(copy.deepcopy(LLAMA)),
    "gpt2-answers": lambda: GPT2ForQuestionAnswering(copy.deepcopy(GPT2)),
    "gpt2-tokens": lambda: GPT2ForTokenClassification(copy.deepcopy(GPT2)),
}


def model_of(head: str):
    torch.manual_seed(0)
    return OTHERS[head]() if head in OTHERS else tiny(*HEADS[head])


@pytest.mark.parametrize("head", [*HEADS, *OTHERS])
def test_the_head_of_every_task_is_trained_without_a_task_type(head):
    base = model_of(head)
    encoder = {id(p) for p in base.base_model.parameters()}
    new = {n for n, p in base.named_parameters() if id(p) not in encoder and "head." not in n}  # ModernBERT's head
    assert new
    parts = {"attention": AttentionPart(num_features=8)} if head.startswith("gpt2") else ADAPTER
    model = get_snnk_model(base, SNNKConfig(**parts))
    names = {
        n.replace(".modules_to_save.default", "").removeprefix("base_model.model.")
        for n, p in model.named_parameters()
        if p.requires_grad
    }
    assert new <= names
    assert not [name for name in names - new if "snnk_slots" not in name]


def test_pretrained_heads_stay_frozen():
    for base in (LlamaForCausalLM(copy.deepcopy(LLAMA)), tiny("bert", "BertForMaskedLM")):
        trainable = [n for n, p in get_snnk_model(base, SNNKConfig(**ADAPTER)).named_parameters() if p.requires_grad]
        assert trainable
        assert all("snnk_slots" in name for name in trainable)


def test_an_answering_model_is_saved_and_loaded_with_its_head(tmp_path):
    model = trained(get_snnk_model(tiny("bert", "BertForQuestionAnswering"), SNNKConfig(**ADAPTER))).eval()
    inputs = inputs_for(tiny("bert"))
    expected = model(**inputs).start_logits
    model.save_pretrained(tmp_path)
    loaded = PeftModel.from_pretrained(tiny("bert", "BertForQuestionAnswering"), tmp_path).eval()
    torch.testing.assert_close(loaded(**inputs).start_logits, expected)
    torch.testing.assert_close(bundle(model)(**inputs).start_logits, expected, rtol=1e-4, atol=1e-5)


# --- nothing to train -----------------------------------------------------------------------------------------------

NOTHING = "has nothing to train: its feature matrices are drawn"


@pytest.mark.parametrize(
    "options",
    [{"projection": "free"}, {"near_field": 2}, {"component": "hrf", "component_params": {"mode": "learned"}}],
    ids=str,
)
def test_what_learns_gives_no_warning(options, recwarn):
    get_snnk_model(tiny("bert", "BertModel"), SNNKConfig(attention=AttentionPart(num_features=8, **options)))
    get_snnk_model(tiny("bert"), SNNKConfig(attention=AttentionPart(num_features=8)))  # trains its classifier
    config = SNNKConfig(attention=AttentionPart(num_features=8), modules_to_save=[])  # says that nothing is trained
    get_snnk_model(tiny("bert", "BertModel"), config)
    assert not [warning for warning in recwarn if NOTHING in str(warning.message)]


def test_a_drawn_attention_alone_says_that_nothing_is_trained():
    with pytest.warns(UserWarning, match=NOTHING) as caught:
        get_snnk_model(tiny("bert", "BertModel"), SNNKConfig(attention=AttentionPart(num_features=8)))
    text = next(str(warning.message) for warning in caught if NOTHING in str(warning.message))
    assert all(word in text for word in ("BertModel", "modules_to_save=[", "'free'", "near_field", "AdapterPart"))


def test_what_is_loaded_to_be_used_gives_no_warning(tmp_path):
    with pytest.warns(UserWarning, match=NOTHING):
        model = get_snnk_model(tiny("bert", "BertModel"), SNNKConfig(attention=AttentionPart(num_features=8)))
    model.save_pretrained(tmp_path)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=f".*{NOTHING}")
        PeftModel.from_pretrained(tiny("bert", "BertModel"), tmp_path)
        with pytest.raises(UserWarning, match=NOTHING):
            PeftModel.from_pretrained(tiny("bert", "BertModel"), tmp_path, is_trainable=True)


# --- places that do not run -----------------------------------------------------------------------------------------

UNCALLED = "places that the first forward pass did not call"


def albert(monkeypatch, **changes):
    monkeypatch.setitem(FAMILIES._members, "albert", albert_family(**changes))
    torch.manual_seed(0)
    base = AlbertForSequenceClassification(AlbertConfig(embedding_size=16, **TEXT))
    return get_snnk_model(base, SNNKConfig(adapter=AdapterPart(placement="pfeiffer"))).eval()


@pytest.mark.parametrize("door", ["peft", "base", "copy", "pickle"])
def test_a_slot_that_is_not_called_is_reported_once(monkeypatch, door):
    model = albert(monkeypatch, ffn_adapter="dropout")
    inputs = inputs_for(tiny("bert"))
    if door == "copy":
        model = copy.deepcopy(model)
    if door == "pickle":
        model = pickle.loads(pickle.dumps(model))
    run = model.get_base_model() if door == "base" else model
    with model.disable_adapter(), warnings.catch_warnings():
        warnings.simplefilter("error")
        run(**inputs)  # nothing is said about what is not in use
    with pytest.warns(UserWarning, match=UNCALLED) as caught:
        run(**inputs)
    text = next(str(warning.message) for warning in caught if UNCALLED in str(warning.message))
    assert "albert_layers.0.dropout'" in text
    assert "check_family" in text
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(**inputs)
    assert not model.get_base_model()._forward_hooks


def test_slots_that_are_called_are_not_reported(monkeypatch):
    inputs = inputs_for(tiny("bert"))
    parts = {"adapter": AdapterPart(placement="parallel"), "pooler": PoolerPart(), "attention": AttentionPart()}
    for model in (albert(monkeypatch), get_snnk_model(tiny("bert"), SNNKConfig(**parts)).eval()):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            model(**inputs)
        assert not model.get_base_model()._forward_hooks


# --- num_features of linear attention -------------------------------------------------------------------------------


def rows(part: AttentionPart) -> set[int]:
    model = get_snnk_model(tiny("bert"), SNNKConfig(attention=part))
    return {module.num_features for module in model.modules() if isinstance(module, FeatureMap)}


def test_an_explicit_number_is_not_taken_for_the_default(tmp_path):
    classical = {"component": "elu", "projection": "identity"}
    assert rows(AttentionPart(**classical)) == {16}  # the dimension of a head
    with pytest.raises(ConfigError, match="identity num_features is 64 with dim 16"):
        rows(AttentionPart(**classical, num_features=64))
    assert rows(AttentionPart()) == {64}
    assert rows(AttentionPart(num_features=7, sum_of=[classical])) == {7, 16}
    with pytest.raises(ConfigError, match="identity num_features is 64 with dim 16"):
        rows(AttentionPart(sum_of=[{**classical, "num_features": 64}]))
    for given in (None, 64):
        config = SNNKConfig(attention=AttentionPart(num_features=given))
        config.save_pretrained(tmp_path)
        assert json.loads((tmp_path / "adapter_config.json").read_text())["attention"]["num_features"] == given
        assert SNNKConfig.from_pretrained(str(tmp_path)).attention.num_features == given
    with pytest.raises(ConfigError, match=r"attention.num_features is 0"):
        SNNKConfig(attention=AttentionPart(num_features=0))
    with pytest.raises(ConfigError, match=r"adapter.num_features is None"):
        SNNKConfig(adapter=AdapterPart(num_features=None))


# --- two adapters that save the same head ---------------------------------------------------------------------------


def both(config_class: str) -> PeftModel:
    def config():
        if config_class == "lora":
            return LoraConfig(target_modules=["query"], task_type=TaskType.SEQ_CLS)
        return SNNKConfig(adapter=AdapterPart(num_features=4, placement="query_value"), task_type=TaskType.SEQ_CLS)

    model = get_peft_model(tiny("bert"), config(), adapter_name="first")
    model.add_adapter("second", config())
    return trained(model).eval()


def outcome(action) -> str:
    try:
        result = action()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return repr(result)


@pytest.mark.parametrize("names", [["first"], ["second"], ["first", "second"]], ids=",".join)
def test_two_adapters_that_save_the_classifier_work_as_those_of_peft(names):
    found = {}
    for kind in ("lora", "snnk"):
        model = both(kind)
        heads = model.get_base_model().classifier
        found[kind] = outcome(lambda model=model: model.base_model.set_adapter(names))
        found[kind] += f" {heads.active_adapters} {sorted(heads.modules_to_save)}"
        found[kind] += f" {outcome(lambda model=model: model(**inputs_for(tiny('bert'))).logits.shape)}"
    assert found["snnk"] == found["lora"]
