"""What people give as a model: compiled, in inference_mode, patched in place, NaN in it, ties cut, padding unnamed."""

from __future__ import annotations

import warnings

import peft
import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    PreTrainedTokenizerFast,
)

from snnk_peft import (
    AdapterPart,
    ClosedFormHead,
    FFNPart,
    HeadFeatures,
    LowRankPart,
    PoolerPart,
    SNNKConfig,
    bundle,
    calibrate,
    calibrate_adapters,
    check_family,
    export,
    fit_closed_form,
    get_snnk_model,
    plan,
)
from snnk_peft.errors import ConfigError, UnsupportedError
from tests.fresh_process import run_python
from tests.tiny_models import TEXT, inputs_for, odd_or_even, same, tiny, trained

ADAPTER = SNNKConfig(adapter=AdapterPart(num_features=4))
FFN = SNNKConfig(ffn=FFNPart(num_features=8, layers="top-1"), modules_to_save=[])
LLAMA = {**TEXT, "num_key_value_heads": 2, "bos_token_id": 1, "eos_token_id": 2}


def padded_by(token: int, count: int = 6) -> list[dict[str, torch.Tensor]]:
    given = odd_or_even(count)
    for batch in given:
        batch["input_ids"][1:, 5:], batch["attention_mask"][1:, 5:] = token, 0
    return given


def small_plan(model, given=None):
    return plan(model, given or odd_or_even(), 0.95, of="macs", parts=[FFNPart(num_features=4)], progress=False)


def compiled(model):
    return torch.compile(model, backend="eager")


def test_a_compiled_model_is_patched_before_it_is_compiled():
    with pytest.warns(UserWarning, match=r"is compiled \(torch.compile\).*compile last"):
        patched = get_snnk_model(compiled(tiny("bert")), ADAPTER).eval()
    x = inputs_for(patched)
    expected = get_snnk_model(tiny("bert"), ADAPTER).eval()(**x).logits
    assert torch.equal(patched(**x).logits, expected)
    assert torch.equal(compiled(patched)(**x).logits, expected)
    with pytest.raises(UnsupportedError, match=r"is compiled \(torch.compile\).*model._orig_mod.*compile last"):
        peft.get_peft_model(compiled(tiny("bert")), ADAPTER)


def test_compiled_models_are_fitted_and_folded_as_others(tmp_path):
    plain, other = (get_snnk_model(tiny("bert"), FFN).eval() for _ in range(2))
    calibrate(plain, odd_or_even(), progress=False)
    calibrate(compiled(other), odd_or_even(), progress=False)
    for layer in plain.base_model.model.bert.encoder.layer:
        layer.compile(backend="eager")
    x = inputs_for(plain)
    assert torch.equal(bundle(compiled(other))(**x).logits, bundle(plain)(**x).logits)
    assert small_plan(compiled(tiny("bert"))).predicted == small_plan(tiny("bert")).predicted
    assert fit_closed_form(compiled(tiny("bert")), odd_or_even()).to_dict()["examples"] == 24
    assert export(compiled(plain), "torch", tmp_path / "model.pt2").model_class.startswith("Snnk")


def test_layers_compiled_in_place_give_no_warning():
    base = tiny("bert")
    for layer in base.bert.encoder.layer:
        layer.compile(backend="eager")
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        get_snnk_model(base, ADAPTER).eval()(**inputs_for(base))
    assert not [each for each in said if "first forward" in str(each.message)]


def test_nothing_made_in_inference_mode_keeps_from_training(tmp_path):
    part = AdapterPart("gelu", "free", num_features=4)
    with torch.inference_mode():
        model = get_snnk_model(tiny_outside, SNNKConfig(adapter=part, ffn=FFNPart(num_features=8)))
        calibrate(model, odd_or_even(), progress=False)
        calibrate_adapters(model, odd_or_even(), progress=False)
        small = bundle(model)
        fit_closed_form(small, odd_or_even())
        head = ClosedFormHead(small, names=["even", "odd"])
        head.add(odd_or_even())
        found = small_plan(small_base)
    head.add(odd_or_even())
    head.fit()
    assert found.predicted == small_plan(small_base).predicted
    for each in (model, small, head.bundle()):
        each.train()(**odd_or_even()[0]).loss.backward()
        assert not [name for name, value in each.state_dict().items() if value.is_inference()]


tiny_outside, small_base = tiny("bert"), tiny("bert")


def test_weights_made_in_inference_mode_are_refused():
    with torch.inference_mode():
        made = tiny("bert")
    for run in (
        lambda: get_snnk_model(made, ADAPTER),
        lambda: small_plan(made),
        lambda: fit_closed_form(made, odd_or_even()),
    ):
        with pytest.raises(UnsupportedError, match=r"made inside torch.inference_mode\(\).*Load the model outside"):
            run()


def test_what_only_holds_a_model_names_it(tmp_path):
    st_modules = pytest.importorskip("sentence_transformers.sentence_transformer.modules")
    sentence_transformers = pytest.importorskip("sentence_transformers")
    tiny("bert", "BertModel").save_pretrained(tmp_path)
    vocabulary = {word: index for index, word in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "a"])}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    PreTrainedTokenizerFast(tokenizer_object=words, pad_token="[PAD]", unk_token="[UNK]").save_pretrained(tmp_path)
    inside = st_modules.Transformer(str(tmp_path))
    st = sentence_transformers.SentenceTransformer(modules=[inside, st_modules.Pooling(32)], device="cpu")
    runs = [
        lambda model: get_snnk_model(model, ADAPTER),
        lambda model: calibrate(model, odd_or_even()),
        lambda model: bundle(model),
        small_plan,
        lambda model: export(model, "torch", tmp_path / "model.pt2"),
        lambda model: ClosedFormHead(model, names=["a", "b"]),
        check_family,
    ]
    for run in runs:
        with pytest.raises(UnsupportedError, match=r"SentenceTransformer is a pipeline.*st\[0\].model = bundle"):
            run(st)
        with pytest.raises(ConfigError, match=r"model is the text 'bert-base-uncased'; expected a transformers model"):
            run("bert-base-uncased")
    x = inputs_for(st[0].model)
    patched = trained(get_snnk_model(st[0].model, SNNKConfig(adapter=AdapterPart(num_features=4)))).eval()
    wanted = patched(**x).last_hidden_state
    st[0].model = bundle(patched)
    torch.testing.assert_close(st[0](x)["token_embeddings"], wanted, rtol=1e-4, atol=1e-5)
    st.save_pretrained(str(tmp_path / "st"))
    assert (tmp_path / "st/modeling_snnk_bundle.py").exists()


def test_the_original_patched_in_place_is_the_patched_model(tmp_path):
    base = tiny("bert")
    model = get_snnk_model(base, FFN).eval()
    calibrate(base, odd_or_even(), progress=False)
    small, x = bundle(base), inputs_for(base)
    assert same(small(**x).logits, model(**x).logits)
    assert small.bundle_report.parts == bundle(model).bundle_report.parts
    assert small.bundle_report.parts["default"]["ffn"]["num_features"] == 8
    assert export(base, "torch", tmp_path / "model.pt2").model_class == type(small).__name__
    for run in (lambda: small_plan(base), lambda: check_family(base)):
        with pytest.raises(UnsupportedError, match=r"is patched already \(adapter 'default'\)"):
            run()
    with pytest.raises(ConfigError, match="is the inside of a PeftModel"):
        base.save_pretrained(tmp_path / "base")


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_weights_that_are_no_numbers_are_named(tmp_path, bad):
    word = "NaN" if bad != bad else "infinity"

    def damaged(*args):
        model = tiny("bert", *args)
        model.base_model.encoder.layer[0].output.dense.weight.data[5, 0] = bad
        return model

    path = "encoder.layer.0.output.dense.weight"
    free = SNNKConfig(adapter=AdapterPart("gelu", "free", num_features=4))
    for run in (
        lambda: calibrate(get_snnk_model(damaged(), FFN), odd_or_even(), progress=False),
        lambda: calibrate_adapters(get_snnk_model(damaged(), free), odd_or_even(), progress=False),
        lambda: small_plan(damaged()),
        lambda: bundle(get_snnk_model(damaged(), ADAPTER)),
        lambda: fit_closed_form(damaged(), odd_or_even()),
        lambda: ClosedFormHead(damaged(), names=["a", "b"]).add(odd_or_even()),
        lambda: export(damaged(), "torch", tmp_path / "model.pt2"),
        lambda: check_family(damaged()),
    ):
        with pytest.raises(ValueError, match=rf"{path} holds {word} in 1 of 2,048 numbers"):
            run()
    diverged = get_snnk_model(tiny("bert"), ADAPTER)
    next(p for n, p in diverged.named_parameters() if n.endswith("readout.A")).data.fill_(bad)
    with pytest.raises(ValueError, match=rf"output.dropout \(adapter.readout.A of the adapter\) holds {word}"):
        bundle(diverged)
    # what a slot replaces is not part of the bundle
    replaced = get_snnk_model(tiny("bert"), SNNKConfig(ffn=FFNPart(num_features=8), modules_to_save=[]))
    replaced.base_model.model.bert.encoder.layer[0].intermediate.dense.base_layer.weight.data[0, 0] = bad
    assert bundle(replaced).bundle_report.parity_error < 1e-5


def test_an_overflow_is_said_with_its_layer():
    def large():
        model = tiny("bert")
        model.bert.encoder.layer[1].output.dense.weight.data.fill_(3e38)
        return model

    where = "begins in the output of bert.encoder.layer.1.output.dense"
    for run in (
        lambda: bundle(get_snnk_model(large(), ADAPTER)),
        lambda: small_plan(large()),
        lambda: fit_closed_form(large(), odd_or_even()),
    ):
        with pytest.raises(ValueError, match=rf"NaN or infinity, which {where}"):
            run()


def llama(cls=LlamaForCausalLM, **changes):
    torch.manual_seed(0)
    return cls(LlamaConfig(**{**LLAMA, "pad_token_id": 0, **changes})).eval()


def gpt2():
    torch.manual_seed(0)
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 40, "vocab_size": 100}
    return GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=1, eos_token_id=2, pad_token_id=0)).eval()


def resized():
    model = llama(tie_word_embeddings=True)
    model.resize_token_embeddings(107, mean_resizing=False)
    return model


TIED = {
    "llama, both": (lambda: llama(tie_word_embeddings=True), ["embed_tokens", "lm_head"]),
    "llama, embeddings": (lambda: llama(tie_word_embeddings=True), ["embed_tokens"]),
    "llama, head": (lambda: llama(tie_word_embeddings=True), ["lm_head"]),
    "llama, resized": (resized, ["embed_tokens", "lm_head"]),
    "gpt2, both": (gpt2, ["wte", "lm_head"]),
    "gpt2, head": (gpt2, ["lm_head"]),
    "bert, both": (lambda: tiny("bert", "BertForMaskedLM"), ["word_embeddings", "decoder"]),
    "bert, decoder": (lambda: tiny("bert", "BertForMaskedLM"), ["decoder"]),
    "bert, embeddings": (lambda: tiny("bert", "BertForMaskedLM"), ["word_embeddings"]),
    "roberta, head": (lambda: tiny("roberta", "RobertaForMaskedLM"), ["lm_head"]),
}


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")
@pytest.mark.parametrize("case", TIED)
def test_tied_weights_of_which_one_was_trained_are_untied(case, tmp_path):
    build, saved = TIED[case]
    base = build()
    config = SNNKConfig(adapter=AdapterPart(num_features=4), modules_to_save=saved)
    model, x = get_snnk_model(base, config).eval(), inputs_for(base)
    assert bundle(model).config.tie_word_embeddings  # two equal copies are still one
    trained(model)
    small = bundle(model)
    with torch.no_grad():  # with gradients an adapter is one operation, whose roundings are others
        assert same(small(**x).logits, model(**x).logits)
    assert small.config.tie_word_embeddings is False
    assert base.config.tie_word_embeddings is True
    small.save_pretrained(tmp_path)
    again = type(small).from_pretrained(tmp_path).eval()
    assert same(again(**x).logits, small(**x).logits)


def decoder(pad_token_id=None):
    model = llama(LlamaForSequenceClassification, pad_token_id=None)
    model.config.pad_token_id = pad_token_id
    return model


@pytest.mark.parametrize("masked", [7, None])
def test_padding_that_only_the_tokenizer_knows(masked):
    given, named = (odd_or_even(), 0) if masked is None else (padded_by(masked), masked)
    reports = []
    for pad in (None, named):
        model = get_snnk_model(decoder(pad_token_id=pad), SNNKConfig(low_rank=LowRankPart(rank=4, layers=[1])))
        calibrate(model, given, progress=False)
        free = get_snnk_model(decoder(pad_token_id=pad), SNNKConfig(adapter=AdapterPart("gelu", "free", 4)))
        calibrate_adapters(free, given, progress=False)
        with torch.no_grad():
            found = plan(decoder(pad_token_id=pad), given, 0.97, of="macs", parts=[LowRankPart(rank=4)], progress=False)
        reports.append((found.predicted, {k: v for each in (model, free) for k, v in each.state_dict().items()}))
        assert bundle(model).config.pad_token_id == model.config.pad_token_id == pad
    assert reports[0][0] == reports[1][0]
    for name, value in reports[0][1].items():
        assert torch.equal(value, reports[1][1][name]), name
    with pytest.raises(UnsupportedError, match="no Linear of LlamaForSequenceClassification gives its"):
        fit_closed_form(decoder(), given)


def test_several_paddings_are_no_padding():
    given = padded_by(7, 12)
    for batch in given[6:]:
        batch["input_ids"].masked_fill_(batch["attention_mask"] == 0, 8)
    model = get_snnk_model(decoder(), SNNKConfig(low_rank=LowRankPart(rank=4, layers=[1])))
    with pytest.raises(ConfigError, match=r"names no padding token, and the batches hold tokens 7, 8 .*pad_token_id"):
        calibrate(model, given, progress=False)


NEW_HEADS = {
    "ffn": lambda: bundle(get_snnk_model(tiny("bert", num_labels=3), FFN)),
    "pooler": lambda: bundle(get_snnk_model(tiny("bert", num_labels=3), SNNKConfig(pooler=PoolerPart()))),
    "vit": lambda: bundle(get_snnk_model(tiny("vit", num_labels=3), SNNKConfig(pooler=PoolerPart()))),
    "roberta": lambda: bundle(get_snnk_model(tiny("roberta", num_labels=3), SNNKConfig(pooler=PoolerPart()))),
    "head": lambda: head_bundle(),
}


def head_bundle():
    head = ClosedFormHead(tiny("bert"), HeadFeatures([(-1, "mean"), (1, "max")]), names=["a", "b"])
    head.add(odd_or_even())
    head.fit()
    return head.bundle()


@pytest.mark.parametrize("kind", NEW_HEADS)
def test_a_bundle_takes_a_new_head(kind, tmp_path):
    small = NEW_HEADS[kind]()
    small.save_pretrained(tmp_path)
    names = {index: f"class {index}" for index in range(5)}
    fresh = {"id2label": names, "label2id": {name: index for index, name in names.items()}}
    for asked in ({"num_labels": 5}, fresh):
        torch.manual_seed(1)
        model, info = type(small).from_pretrained(
            tmp_path, **asked, ignore_mismatched_sizes=True, output_loading_info=True
        )
        again = {str(key[0]) for key in info["mismatched_keys"]}
        assert len(again) == 2  # weight and bias
        for name, value in small.state_dict().items():
            if name not in again:
                assert torch.equal(model.state_dict()[name], value), name
        weight, bias = (model.state_dict()[next(n for n in again if n.endswith(e))] for e in ("weight", "bias"))
        assert not bias.any()
        assert 0.3 * model.config.initializer_range < weight.std() < 3 * model.config.initializer_range
        assert model(**inputs_for(model)).logits.shape[-1] == 5
    assert model.config.id2label == names
    model.save_pretrained(tmp_path / "new")
    assert same(
        type(small).from_pretrained(tmp_path / "new")(**inputs_for(model)).logits,
        model.eval()(**inputs_for(model)).logits,
    )
    with pytest.raises(ConfigError, match=r"has shape \(\d,\); the model needs \(5,\)"):
        type(small).from_pretrained(tmp_path, num_labels=5)
    # nothing else may be of another size, and damage is found as ever
    with pytest.raises(ConfigError, match="the model needs"):
        type(small).from_pretrained(tmp_path, hidden_size=34, ignore_mismatched_sizes=True)
    file = tmp_path / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-5] ^= 1
    file.write_bytes(content)
    with pytest.raises(ConfigError, match="damaged"):
        type(small).from_pretrained(tmp_path, num_labels=5, ignore_mismatched_sizes=True)


def test_a_new_head_without_this_package(tmp_path):
    NEW_HEADS["pooler"]().save_pretrained(tmp_path)
    code = f"""
import sys
sys.modules["snnk_peft"] = None
from transformers import AutoModelForSequenceClassification as A
options = {{"num_labels": 5, "ignore_mismatched_sizes": True, "trust_remote_code": True}}
model = A.from_pretrained({str(tmp_path)!r}, **options)
print(model.config.num_labels, tuple(model.classifier.bias.shape), bool(model.classifier.weight.isfinite().all()))
"""
    done = run_python(["-c", code])
    assert done.stdout.strip().endswith("5 (5,) True"), done.stderr


@pytest.mark.parametrize("opset", [14, 17, 1000, "18", True])
def test_an_operator_set_that_is_none_is_said_at_once(opset, tmp_path, monkeypatch):
    pytest.importorskip("onnxscript")
    with pytest.raises(ConfigError, match=rf"opset is {opset!r}; expected 18 to \d+, which"):
        export(tiny("bert"), "onnx", tmp_path / "model.onnx", opset=opset)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["model.onnx", "model.pt2"])
def test_a_full_disk_is_said_with_the_path(name, tmp_path):
    """A limit on the size of files, which the system tells as it tells a full disk."""
    pytest.importorskip("onnxscript")
    form = "onnx" if name.endswith("onnx") else "torch"
    code = f"""
import resource
from snnk_peft import export
from tests.tiny_models import tiny
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
try:
    export(tiny("bert"), {form!r}, {str(tmp_path / name)!r})
except OSError as error:
    print(error)
"""
    done = run_python(["-c", code])
    assert f"{tmp_path / name} could not be written" in done.stdout, done.stderr
    assert not list(tmp_path.iterdir())
