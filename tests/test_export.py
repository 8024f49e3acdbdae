"""Bundles exported with transformers' own exporters: one program for every batch size and length."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from transformers.exporters import DynamoConfig, DynamoExporter, OnnxConfig, OnnxExporter

from snnk_peft import AdapterPart, AttentionPart, FFNPart, PoolerPart, SNNKConfig, bundle, get_snnk_model
from snnk_peft.families import FAMILIES
from snnk_peft.functional import blocks
from tests.test_attention import causal_model
from tests.tiny_models import inputs_for, tiny, trained

pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

NEAR = AttentionPart(num_features=8, near_field=3, per_head=True)
PARTS = {
    "adapts to its input": {"attention": AttentionPart("saderf", num_features=8)},
    "near field": {"attention": NEAR},
    "some layers": {"attention": AttentionPart(num_features=8, layers="top-1")},
    "everything": {
        "attention": NEAR,
        "adapter": AdapterPart(num_features=4),
        "ffn": FFNPart(num_features=8, layers="top-1"),
        "pooler": PoolerPart(num_features=8),
    },
}
# Around blocks of the near field, whose width is 3; the first is the sample, a whole number of blocks.
LENGTHS = (12, 13, 2, 30)


def bundled(model, parts):
    return bundle(trained(get_snnk_model(model, SNNKConfig(**parts, modules_to_save=[])).eval()))


def samples(model, causal: bool = False) -> list[dict[str, torch.Tensor]]:
    """The sample to trace, then batches of other sizes, with padding."""
    found = [inputs_for(model, batch, tokens) for batch, tokens in zip((2, 3, 4, 5), LENGTHS, strict=True)]
    if causal:
        for batch in found[1:]:
            batch["attention_mask"] = batch["attention_mask"].flip(-1)
    return found


def check(exporter, config, model, given) -> None:
    """The program's logits are the model's, for every batch."""
    program = exporter.export(model, dict(given[0]), config=config)
    for batch in given:
        with torch.no_grad():
            expected = model(**batch).logits
        torch.testing.assert_close(program(**batch).logits, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("parts", [name for name in PARTS if name != "near field"])  # everything has it
def test_every_part(parts):
    model = bundled(tiny("bert"), PARTS[parts])
    check(DynamoExporter(), DynamoConfig(dynamic=True), model, samples(model))


@pytest.mark.parametrize("family", ["distilbert", "modernbert", "vit"])  # the others are built as BERT
def test_other_encoders(family):
    model = bundled(tiny(family), {"attention": NEAR})
    check(DynamoExporter(), DynamoConfig(dynamic=True), model, samples(model))


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_causal_models(name):
    model = bundled(causal_model(name), {"attention": NEAR})
    model.config.use_cache = False
    check(DynamoExporter(), DynamoConfig(dynamic=True), model, samples(model, causal=True))


@pytest.mark.parametrize("lengths", [(128, 100, 300), (12, 128, 300)], ids=str)
def test_chunks_of_the_causal_form(lengths):
    """The sample fills a chunk of 128 tokens, or is shorter than one; others are shorter or longer."""
    model = bundled(causal_model("llama"), {"attention": AttentionPart(num_features=4, layers="top-1")})
    model.config.use_cache = False
    given = [inputs_for(model, batch, tokens) for batch, tokens in zip((2, 3, 1), lengths, strict=True)]
    check(DynamoExporter(), DynamoConfig(dynamic=True), model, given)


def test_a_saved_program(tmp_path):
    """Export, save, load without the model's code."""
    model = bundled(tiny("bert"), PARTS["everything"])
    sample, *others = samples(model)
    DynamoExporter().export(model, dict(sample), config=DynamoConfig(dynamic=True)).save_pretrained(tmp_path)
    program = torch.export.load(tmp_path / "model.pt2").module()
    for batch in others:
        torch.testing.assert_close(program(**batch).logits, model(**batch).logits, rtol=1e-4, atol=1e-5)


def test_blocks_leave_room_only_when_exporting(monkeypatch):
    assert [blocks.block_count(length, 3) for length in (1, 3, 4, 6)] == [1, 1, 2, 2]
    monkeypatch.setattr(blocks, "exporting", lambda: True)
    assert [blocks.block_count(length, 3) for length in (1, 3, 4, 6)] == [2, 3, 3, 4]


ONNX = [
    ("bert", "everything"),
    ("bert", "adapts to its input"),
    ("modernbert", "some layers"),
    ("llama", "near field"),
    ("gpt2", "some layers"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("family", "parts"), ONNX)
def test_onnx(family, parts):
    """Through ONNX Runtime."""
    for name in ("onnx", "onnxscript", "onnxruntime"):
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"{name} is not installed: pip install snnk-peft[onnx]")
    causal = FAMILIES[family].causal
    model = bundled(causal_model(family) if causal else tiny(family), PARTS[parts])
    if causal:
        model.config.use_cache = False
    check(OnnxExporter(), OnnxConfig(dynamic=True), model, samples(model, causal))
