"""Every family and every head: parts do what they say, padding changes nothing, bundles load back through each door."""

from __future__ import annotations

import copy
import dataclasses
import importlib.util
import subprocess
import sys
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
import transformers
from peft import PeftModel
from transformers import (
    AlbertConfig,
    AlbertForSequenceClassification,
)

from snnk_peft import (
    FAMILIES,
    AdapterPart,
    AttentionPart,
    FFNPart,
    ModelFamily,
    PoolerPart,
    SNNKConfig,
    bundle,
    calibrate,
    check_family,
    get_snnk_model,
    register_family,
)
from snnk_peft.bundling.code_file import FILE_NAME
from snnk_peft.bundling.modules import BundledModel
from snnk_peft.bundling.report import probe_inputs
from snnk_peft.calibrating.passes import SlotInputs
from snnk_peft.errors import UnsupportedError
from snnk_peft.layers.slots import real_tokens
from snnk_peft.parts.attention.interface import NAME
from snnk_peft.tuner.slot_layer import SlotLayer
from tests.tiny_families import CONFIGS, build, heads, main_head
from tests.tiny_models import TEXT, TOKENS, tiny, trained

# Of check_family.
PARTS = {"houlsby", "pfeiffer", "parallel", "query_value", "ffn", "pooler", "attention", "narrow_heads", "narrow_ffn"}
CONFIG = {
    "houlsby": {"adapter": AdapterPart(num_features=4)},
    "ffn": {"ffn": FFNPart(num_features=6)},
    "pooler": {"pooler": PoolerPart(num_features=6)},
    "attention": {"attention": AttentionPart(num_features=6)},
}
GATED = {"parallel": "is gated", "ffn": "is gated"}
FUSED = {
    "query_value": "no Linear that makes the query alone",
    "narrow_heads": "has one matrix for queries, keys and values",
}
POOLER = {"pooler": "has no pooler"}
CHANGED = {"narrow_heads": "multiplies queries and keys only after changing them"}
# What a family cannot take, and how it is refused; all else it takes.
REFUSED: dict[str, dict[str, str]] = {
    **{name: {**GATED, **POOLER, **CHANGED} for name in ("gemma", "llama", "mistral", "olmo2", "qwen2", "qwen3")},
    **dict.fromkeys(("opt", "whisper"), POOLER),
    **{f"{tower}_{side}_model": POOLER for tower in ("clip", "siglip") for side in ("text", "vision")},
    "phi3": {**GATED, **FUSED, **POOLER},
    "modernbert": {**GATED, **FUSED},
    "gpt2": {**FUSED, **POOLER},
    "gpt_neox": {**FUSED, **POOLER},
    "esm": {**dict.fromkeys(("parallel", "ffn", "narrow_ffn"), "calls its activation as a function"), **CHANGED},
    "mpnet": {"attention": "bias per pair of positions", **CHANGED},
    "beit": {"attention": "bias per pair of positions"},
    "data2vec-vision": {"attention": "does not call its attention through AttentionInterface", **CHANGED},
    "deberta-v2": {"attention": "bias per pair of positions", **CHANGED},
}
# Models that hold more than a family describes.
TWO_SIDED = {
    "CLIPModel": "text_model",
    "SiglipModel": "text_model",
    "WhisperModel": "decoder",
    "WhisperForCausalLM": "decoder",
    "WhisperForConditionalGeneration": "decoder",
}
HEADS = [(family, head) for family in FAMILIES for head in heads(family) if head not in TWO_SIDED]


def takes(family: str, part: str) -> bool:
    return part not in REFUSED.get(family, {})


def patched(model, *names, **options):
    """The model with parts, all their numbers random."""
    parts = copy.deepcopy({key: part for name in names for key, part in CONFIG[name].items()})
    return trained(get_snnk_model(model, SNNKConfig(**parts, **options))).eval()


def tensors(output) -> dict[str, torch.Tensor]:
    """The tensors of an output, those of a backbone's feature maps included."""
    found = {key: value for key, value in output.items() if isinstance(value, torch.Tensor)}
    return found or {str(index): value for index, value in enumerate(output.feature_maps)}


def agree(given, wanted, **tolerance) -> None:
    given, wanted = tensors(given), tensors(wanted)
    assert wanted
    for key, value in wanted.items():
        torch.testing.assert_close(given[key], value, **({"rtol": 1e-4, "atol": 1e-5} | tolerance))


def test_every_family_is_here():
    assert set(CONFIGS) == set(FAMILIES)
    assert len(HEADS) > 130


# --- parts ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_takes_its_parts_and_refuses_the_others(family):
    """Every slot is called, gradients reach it, disabling gives the original back, the bundle agrees."""
    model = build(family, main_head(family))
    before = copy.deepcopy(model.state_dict())
    report = check_family(model)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert str(report).count("\n") == len(ALL)
    refused = REFUSED.get(family, {})
    assert set(report.left_out) == set(refused)
    assert set(report.checked) == PARTS - set(refused)
    for part, reason in refused.items():
        assert reason in report.left_out[part]


@pytest.mark.parametrize("head", TWO_SIDED)
def test_models_with_two_sides_are_refused(head):
    family = next(name for name in FAMILIES if head in heads(name))
    with pytest.raises(UnsupportedError, match=f"{TWO_SIDED[head]}' beside the layers.*[Pp]atch the (part|encoder)"):
        get_snnk_model(build(family, head), SNNKConfig(adapter=AdapterPart(num_features=4)))


def test_a_tower_is_patched_alone():
    """In place: the model around it then has the parts as well."""
    whole = build("clip", "CLIPModel")
    tower = whole.vision_model
    changed = patched(tower, "houlsby", "attention")
    pixels = probe_inputs(tower)
    agree(whole.vision_model(**pixels), changed(**pixels))
    assert any(isinstance(module, SlotLayer) for module in whole.vision_model.modules())


@pytest.mark.parametrize(
    ("family", "head", "changes", "message"),
    [
        ("opt", "OPTModel", {"do_layer_norm_before": False}, "config.do_layer_norm_before = False"),
        ("dinov2", "Dinov2Model", {"use_swiglu_ffn": True}, "config.use_swiglu_ffn = True"),
    ],
)
def test_other_layouts_of_a_family_are_refused(family, head, changes, message):
    with pytest.raises(UnsupportedError, match=message):
        get_snnk_model(build(family, head, **changes), SNNKConfig(adapter=AdapterPart(num_features=4)))


# --- padding and generation -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", [f for f in FAMILIES if "vocab_size" in CONFIGS[f] and f != "whisper"])
@torch.no_grad()
def test_padding_changes_nothing(family):
    """The hidden states of an example's own tokens, whatever stands beside it in the batch."""
    names = ["houlsby", *(["attention"] if takes(family, "attention") else [])]
    model = patched(build(family, main_head(family)), *names)
    inputs = probe_inputs(model.get_base_model())
    kept = int(inputs["attention_mask"][1].sum())
    assert kept < inputs["input_ids"].shape[1]
    hidden = model(**inputs, output_hidden_states=True).hidden_states[-1][1, :kept]
    alone = model(input_ids=inputs["input_ids"][1:2, :kept], output_hidden_states=True).hidden_states[-1][0]
    torch.testing.assert_close(hidden, alone, rtol=1e-4, atol=1e-5)


CAUSAL = [family for family in FAMILIES if FAMILIES[family].causal]
GENERATE = [(family, head) for family, head in HEADS if family in CAUSAL and head.endswith(("CausalLM", "LMHeadModel"))]


@pytest.mark.parametrize(("family", "head"), GENERATE)
@torch.no_grad()
def test_generation_with_a_cache_is_generation_without(family, head, tmp_path):
    """Of the patched model and of its bundle, after a reload; prompts of two lengths, padded on the left."""
    model = patched(build(family, head), "houlsby", "attention")
    ids = torch.randint(3, 50, (2, 6), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[1, :2] = 0
    options = {"min_new_tokens": 5, "max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    alone = model.generate(input_ids=ids[1:, 2:], use_cache=False, **options)
    options["attention_mask"] = mask
    slow = model.generate(input_ids=ids, use_cache=False, **options)
    assert torch.equal(slow[1, 2:], alone[0])
    assert torch.equal(model.generate(input_ids=ids, **options), slow)
    small = bundle(model)
    small.save_pretrained(tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(loaded.generate(input_ids=ids, **options), slow)


def test_generation_covers_every_causal_family():
    assert {family for family, _ in GENERATE} == {*CAUSAL} - {"clip_text_model"}


# --- every head -----------------------------------------------------------------------------------------------------


def code_of(folder, monkeypatch):
    """The code file of a bundle as a module; a process without the package is tested below."""
    spec = importlib.util.spec_from_file_location("code_of_a_bundle", folder / FILE_NAME)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(("family", "head"), HEADS)
@torch.no_grad()
def test_every_head_bundles_and_loads(family, head, tmp_path, monkeypatch):
    """Through its Auto class with the package, and through the code file's own classes."""
    model = patched(build(family, head), "houlsby")
    inputs = probe_inputs(model.get_base_model())
    wanted = model(**inputs)
    bundle(model).save_pretrained(tmp_path)
    auto = getattr(transformers, heads(family)[head])
    # AutoBackbone asks the Hub even for a folder.
    loaded = (type(bundle(model)) if head.endswith("Backbone") else auto).from_pretrained(tmp_path)
    assert type(loaded).__name__ == f"Snnk{head}"
    agree(loaded(**inputs), wanted)
    alone = getattr(code_of(tmp_path, monkeypatch), f"Snnk{head}")
    assert not issubclass(alone, BundledModel)
    agree(alone.from_pretrained(tmp_path, config=alone.config_class.from_pretrained(tmp_path))(**inputs), wanted)


AFRESH = {
    "LlamaForSequenceClassification": "AutoModelForSequenceClassification",
    "Qwen3ForTokenClassification": "AutoModelForTokenClassification",
    "MistralForQuestionAnswering": "AutoModelForQuestionAnswering",
    "DeiTForImageClassification": "AutoModelForImageClassification",
    "CLIPTextModelWithProjection": "AutoModel",
    "WhisperEncoder": "AutoModel",
}


@pytest.mark.slow
def test_heads_load_in_a_process_without_the_package(tmp_path):
    """With linear attention where there is a mask for it to honour; first without the package, then with it."""
    for head in AFRESH:
        family = next(name for name in FAMILIES if head in heads(name))
        model = patched(build(family, head), "houlsby", "attention")
        inputs = probe_inputs(model.get_base_model())
        bundle(model).save_pretrained(tmp_path / head)
        with torch.no_grad():
            torch.save((inputs, model(**inputs)[0]), tmp_path / head / "expected.pt")
    program = f"""
import pathlib, sys, torch, transformers
def check(attention, **options):
    for head, auto in {AFRESH!r}.items():
        folder = pathlib.Path({str(tmp_path)!r}) / head
        model = getattr(transformers, auto).from_pretrained(folder, **options)
        inputs, expected = torch.load(folder / "expected.pt")
        torch.testing.assert_close(model(**inputs)[0], expected, rtol=1e-4, atol=1e-5)
        assert type(model).__name__ == "Snnk" + head, type(model)
        assert model.config._attn_implementation.endswith(attention)
check(".modeling_snnk_bundle", trust_remote_code=True)
assert "snnk_peft" not in sys.modules
import snnk_peft
check({NAME!r})
print("all loaded")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.stdout.split("\n")[-2:] == ["all loaded", ""], done.stderr[-3000:]


@torch.no_grad()
def test_adapters_of_new_families_load_back(tmp_path):
    """The checkpoint of an adapter: Conv1D, shared layers, a part of a config, an encoder alone."""
    for family in ("gpt2", "albert", "clip", "whisper", "esm"):
        head = main_head(family)
        model = patched(build(family, head), *(["houlsby", "attention"] if takes(family, "attention") else ["houlsby"]))
        model.save_pretrained(tmp_path / family)
        inputs = probe_inputs(model.get_base_model())
        agree(PeftModel.from_pretrained(build(family, head), tmp_path / family).eval()(**inputs), model(**inputs))


# --- matrices of another kind, layers that run several times --------------------------------------------------------


@pytest.mark.parametrize(("family", "runs"), [("gpt2", 1), ("albert", 3), ("opt", 1)])
def test_calibration_sees_every_run_and_real_tokens_only(family, runs):
    """As many features as hidden units represent an FFN exactly, whichever way its matrices are stored."""
    changes = {"albert": {"hidden_act": "relu", "num_hidden_layers": runs}, "gpt2": {"activation_function": "relu"}}
    model = build(family, main_head(family), **changes.get(family, {}))
    hidden = 24 if family != "gpt2" else 64
    inputs = [probe_inputs(model) for _ in range(5)]
    for number, batch in enumerate(inputs):  # other tokens in each
        ids = batch["input_ids"]
        batch["input_ids"] = torch.where(ids > 3, (ids + number) % model.config.vocab_size, ids).clamp_min(4)
    exact = model(**inputs[0]).logits
    part = FFNPart("relu", "landmark", num_features=hidden, layers=[0], init="random")
    changed = get_snnk_model(model, SNNKConfig(ffn=part, modules_to_save=[])).eval()
    (slot,) = calibrate(changed, inputs, progress=False).slots
    real = int(inputs[0]["attention_mask"].sum())
    assert (slot.tokens, slot.held_out_tokens) == (4 * runs * real, runs * real)
    assert slot.error_after < 1e-6 < 0.1 < slot.error_before
    agree(bundle(changed)(**inputs[0]), {"logits": exact}, rtol=1e-3, atol=1e-5)


def test_inputs_of_later_runs_are_those_of_the_original():
    """ALBERT's FFN in the original model, seen by hooks, and in the patched one, seen by `calibrate`."""
    model = build("albert", "AlbertModel", num_hidden_layers=3)
    inputs, wanted = probe_inputs(model), []
    ffn = model.encoder.albert_layer_groups[0].albert_layers[0].ffn
    hook = ffn.register_forward_pre_hook(lambda module, args: wanted.append(args[0]))
    model(**inputs)
    hook.remove()
    changed = get_snnk_model(model, SNNKConfig(ffn=FFNPart(num_features=4, init="random"), modules_to_save=[])).eval()
    layer = next(m for path, m in changed.named_modules() if path.endswith("albert_layers.0.ffn"))
    activation = ["encoder.albert_layer_groups.0.albert_layers.0.activation"]
    fitter = SimpleNamespace(together=activation, rows=real_tokens, calls=False, missing_from=0)
    whole = nullcontext(lambda _, given: changed(**given))
    ((_, rows),) = SlotInputs(changed, layer, fitter, 3, [(0, inputs)], 0.2, Bar(), lambda: whole)
    keep = inputs["attention_mask"].bool()
    torch.testing.assert_close(rows, torch.cat([x[keep] for x in wanted]))
    assert len(wanted) == 3
    assert not layer.disable_adapters


class Bar:
    def update(self) -> None: ...


# === check_family =====================================================================================================


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
