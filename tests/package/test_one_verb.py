"""`calibrate` fits what a model has: where nothing stands in for a module, learned attention or rows of adapters."""

from __future__ import annotations

import pytest
import torch

from snnk_peft import (
    AdapterPart,
    AttentionPart,
    FFNPart,
    SNNKConfig,
    calibrate,
    calibrate_adapters,
    fit_attention,
    get_snnk_model,
)
from snnk_peft.errors import ConfigError
from tests.tiny_models import tiny

LEARNED = AttentionPart(component="softmax_pm", projection="free", num_features=8)
ROWS = AdapterPart("gelu", "free", num_features=4, placement="query_value")


def batches(labels: bool = True) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(5, 100, (6, 8, 12), generator=generator)
    return [{"input_ids": each, **({"labels": (each[:, 0] > 50).long()} if labels else {})} for each in ids]


def patched(**parts):
    torch.manual_seed(0)
    return get_snnk_model(tiny("bert", "BertForSequenceClassification"), SNNKConfig(**parts, task_type="SEQ_CLS"))


def numbers(model) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


@pytest.mark.parametrize(
    ("parts", "door", "options"),
    [
        ({"attention": LEARNED}, fit_attention, {"steps": 3}),
        ({"adapter": ROWS}, calibrate_adapters, {}),
        ({"adapter": ROWS}, calibrate_adapters, {"held_out": 0.3, "ridges": [0.1], "refit": False}),
    ],
    ids=["attention", "adapters", "adapters-with-options"],
)
def test_it_does_what_the_older_names_do(parts, door, options):
    one, other, untouched = (patched(**parts) for _ in range(3))
    report, expected = calibrate(one, batches(), progress=False, **options), door(other, batches(), **options)
    found, wanted = numbers(one), numbers(other)
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    assert any(not torch.equal(found[name], value) for name, value in numbers(untouched).items())
    assert type(report) is type(expected)
    assert report.settings == expected.settings


def test_the_loss_of_attention_follows_the_features():
    assert calibrate(patched(attention=LEARNED), batches(), steps=1, progress=False).settings["loss"] == "cross_entropy"
    signed = AttentionPart(component="trigrf", projection="free", num_features=8)
    assert calibrate(patched(attention=signed), batches(), steps=1, progress=False).settings["loss"] == "output"


@pytest.mark.parametrize(
    ("parts", "given", "options", "words"),
    [
        ({"adapter": ROWS}, batches(labels=False), {}, "expected labels"),
        ({"attention": LEARNED}, batches(), {}, "learned projection with steps=200"),
        ({"attention": LEARNED}, batches(), {"steps": -1}, "steps is -1"),
    ],
    ids=["no-labels", "no-steps", "negative"],
)
def test_what_is_missing_is_named_and_nothing_changes(parts, given, options, words):
    model = patched(**parts)
    before = numbers(model)
    with pytest.raises(ConfigError, match=words):
        calibrate(model, given, progress=False, **options)
    after = numbers(model)
    assert all(torch.equal(after[name], value) for name, value in before.items())


def test_beside_a_stand_in_the_others_stay_as_they_are():
    model = patched(ffn=FFNPart(num_features=8, layers="top-1"), adapter=ROWS)
    before = numbers(model)
    calibrate(model, batches(), progress=False)
    changed = {name for name, value in numbers(model).items() if not torch.equal(value, before[name])}
    assert changed
    assert all(".layer.1.intermediate.dense" in name for name in changed), sorted(changed)
