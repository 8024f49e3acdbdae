"""calibrate says so when its held-out rows are old acquaintances."""

from __future__ import annotations

import warnings

import pytest
import torch
from transformers import BertConfig, BertForSequenceClassification

from snnk_peft import FFNPart, SNNKConfig, calibrate, get_snnk_model
from snnk_peft.errors import NumericalWarning
from snnk_peft.repeats import label_note, repeat_note, rows


@pytest.fixture
def model():
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24}
    return get_snnk_model(
        BertForSequenceClassification(BertConfig(vocab_size=50, **sizes)), SNNKConfig(ffn=FFNPart(num_features=4))
    )


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
