"""What a newcomer gives by mistake: the message says what was given and which function or form was meant."""

from __future__ import annotations

import inspect
from functools import partial
from pathlib import Path

import peft
import pytest
import torch
from torch import nn
from transformers import (
    BertForSequenceClassification,
    ResNetConfig,
    ResNetForImageClassification,
    T5Config,
    T5ForConditionalGeneration,
)

import snnk_peft
from snnk_peft import (
    FAMILIES,
    AdapterPart,
    CalibrationReport,
    ClosedFormHead,
    FFNPart,
    FrobeniusDecay,
    HeadFeatures,
    HeadStatistics,
    InputMoments,
    LowRankPart,
    ModelFamily,
    NormsPart,
    Plan,
    SNNKConfig,
    bundle,
    calibrate,
    calibrate_adapters,
    check_family,
    export,
    factorize,
    factorize_many,
    fit_attention,
    fit_closed_form,
    get_snnk_model,
    plan,
    register_family,
    with_head,
)
from snnk_peft.errors import ConfigError, UnknownOptionError, UnsupportedError
from tests.tiny_models import odd_or_even, tiny

QUIET = {"progress": False}


def ffn() -> SNNKConfig:
    return SNNKConfig(ffn=FFNPart(num_features=8, layers="top-1"), modules_to_save=[])


def small_plan(model, budget=0.95, **options):
    options = {"of": "macs", "parts": [FFNPart(num_features=4)], **QUIET, **options}
    return plan(model, odd_or_even(), budget, **options)


PATCH = {"get_snnk_model": lambda model: get_snnk_model(model, ffn())}
FIT = {
    "calibrate": lambda model: calibrate(model, odd_or_even(), **QUIET),
    "calibrate_adapters": lambda model: calibrate_adapters(model, odd_or_even(), **QUIET),
    "fit_attention": lambda model: fit_attention(model, odd_or_even(), **QUIET),
}
WHOLE = {  # of transformers
    "bundle": bundle,
    "export": lambda model: export(model, "torch", "never.pt2"),
    "check_family": check_family,
    "ClosedFormHead": lambda model: ClosedFormHead(model, names=["a", "b"]),
    "with_head": with_head,
}
FAMILY = {"plan": small_plan, **PATCH}
HEAD = {"fit_closed_form": lambda model: fit_closed_form(model, odd_or_even())}
VERBS = {**FAMILY, **FIT, **WHOLE, **HEAD}


# === in the place of a model ==========================================================================================


class Holder:
    """As a Trainer or a pipeline has one."""

    def __init__(self):
        self.model = tiny("bert")


NO_MODEL = {
    "a name": (
        "bert-base-uncased",
        r"the text 'bert-base-uncased';.*AutoModel.*from_pretrained\('bert-base-uncased'\)",
    ),
    "a path": (Path("folder"), r"the path 'folder';.*from_pretrained\('folder'\)"),
    "nothing": (None, r"None; expected a transformers model"),
    "a class": (BertForSequenceClassification, r"the class BertForSeq.*such as BertForSeq.*\.from_pretrained\(name\)"),
    "a holder": (Holder(), r"a Holder; .* such as its \.model \(a BertForSequenceClassification\)"),
    "a config": (ffn(), r"a SNNKConfig; .*it is the first argument"),
    "batches": (odd_or_even(1), r"a list; .*it is the first argument"),
}


@pytest.mark.parametrize("kind", NO_MODEL)
@pytest.mark.parametrize("verb", VERBS)
def test_no_model(verb, kind):
    given, match = NO_MODEL[kind]
    with pytest.raises(ConfigError, match=f"^model is {match}"):
        VERBS[verb](given)


class Around(nn.Module):
    """As a model of another library holds one of transformers."""

    def __init__(self):
        super().__init__()
        self.inside = nn.ModuleList([tiny("bert", "BertModel")])

    def forward(self, features):
        return self.inside[0](**features)


@pytest.mark.parametrize("verb", {**FAMILY, **WHOLE})
def test_a_module_that_holds_a_model(verb):
    with pytest.raises(UnsupportedError, match=r"Around .*It holds one, a BertModel at 'inside\.0': give that"):
        VERBS[verb](Around())


@pytest.mark.parametrize("verb", VERBS)
def test_copies_are_refused_by_name(verb):
    with pytest.raises(UnsupportedError, match=r"wrapped in DataParallel.*model\.module"):
        VERBS[verb](nn.DataParallel(tiny("bert")))


NOT_PATCHED = {
    "plain": (lambda: tiny("bert"), r"BertForSequenceClassification is not patched\. Call get_snnk_model"),
    "a bundle": (lambda: bundle(get_snnk_model(tiny("bert"), ffn())), r"is a bundle, .*Give the patched model"),
    "LoRA": (
        lambda: peft.get_peft_model(tiny("bert"), peft.LoraConfig(r=2, target_modules=["query"])),
        r"another PEFT method and no SNNK part\. Merge them \(merge_and_unload\), and call get_snnk_model",
    ),
}


@pytest.mark.parametrize("kind", NOT_PATCHED)
@pytest.mark.parametrize("verb", FIT)
def test_nothing_to_fit(verb, kind):
    make, match = NOT_PATCHED[kind]
    with pytest.raises(ConfigError, match=match):
        FIT[verb](make())


@pytest.mark.parametrize("verb", FIT)
def test_an_adapter_that_is_switched_off(verb):
    model = get_snnk_model(tiny("bert"), SNNKConfig(ffn=FFNPart(num_features=8), adapter=AdapterPart()))
    with model.disable_adapter(), pytest.raises(ConfigError, match=r"adapter is not active. Call set_adapter\(name\)"):
        FIT[verb](model)


def test_a_head_on_the_original_after_patching():
    model = tiny("bert")
    patched = get_snnk_model(model, ffn())
    for given in (model, patched):
        with pytest.raises(UnsupportedError, match=r"holds an adapter; .*becomes one by snnk_peft\.bundle"):
            WHOLE["ClosedFormHead"](given)


# === architectures ====================================================================================================


def convolutions():
    sizes = {"embedding_size": 8, "hidden_sizes": [8, 8], "depths": [1, 1], "layer_type": "basic"}
    return ResNetForImageClassification(ResNetConfig(**sizes))


def encoder_decoder():
    return T5ForConditionalGeneration(T5Config(vocab_size=100, d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2))


@pytest.mark.parametrize("make", [convolutions, encoder_decoder])
@pytest.mark.parametrize("verb", FAMILY)
def test_an_unknown_family_names_the_doors(verb, make):
    with pytest.raises(UnsupportedError, match=r"register_family.*check_family.*LowRankPart\(targets=\"\*\", rank_s"):
        FAMILY[verb](make())


@pytest.mark.parametrize("verb", FAMILY)
def test_a_module_without_a_config(verb):
    with pytest.raises(
        UnsupportedError, match=r"Sequential has no config\.model_type.*LowRankPart\(targets=\"\*\", rank_s"
    ):
        FAMILY[verb](nn.Sequential(nn.Linear(4, 4)))


def test_the_door_without_a_family_is_open():
    for make in (convolutions, lambda: nn.Sequential(nn.Linear(16, 16), nn.ReLU())):
        config = SNNKConfig(low_rank=LowRankPart(targets="*", rank=2), modules_to_save=[])
        assert get_snnk_model(make(), config).peft_config["default"].target_modules


@pytest.mark.parametrize("make", [convolutions, encoder_decoder])
def test_heads_of_other_architectures(make):
    for verb in ("ClosedFormHead", "with_head"):
        with pytest.raises(UnsupportedError, match=r"no stack of Transformer layers.*get_encoder"):
            WHOLE[verb](make())
    with pytest.raises((ConfigError, UnsupportedError), match=r"input_ids, attention_mask"):
        HEAD["fit_closed_form"](make())


# === inputs of another kind ===========================================================================================


def test_texts_for_an_image_model_and_the_reverse():
    pictures = [{"pixel_values": torch.rand(2, 3, 8, 8), "labels": torch.tensor([0, 1])} for _ in range(6)]
    texts = get_snnk_model(tiny("bert"), ffn())
    with pytest.raises(ConfigError, match=r"batch 0 holds pixel_values; expected input_ids, which Bert.*its tokenizer"):
        calibrate(texts, pictures, **QUIET)
    with pytest.raises(
        ConfigError, match=r"holds input_ids, attention_mask; expected pixel_values, which ViT.*image pro"
    ):
        calibrate(get_snnk_model(tiny("vit"), ffn()), odd_or_even(), **QUIET)
    with pytest.raises(ConfigError, match=r"probe holds pixel_values; expected input_ids"):
        bundle(texts, probe=pictures[0])
    wide = [{"inputs_embeds": torch.rand(2, 5, 32)} for _ in range(6)]
    assert calibrate(texts, wide, **QUIET).slots  # read in the place of input_ids


def test_inputs_that_a_module_does_not_read():
    model = get_snnk_model(nn.Sequential(nn.Linear(12, 12)), SNNKConfig(low_rank=LowRankPart(targets="0")))
    with pytest.raises(ConfigError, match=r"batch 0 holds x; expected what Sequential reads, of input \("):
        calibrate(model, [{"x": torch.rand(16, 12)}] * 4, **QUIET)
    assert calibrate(model, [{"input": x} for x in torch.rand(4, 16, 12)], **QUIET).slots


# === configs ==========================================================================================================

CONFIGS = {
    "a part first": (lambda: SNNKConfig(FFNPart()), r"first argument, is a FFNPart;.*SNNKConfig\(ffn=FFNPart\(...\)\)"),
    "a dict first": (lambda: SNNKConfig({"ffn": {}}), r"first argument, is a dict; .*SNNKConfig\(\*\*options\)"),
    "a class": (lambda: SNNKConfig(ffn=FFNPart), r"ffn is the class FFNPart; expected FFNPart\(...\)"),
    "a list": (lambda: SNNKConfig(ffn=[FFNPart()]), r"ffn is a list; expected FFNPart.* go into parts=\[...\]"),
    "a size": (lambda: SNNKConfig(ffn=64), r"ffn is an int; expected FFNPart\(...\)"),
    "another part": (lambda: SNNKConfig(ffn=NormsPart()), r"ffn is a NormsPart.*SNNKConfig\(parts=\[NormsPart\(...\)"),
    "parts alone": (lambda: SNNKConfig(parts=FFNPart()), r"parts is a FFNPart; expected a list of parts, \[FFNPart"),
    "a class in parts": (
        lambda: SNNKConfig(parts=[FFNPart]),
        r"parts\[0\] is the class FFNPart; expected one of .*Part\(",
    ),
    "no field": (
        lambda: SNNKConfig(norms={}),
        r"no field 'norms'; this part is given as SNNKConfig\(parts=\[NormsPart",
    ),
    "targets": (
        lambda: SNNKConfig(adapter=AdapterPart(), target_modules=["query", "value"]),
        r"target_modules is \['query', 'value'\]; expected None, .*placement=.*targets=.*layers=",
    ),
    "a slip": (lambda: SNNKConfig(fnn={}), r"unknown option 'fnn'; did you mean 'ffn'"),
    "a slip in a part": (lambda: FFNPart(num_feature=4), r"unknown option 'num_feature'; did you mean 'num_features'"),
    "no options": (lambda: snnk_peft.MeanPoolingPart(layers=1), r"unknown option 'layers'.*Available: none"),
    "layers": (lambda: SNNKConfig(ffn={"layers": "top3"}), r"ffn.layers is 'top3'; .* Did you mean 'top-3'"),
    "a model": (lambda: SNNKConfig(ffn=FFNPart(tiny("bert"))), r"^ffn.component: unknown component .{,140}Available"),
}


@pytest.mark.parametrize("kind", CONFIGS)
def test_configs(kind):
    make, match = CONFIGS[kind]
    with pytest.raises(ConfigError, match=match):
        make()


GIVEN_CONFIGS = {
    "a part": (FFNPart(), r"config is a FFNPart; expected SNNKConfig, such as SNNKConfig\(ffn=FFNPart\(...\)\)"),
    "a dict": ({"ffn": {}}, "config is a dict; expected SNNKConfig"),
    "a plan": (Plan(ffn(), "macs", 0.5, {}), r"config is a Plan; expected SNNKConfig, such as its \.config"),
    "the class": (SNNKConfig, "config is the class SNNKConfig; expected SNNKConfig"),
}


@pytest.mark.parametrize("kind", GIVEN_CONFIGS)
def test_given_configs(kind):
    given, match = GIVEN_CONFIGS[kind]
    with pytest.raises(ConfigError, match=match):
        get_snnk_model(tiny("bert"), given)


def test_a_config_may_be_used_again():
    config = ffn()
    peft.get_peft_model(tiny("bert"), config)
    assert config.target_modules  # filled in
    assert get_snnk_model(tiny("bert"), config)


# === arguments ========================================================================================================

head, weight = partial(ClosedFormHead, names=["a", "b"]), torch.rand(6, 4)
ARGUMENTS = {
    "a slip": (lambda: calibrate(None, [], step=3), r"calibrate: unknown argument 'step'; did you mean 'steps'"),
    "by position": (
        lambda: bundle(None, "folder"),
        r"bundle: got 2 arguments by position; expected model, and by name",
    ),
    "missing": (lambda: calibrate(None), r"calibrate: missing a required argument: 'batches'"),
    "of a method": (
        lambda: head(tiny("bert")).fit(ridge=1),
        r"ClosedFormHead\.fit: unknown argument 'ridge'; did you m",
    ),
    "no self": (
        lambda: head(tiny("bert")).add([], "x", 3),
        r"add: got 3 arguments by position; expected batches, targets$",
    ),
    "patching": (lambda: get_snnk_model(None, adaptername=""), r"'adaptername'; did you mean 'adapter_name'"),
    "factorizing": (lambda: factorize(weight, 2, activations="relu"), r"'activations'; did you mean 'activation'"),
    "a name": (lambda: get_snnk_model(tiny("bert"), ffn(), 3), r"adapter_name is an int; expected a text"),
    "a factor": (lambda: small_plan(tiny("bert"), "2"), r"budget is '2'; .* Did you mean '2x'"),
    "a number": (lambda: small_plan(tiny("bert"), 3), r"budget is 3; .* Did you mean '3x'"),
    "none": (lambda: small_plan(tiny("bert"), 0), r"budget is 0; [^?]*$"),
    "of": (lambda: small_plan(tiny("bert"), of="MACs"), r"of is 'MACs'; .* Did you mean 'macs'"),
    "one part": (lambda: small_plan(tiny("bert"), parts=FFNPart()), r"parts is a FFNPart; expected a list of parts"),
    "classes": (lambda: small_plan(tiny("bert"), parts=[FFNPart]), r"parts is \[the class FFNPart\]; expected a list"),
    "held_out": (
        lambda: calibrate(tiny("bert"), [], held_out="0.2"),
        r"held_out is '0\.2'; expected a number > 0 and < 1",
    ),
    "ridges": (
        lambda: calibrate(tiny("bert"), [], ridges=0.1),
        r"ridges is 0\.1; expected a list of finite numbers >= 0",
    ),
    "ridge": (lambda: fit_closed_form(tiny("bert"), [], ridge="1"), r"ridge is '1'; expected a number >= 0"),
    "targets": (lambda: fit_closed_form(tiny("bert"), [], targets=3), r"targets is an int; expected the key"),
    "format": (
        lambda: export(tiny("bert"), "ONNX", "never.onnx"),
        r"format is the text 'ONNX'; .* Did you mean 'onnx'",
    ),
    "tolerance": (
        lambda: export(tiny("bert"), "torch", "a.pt2", tolerance="1"),
        r"tolerance is '1'; expected a number",
    ),
    "no path": (lambda: export(tiny("bert"), "torch", None), r"path is None; expected a path"),
    "in a file": (lambda: export(tiny("bert"), "torch", f"{__file__}/m.pt2"), r"newcomers\.py is a file; expected"),
    "a plan's file": (lambda: Plan.load(__file__), r"newcomers\.py', which is a file; expected the path of a folder"),
    "a plan of none": (lambda: Plan.load(None), r"folder is None; expected a path"),
    "a report of none": (lambda: CalibrationReport([], {}).save(None), r"folder is None; expected a path"),
    "saved in a file": (lambda: Plan(ffn(), "macs", 0.5, {}).save(__file__), r"expected the path of a folder"),
    "a family's name": (lambda: register_family("t5"), r"family is the text 't5'; expected ModelFamily\(name="),
    "names first": (lambda: ClosedFormHead(tiny("bert"), ["a", "b"]), r"features is a list; .* Give names=\[...\]"),
    "a pool": (lambda: head(tiny("bert"), "mean"), r"features is the text 'mean'; .* Give HeadFeatures\("),
    "a count": (lambda: ClosedFormHead(tiny("bert"), names=2), r"names is an int; expected a list of texts"),
    "nothing counted": (lambda: head(tiny("bert")).fit(), r"no examples were counted, call add\(batches\) first"),
    "no head": (lambda: head(tiny("bert")).merge(3), r"other is an int; expected HeadStatistics"),
    "statistics": (
        lambda: HeadStatistics("4", 2, "classes", "x"),
        r"2 faults:(?s:.)*width is '4'(?s:.)*origin is the text",
    ),
    "a map": (lambda: HeadFeatures(feature_map="relu"), r"feature_map is 'relu'; expected a dict"),
    "layers": (lambda: HeadFeatures.across("6"), r"layers is '6'; expected an integer >= 1"),
    "a layer": (lambda: factorize(nn.Linear(4, 6), 2), r"weight is a Linear; expected a matrix \(out, in\)"),
    "inputs": (lambda: factorize(weight, 2, inputs=[[1.0]]), r"inputs is a list; expected a tensor \(n, 4\)"),
    "a bias": (lambda: factorize(weight, 2, bias=True), r"bias is a bool; expected \(6,\)"),
    "layers as a list": (lambda: factorize_many([weight]), r"layers is a list; expected a dict such as \{'name'"),
    "weights alone": (lambda: factorize_many({"a": weight}), r"layer 'a' is a Tensor; expected a dict such as"),
    "no moments": (lambda: InputMoments.of([[1.0]]), r"inputs is a list; expected a tensor \(n, in\)"),
    "no factors": (
        lambda: FrobeniusDecay("bert"),
        r"the text 'bert'; expected a model with low-rank layers, or a list",
    ),
    "one pair": (lambda: FrobeniusDecay([weight]), r"holds a Tensor; expected a model"),
    "no optimizer": (
        lambda: FrobeniusDecay([(weight, weight)], 0.1).attach(Holder()),
        r"optimizer is a Holder; expected a torch optimizer.*trainer_callback\(\)",
    ),
}


@pytest.mark.parametrize("kind", ARGUMENTS)
def test_arguments(kind):
    call, match = ARGUMENTS[kind]
    with pytest.raises(ConfigError, match=match):
        call()


def test_a_folder_that_cannot_be_made():
    with pytest.raises(OSError, match=r"/dev/null cannot be written to .*; choose another path"):
        export(tiny("bert"), "torch", "/dev/null/model.pt2")


def test_what_python_expects_of_wrong_arguments():
    for call in (lambda: calibrate(None), lambda: bundle(None, None, None), lambda: factorize(weight, rang=2)):
        with pytest.raises(TypeError) as caught:
            call()
        assert isinstance(caught.value, UnknownOptionError)


def test_a_description_of_a_family_is_of_texts():
    given = {name: getattr(FAMILIES["bert"], name) for name in inspect.signature(ModelFamily).parameters}
    assert ModelFamily(**given) == FAMILIES["bert"]
    with pytest.raises(ConfigError) as caught:
        ModelFamily(**{**given, "layers": 12, "pooled_heads": "head", "causal": "no"})
    assert [fault.split(";")[0] for fault in caught.value.faults] == [
        "ModelFamily: layers is 12",
        "ModelFamily: pooled_heads is 'head'",
        "ModelFamily: causal is 'no'",
    ]


def test_every_verb_is_tried_here():
    """A new function of the package joins the tables above, or these few: `convert`, of test_convert.py, and those that
    take no model."""
    functions = {name for name in snnk_peft.__all__ if inspect.isfunction(getattr(snnk_peft, name))}
    assert functions - set(VERBS) == {"build_feature_map", "convert", "factorize", "factorize_many", "register_family"}
