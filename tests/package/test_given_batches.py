"""What people give as batches: taken where there is exactly one way, otherwise said before the model runs; repeats."""

from __future__ import annotations

import warnings

import datasets
import numpy as np
import pandas
import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch.utils.data import DataLoader, TensorDataset
from transformers import BatchEncoding, PreTrainedTokenizerFast

from snnk_peft import (
    AdapterPart,
    AttentionPart,
    ClosedFormHead,
    FFNPart,
    SNNKConfig,
    bundle,
    calibrate,
    calibrate_adapters,
    check_family,
    export,
    fit_attention,
    fit_closed_form,
    get_snnk_model,
    plan,
)
from snnk_peft.errors import ConfigError, NumericalWarning
from snnk_peft.repeats import label_note, repeat_note, rows
from tests.tiny_models import odd_or_even as tensors
from tests.tiny_models import tiny

QUIET = {"progress": False}


def rows_of(batches) -> datasets.Dataset:
    return datasets.Dataset.from_list(
        [
            {key: value.tolist() for key, value in zip(batch, row, strict=True)}
            for batch in batches
            for row in zip(*batch.values(), strict=True)
        ]
    )


def patched(config: SNNKConfig):
    return get_snnk_model(tiny("bert"), config).eval()


def _calibrate(batches):
    model = patched(SNNKConfig(ffn=FFNPart(num_features=8, layers="top-1"), modules_to_save=[]))
    return model, lambda: calibrate(model, batches, **QUIET)


def _calibrate_adapters(batches):
    model = patched(SNNKConfig(adapter=AdapterPart("gelu", "free", num_features=4, placement="query_value")))
    return model, lambda: calibrate_adapters(model, batches, **QUIET)


def _fit_attention(batches):
    part = AttentionPart(component="softmax_pm", projection="free", num_features=8)
    model = patched(SNNKConfig(attention=part))
    return model, lambda: fit_attention(model, batches, steps=2, **QUIET)


def _plan(batches):
    model = tiny("bert")
    parts = [FFNPart(num_features=4, layers="top-1")]
    return model, lambda: plan(model, batches, 0.95, of="macs", parts=parts, **QUIET)


def _fit_closed_form(batches):
    model = tiny("bert")
    return model, lambda: fit_closed_form(model, batches)


def _head(batches):
    model = tiny("bert", "BertModel")
    head = ClosedFormHead(model, names=["even", "odd"])
    return model, lambda: head.add(batches)


DOORS = {
    door.__name__.removeprefix("_"): door
    for door in (_calibrate, _calibrate_adapters, _fit_attention, _plan, _fit_closed_form, _head)
}


@pytest.fixture(params=DOORS)
def door(request):
    return DOORS[request.param]


@pytest.mark.parametrize(
    "kind", ["lists", "numpy", "encoding", "small ints", "rows", "torch rows", "inference", "loader", "function"]
)
def test_what_has_exactly_one_meaning_is_taken(door, kind):
    plain = tensors()
    with torch.inference_mode():
        copies = [{key: value.clone() for key, value in batch.items()} for batch in plain]
    given = {
        "lists": [{key: value.tolist() for key, value in batch.items()} for batch in plain],
        "numpy": [{key: value.numpy() for key, value in batch.items()} for batch in plain],
        "encoding": [BatchEncoding(dict(batch)) for batch in plain],
        "small ints": [{key: value.to(torch.int16) for key, value in batch.items()} for batch in plain],
        "rows": rows_of(plain),
        "torch rows": rows_of(plain).with_format("torch"),
        "inference": copies,
        "loader": DataLoader(plain, batch_size=None),
        "function": lambda: iter(plain),
    }[kind]
    if "rows" in kind:  # one example a batch
        plain = [{key: value[row, None] for key, value in batch.items()} for batch in plain for row in range(4)]
    model, run = door(given)
    other, expected = door(plain)
    found, wanted = run(), expected()
    if hasattr(found, "predicted"):
        assert found.predicted == wanted.predicted
    for key, value in other.state_dict().items():
        assert torch.equal(model.state_dict()[key], value), key


RAGGED = [{"input_ids": [[5, 6, 7], [8, 9]], "attention_mask": [[1, 1, 1], [1, 1]], "labels": [0, 1]}] * 6
SPENT = iter(())


def columns():
    """As torch's default_collate gives rows of lists: columns."""
    return DataLoader(rows_of(tensors()), batch_size=4)


REFUSED = {
    "ragged": (lambda: RAGGED, r"batch 0 holds input_ids, attention_mask as a list of rows of 2 to 3 .*padding=True"),
    "columns": (
        columns,
        r"batch 0 holds input_ids, attention_mask as a list of 9 tensors .*default_collate.*collate_fn",
    ),
    "dicts": (lambda: DataLoader(rows_of(tensors()), 4, collate_fn=list), r"batch 0 is a list of 4 dicts.*Collator"),
    "tuples": (lambda: DataLoader(TensorDataset(tensors()[0]["input_ids"]), 4), r"batch 0 is a list of 1 Tensors"),
    "texts": (lambda: ["good film", "bad film"], r"batch 0 is the text 'good film' .*tokenized"),
    "a text": (lambda: "good film", r"batches is the text 'good film'; expected a list"),
    "a tokenizer": (
        lambda: PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel({"a": 0}, unk_token="a"))),
        r"batches is a \w+; expected a list",
    ),
    "a model": (lambda: tiny("bert"), r"batches is a BertForSequenceClassification; expected a list"),
    "a class": (lambda: DataLoader, r"batches is the class DataLoader; expected a list"),
    "arguments": (lambda: lambda size: [], r"batches is a function; .* a function without arguments"),
    "no iterator": (lambda: lambda: 3, r"batches is a function that returned an int; expected .* a fresh iterator"),
    "a table": (lambda: pandas.DataFrame({"text": ["a"], "label": [0]}), r"batches is a DataFrame \(text, label\)"),
    "nothing": (lambda: None, r"batches is None; expected a list"),
    "a batch": (lambda: tensors()[0], r"batches is a dict \(input_ids, .*Give a batch alone as \[batch\]"),
    "splits": (lambda: datasets.DatasetDict(train=rows_of(tensors())), r"DatasetDict \(train\).*one of its splits"),
    "spent": (lambda: SPENT, r"can be read only once|gives nothing: it was read before"),
    "labels": (lambda: [{"labels": each["labels"]} for each in tensors()], r"batch 0 holds labels; expected model inp"),
    "padding": (
        lambda: [{**each, "attention_mask": torch.zeros_like(each["attention_mask"])} for each in tensors()],
        r"batch 0 is padding alone: its attention_mask \(4, 9\) is 0",
    ),
    "a text column": (
        lambda: [{**each, "text": ["a"] * 4} for each in tensors()],
        r"batch 0 holds text as a list of texts; expected model inputs alone.*remove_columns",
    ),
    "floats": (lambda: [{**each, "input_ids": each["input_ids"].float()} for each in tensors()], r"tensor of float32"),
    "no rows": (
        lambda: [{k: v[:0] for k, v in each.items()} for each in tensors()],
        r"input_ids \(0, 9\), no examples",
    ),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_anything_else_is_said_before_the_model_runs(door, kind):
    given, match = REFUSED[kind]
    model, run = door(given())
    called = []
    model.register_forward_pre_hook(lambda *args: called.append(args))
    with pytest.raises(ConfigError, match=match):
        run()
    assert not called


@pytest.mark.parametrize("name", ["ragged", "columns", "texts", "padding"])
def test_single_batches_are_looked_at_as_well(tmp_path, name):
    given = next(iter(REFUSED[name][0]()))
    match = REFUSED[name][1].replace("batch 0", "(probe|inputs|sample|batches.0.)")
    model = patched(SNNKConfig(ffn=FFNPart(num_features=8), modules_to_save=[]))
    path = tmp_path / "model.pt2"
    for run in (
        lambda: bundle(model, probe=given),
        lambda: check_family(tiny("bert"), probe=given),
        lambda: plan(tiny("bert"), tensors(), 0.9, of="macs", inputs=given, **QUIET),
        lambda: export(tiny("bert"), "torch", path, sample=given),
        lambda: export(tiny("bert"), "torch", path, batches=[given]),
    ):
        with pytest.raises(ConfigError, match=match):
            run()
    lists = {key: value.tolist() for key, value in tensors()[0].items()}
    assert bundle(model, probe=lists).bundle_report.parity_error < 1e-5


def test_pictures_are_made_as_precise_as_the_model():
    pictures = np.random.default_rng(0).random((8, 3, 3, 8, 8))
    reports = []
    for given in (pictures, torch.tensor(pictures).float(), [list(each) for each in pictures]):
        model = get_snnk_model(tiny("vit"), SNNKConfig(ffn=FFNPart(num_features=8), modules_to_save=[])).eval()
        report = calibrate(model, [{"pixel_values": each} for each in given], **QUIET)
        reports.append([slot.error_after for slot in report.slots])
    assert reports[0] == reports[1] == reports[2]
    with pytest.raises(ConfigError, match=r"batch 0 holds pixel_values as a tensor of uint8; expected .*processor"):
        calibrate(model, [{"pixel_values": torch.ones(3, 3, 8, 8).byte()}] * 4, **QUIET)


# === held-out rows that are old acquaintances =========================================================================


@pytest.fixture
def model():
    return get_snnk_model(tiny("bert"), SNNKConfig(ffn=FFNPart(num_features=4)))


def batch(texts: list[list[int]]) -> dict[str, torch.Tensor]:
    longest = max(map(len, texts))
    ids = torch.tensor([text + [0] * (longest - len(text)) for text in texts])
    return {"input_ids": ids, "attention_mask": (ids > 0).long()}


def test_three_sentences_again_and_again_are_noticed(model):
    texts = [[5, 6, 7], [8, 9, 10, 11], [12, 13]] * 20
    batches = [batch(texts[start : start + 4]) for start in range(0, 60, 4)]  # other neighbours, other padding
    with pytest.warns(NumericalWarning, match="12 of 12 held-out rows are also among those that are fitted"):
        calibrate(model, batches, progress=False)


def test_different_rows_are_not(model):
    ids = torch.randint(1, 50, (60, 12))
    with warnings.catch_warnings():
        warnings.simplefilter("error", NumericalWarning)
        calibrate(model, [{"input_ids": ids[start : start + 4]} for start in range(0, 60, 4)], progress=False)


def test_rows_are_compared_without_their_padding():
    short, long = batch([[5, 6, 7]]), batch([[5, 6, 7], [8, 9, 10, 11]])
    assert next(rows(short)) == next(rows(long))
    assert len(set(rows(long))) == 2
    pixels = torch.rand(3, 3, 4, 4, dtype=torch.bfloat16)
    assert len(set(rows({"pixel_values": pixels}))) == 3
    assert list(rows({"labels": torch.tensor([1])})) == []


def test_labels_are_no_rows():
    ids, labels = torch.tensor([[5, 6], [7, 8]]), torch.ones(2, 3)
    assert list(rows({"labels": labels, "input_ids": ids})) == list(rows({"input_ids": ids}))
    assert list(rows({"labels": labels})) == []


def test_notes_count_what_repeats_and_what_contradicts():
    train, validation = ["good", "bad", "good", "fine", "good"], ["new", "good", "good", "bad"]
    assert repeat_note("validation", validation, "train", train).startswith("3 of 4 rows of validation are also among")
    assert repeat_note("validation", ["new"], "train", train) is None
    told = label_note("train", train, [1, 0, 0, 1, 1])
    assert told.startswith("1 of the 3 different rows of train occur with more than one label (3 of 5 rows)")
    assert label_note("train", train, [1, 0, 1, 1, 1]) is None
