"""A SentenceTransformer is converted inside: what surrounds its encoder stays, and its vectors are what counts."""

from __future__ import annotations

import copy
import json
import sys
from pathlib import Path

import pytest
import torch
from transformers import BertTokenizer
from typer.testing import CliRunner

from snnk_cli.app import app
from snnk_peft import FFNPart, NarrowFFNPart, SNNKConfig, bundle, calibrate, convert, get_snnk_model
from snnk_peft.calibrating.answers import Answers, Comparison
from snnk_peft.converting.sentence_encoders import SentenceEncoder, is_sentence_encoder
from snnk_peft.errors import ConfigError, UnsupportedError
from snnk_peft.tasks.texts import drawn
from tests.fresh_process import run_python
from tests.tiny_models import tiny

library = pytest.importorskip("sentence_transformers", reason="pip install 'snnk-peft[embeddings]'")
modules = library.sentence_transformer.modules

WORDS = ["the", "a", "film", "is", "was", "really", "not", "very", "good", "bad", "query", "passage", ":", ",", "."]
TEXTS = [
    f"{subject} film {verb} {how} {what}"
    for subject in ("the", "a", "query")
    for verb in ("is", "was")
    for how in ("really", "not", "very")
    for what in ("good", "bad .")
]
MODES = ["mean", "cls", "max", "lasttoken", "mean_sqrt_len_tokens", "weightedmean", ("mean", "max")]


@pytest.fixture(scope="module")
def bert(tmp_path_factory) -> Path:
    """A folder with a tiny BERT and a tokenizer."""
    folder = tmp_path_factory.mktemp("bert")
    (folder / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]))
    BertTokenizer(vocab=str(folder / "vocab.txt")).save_pretrained(folder)
    tiny("bert", "BertModel", initializer_range=0.3).save_pretrained(folder)
    return folder


def sentence_transformer(folder: Path, mode="mean", *after, **options):
    first = library.base.modules.Transformer(str(folder), max_seq_length=8)
    pooling = modules.Pooling(32, mode, include_prompt=options.pop("include_prompt", True))
    return library.SentenceTransformer(modules=[first, pooling, *after], device="cpu", **options)


def converted(encoder: SentenceEncoder, part=None):
    model = get_snnk_model(copy.deepcopy(encoder.model), SNNKConfig(parts=[part or FFNPart(num_features=16)]))
    batches = [dict(encoder.model.dummy_inputs)] if part is None else batches_of(encoder)
    if part is not None:
        calibrate(model, batches, progress=False)
    return bundle(model)


def batches_of(encoder: SentenceEncoder) -> list[dict[str, torch.Tensor]]:
    features = [encoder.given.preprocess(TEXTS[i : i + 3]) for i in range(0, len(TEXTS), 3)]
    return [{"input_ids": each["input_ids"], "attention_mask": each["attention_mask"]} for each in features]


def vectors(model) -> torch.Tensor:
    return torch.from_numpy(model.encode(TEXTS))


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_pooling_gives_the_vectors_of_encode(bert, mode):
    width = 64 if isinstance(mode, tuple) else 32
    dense = modules.Dense(width, 12)
    model = sentence_transformer(bert, mode, dense, modules.Normalize())
    encoder = SentenceEncoder(model)
    inputs = model.preprocess(TEXTS)
    given = {name: inputs[name] for name in ("input_ids", "attention_mask")}
    states = encoder.model(**given).last_hidden_state
    found = encoder.pooling(states, given)
    torch.testing.assert_close(found, vectors(model))
    found.square().sum().backward()
    assert dense.linear.weight.grad is None  # the layers that were given learn nothing


@pytest.mark.parametrize("include", [True, False])
def test_a_prompt_is_pooled_as_the_model_says(bert, include):
    prompts = {"query": "query : ", "other": "query passage :"}
    model = sentence_transformer(bert, prompts=prompts, include_prompt=include)
    encoder = SentenceEncoder(model)
    assert encoder.prompts == ("", "query : ", "query passage :")
    prompted = [encoder.prompts[number % 3] + text for number, text in enumerate(TEXTS)]  # in one batch
    inputs = model.preprocess(prompted)
    given = {name: inputs[name] for name in ("input_ids", "attention_mask")}
    found = encoder.pooling(encoder.model(**given).last_hidden_state, given)
    for number, text in enumerate(TEXTS):
        truth = torch.from_numpy(model.encode(text, prompt=encoder.prompts[number % 3]))
        torch.testing.assert_close(found[number].detach(), truth)


def test_everything_around_the_encoder_stays(bert, tmp_path):
    options = {"prompts": {"query": "query : "}, "default_prompt_name": "query", "similarity_fn_name": "dot"}
    model = sentence_transformer(bert, "cls", modules.Dense(32, 12), modules.Normalize(), truncate_dim=6, **options)
    before, state = vectors(model), copy.deepcopy(model.state_dict())
    encoder = SentenceEncoder(model)
    small = converted(encoder, NarrowFFNPart(keep=0.25))
    made = encoder.closed(small)
    made.save_pretrained(str(tmp_path / "st"))
    again = library.SentenceTransformer(str(tmp_path / "st"), device="cpu", truncate_dim=6)
    torch.testing.assert_close(vectors(again), vectors(made))
    assert type(again) is library.SentenceTransformer
    assert [type(each) for each in again] == [type(each) for each in model]
    assert (again.prompts["query"], again.default_prompt_name) == ("query : ", "query")
    assert (again.similarity_fn_name, again.max_seq_length) == ("dot", 8)
    card = (tmp_path / "st" / "README.md").read_text()
    assert "import snnk_peft" in card
    assert "SentenceTransformer(" in card
    # what was given is as it was
    assert model[0].model is encoder.model
    assert type(model[0].model).__name__ == "BertModel"
    torch.testing.assert_close(vectors(model), before, rtol=0, atol=0)
    for name, value in model.state_dict().items():
        assert torch.equal(value, state[name]), name
    assert not torch.allclose(vectors(made), before)


def test_it_loads_without_this_package(bert, tmp_path):
    encoder = SentenceEncoder(sentence_transformer(bert, "mean", modules.Normalize()))
    made = encoder.closed(converted(encoder))
    made.save_pretrained(str(tmp_path / "st"))
    torch.save(vectors(made), tmp_path / "vectors.pt")
    code = f"""
import sys
sys.modules["snnk_peft"] = None
import torch
from sentence_transformers import SentenceTransformer
model = SentenceTransformer("st", device="cpu", trust_remote_code=True)
torch.testing.assert_close(torch.from_numpy(model.encode({TEXTS!r})), torch.load("vectors.pt"))
print(type(model[0].model).__name__)
"""
    done = run_python(["-c", code], cwd=tmp_path)
    assert done.stdout.strip() == "SnnkBertModel", done.stderr


def test_what_is_compared_is_what_encode_returns(bert):
    model = sentence_transformer(bert, "max", modules.Dense(32, 12))
    encoder = SentenceEncoder(model)
    made = encoder.closed(converted(encoder, NarrowFFNPart(keep=0.25)))
    comparison = Comparison(Answers(encoder.model, encoder.pooling))
    with torch.no_grad():
        for batch in batches_of(encoder):
            comparison.update(encoder.model(**batch), made[0].model(**batch), batch)
    truth = torch.cosine_similarity(vectors(model), vectors(made)).mean()
    assert comparison.figures()["cosine"] == pytest.approx(float(truth), abs=1e-5)


@pytest.mark.parametrize("given", ["model", "folder"])
def test_convert_takes_a_sentence_transformer_and_gives_one(bert, tmp_path, given):
    model = sentence_transformer(bert, "max", modules.Dense(32, 12), prompts={"query": "query : "})
    model.save_pretrained(str(tmp_path / "in"))
    before = vectors(model)
    given = model if given == "model" else str(tmp_path / "in")
    done = convert(given, TEXTS, None, parts=[NarrowFFNPart(keep=0.02)], steps=2, progress=False)
    assert 0 < done.report.figures["cosine"] < 1
    assert "make stored ones anew" in str(done.report)
    done.save_pretrained(tmp_path / "out")
    again = library.SentenceTransformer(str(tmp_path / "out"), device="cpu")
    torch.testing.assert_close(vectors(again), vectors(done.model))
    torch.testing.assert_close(vectors(model), before, rtol=0, atol=0)
    card = (tmp_path / "out" / "README.md").read_text()
    assert "library_name: sentence-transformers" in card
    assert f"| cosine | {done.report.figures['cosine']:.4f} |" in card
    assert "make stored ones anew" in card


@pytest.mark.parametrize("pooling", ["mean", "first", "last"])
def test_an_encoder_alone_is_judged_by_the_pooling_that_is_given(bert, pooling):
    done = convert(str(bert), TEXTS, None, parts=[NarrowFFNPart(keep=0.25)], pooling=pooling, steps=0)
    mode = {"mean": "mean", "first": "cls", "last": "lasttoken"}[pooling]
    encoder = SentenceEncoder(sentence_transformer(bert, mode))
    first, second = encoder.given, encoder.closed(done.model)
    held = done.report.examples["held_out"]
    assert 0 < done.report.figures["cosine"] < 1
    texts = [TEXTS[index] for index in drawn(len(TEXTS), 100, 0)[:held]]
    vectors = [torch.from_numpy(model.encode(texts)) for model in (first, second)]
    truth = torch.cosine_similarity(*vectors).mean()
    assert done.report.figures["cosine"] == pytest.approx(float(truth), abs=1e-5)


def test_the_command_takes_the_folder_of_one(bert, tmp_path):
    sentence_transformer(bert, "cls", modules.Normalize()).save_pretrained(str(tmp_path / "in"))
    (tmp_path / "texts.txt").write_text("\n".join(TEXTS))
    options = {"--texts": tmp_path / "texts.txt", "--output": tmp_path / "run"}
    given = [str(tmp_path / "in"), *(str(word) for pair in options.items() for word in pair)]
    given += ["convert.ffn.num_features=8", "convert.batch_size=4", "convert.recover=0"]
    done = CliRunner().invoke(app, ["convert", *given])
    assert done.exit_code == 0, done.output
    again = library.SentenceTransformer(str(tmp_path / "run/bundle"), device="cpu")
    assert type(again[0].model).__name__ == "SnnkBertModel"
    assert again[1].pooling_mode == "cls"
    figures = json.loads((tmp_path / "run/metrics.json").read_text())
    held = [TEXTS[index] for index in drawn(len(TEXTS), 100, 0)[: figures["examples"]["held_out"]]]
    original = library.SentenceTransformer(str(tmp_path / "in"), device="cpu")
    before, after = (torch.from_numpy(each.encode(held)) for each in (original, again))
    assert figures["score"] == pytest.approx(float((before * after).sum(-1).mean()), abs=1e-5)


def test_a_sentence_transformer_has_its_own_tokenizer_and_pooling(bert):
    model = sentence_transformer(bert)
    with pytest.raises(ConfigError, match="tokenizer and pooling given beside a SentenceTransformer"):
        convert(model, TEXTS, None, parts=[FFNPart()], tokenizer=model.tokenizer, pooling="mean", progress=False)


def test_a_folder_is_known_by_its_modules(bert, tmp_path):
    assert not is_sentence_encoder(bert)
    assert not is_sentence_encoder(tmp_path / "absent" / "or" / "not")
    model = sentence_transformer(bert)
    assert is_sentence_encoder(model)
    assert not is_sentence_encoder(model[0].model)
    model.save_pretrained(str(tmp_path / "st"))
    assert is_sentence_encoder(str(tmp_path / "st"))
    torch.testing.assert_close(vectors(SentenceEncoder(tmp_path / "st").given), vectors(model))


def test_what_cannot_be_converted_is_refused(bert):
    words = library.base.modules.Transformer(str(bert))
    router = modules.Router.for_query_document([words], [copy.deepcopy(words)]) if hasattr(modules, "Router") else None
    with pytest.raises(UnsupportedError, match="convert each encoder as a SentenceTransformer of its own"):
        SentenceEncoder(library.SentenceTransformer(modules=[router, modules.Pooling(32)], device="cpu"))
    with pytest.raises(UnsupportedError, match="only this one can be converted"):
        SentenceEncoder(library.CrossEncoder(str(bert), device="cpu"))


def test_without_the_library_it_is_said_how_to_install_it(bert, tmp_path, monkeypatch):
    sentence_transformer(bert).save_pretrained(str(tmp_path / "st"))
    monkeypatch.setitem(sys.modules, "sentence_transformers", None)
    assert is_sentence_encoder(tmp_path / "st")
    with pytest.raises(ConfigError, match=r"pip install 'snnk-peft\[embeddings\]'"):
        SentenceEncoder(tmp_path / "st")
