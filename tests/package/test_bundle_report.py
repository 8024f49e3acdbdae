"""A report says what was folded once for all layers that were folded alike."""

from __future__ import annotations

import pytest
from transformers import BertConfig, BertForSequenceClassification

from snnk_peft import AdapterPart, FFNPart, SNNKConfig, bundle, get_snnk_model
from snnk_peft.bundling.report import BundleReport, Folded, group
from snnk_peft.model_card import write_model_card


@pytest.fixture(scope="module")
def report() -> BundleReport:
    sizes = {"hidden_size": 16, "num_hidden_layers": 4, "num_attention_heads": 2, "intermediate_size": 24}
    model = BertForSequenceClassification(BertConfig(vocab_size=50, **sizes))
    config = SNNKConfig(adapter=AdapterPart(num_features=4, layers=[0, 1, 3]), ffn=FFNPart(num_features=4))
    return bundle(get_snnk_model(model, config)).bundle_report


def test_equal_lines_are_one_line(report):
    text = str(report)
    assert "bert.encoder.layer.{0-1,3}.attention.output.dropout" in text
    assert "3 × Dropout" in text
    assert text.count("attention.output.dropout") == 1
    assert len(text.splitlines()) < len(report.folded) + 8


def test_every_folded_module_is_still_told(report):
    told = group(report.folded)
    assert sum(alike.count for alike in told) == len(report.folded)
    assert len(told) < len(report.folded)
    for alike in told:
        same = [
            entry for entry in report.folded if (entry.before, entry.after) == (alike.folded.before, alike.folded.after)
        ]
        assert alike.folded in same


def test_what_differs_in_anything_stays_apart():
    one = Folded(["a.0.b"], "Linear", "x", 8, 4)
    others = [
        Folded(["a.1.c"], "Linear", "x", 8, 4),
        Folded(["a.1.b"], "Dropout", "x", 8, 4),
        Folded(["a.1.b"], "Linear", "y", 8, 4),
        Folded(["a.1.b"], "Linear", "x", 9, 4),
        Folded(["a.1.b", "a.1.d"], "Linear", "x", 8, 4),
        Folded(["pooler"], "Linear", "x", 8, 4),
    ]
    for other in others:
        assert [alike.count for alike in group([one, other])] == [1, 1]
    merged = group([one, Folded(["a.10.b"], "Linear", "x", 8, 4), Folded(["a.2.b"], "Linear", "x", 8, 4)])
    assert [(alike.paths, alike.count) for alike in merged] == [(["a.{0,2,10}.b"], 3)]
    assert [alike.paths for alike in group([one])] == [["a.0.b"]]


def test_the_card_shows_the_same_lines(report, tmp_path):
    card = write_model_card(tmp_path, report=report).read_text()
    assert "`bert.encoder.layer.{0-1,3}.attention.output.dropout`" in card
    assert card.count("attention.output.dropout") == 1
