"""Bundles exported, by transformers' own exporters and by `export`: one program for every batch size and length."""

from __future__ import annotations

import copy
import importlib.util
import os
import random
import subprocess
import sys
import tempfile
import warnings
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn
from transformers import BertForSequenceClassification
from transformers.exporters import DynamoConfig, DynamoExporter

from snnk_peft import (
    AdapterPart,
    AttentionPart,
    FFNPart,
    LowRankPart,
    MeanPoolingPart,
    NarrowFFNPart,
    NarrowHeadsPart,
    NormsPart,
    PoolerPart,
    SNNKConfig,
    bundle,
    export,
    get_snnk_model,
)
from snnk_peft.errors import ConfigError, UnsupportedError
from snnk_peft.exporting.program import FORMATS, Axes, OnnxFormat, TorchFormat
from snnk_peft.families import FAMILIES
from snnk_peft.functional import blocks
from tests.attention_models import causal_model
from tests.tiny_models import inputs_for, tiny, trained

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]
ABSENT = [name for name in ("onnx", "onnxscript", "onnxruntime") if importlib.util.find_spec(name) is None]
with_onnx = pytest.mark.skipif(bool(ABSENT), reason=f"pip install snnk-peft[onnx] ({', '.join(ABSENT)})")

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


def patched(model, parts):
    return trained(get_snnk_model(model, SNNKConfig(**parts, modules_to_save=[])).eval())


def bundled(model, parts):
    return bundle(patched(model, parts))


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


# --- export ---------------------------------------------------------------------------------------------------------


JOINT = {"near_field": 3, "near_field_normalisation": "joint", "sinks": 2}
CENTROIDS = AttentionPart("mixture", "centroids", num_features=4)
ONE = {"num_hidden_layers": 1}
KINDS = {
    "adapter, ffn, pooler, near field": ("bert", PARTS["everything"], ONE),
    "attention that adapts to its input": ("bert", PARTS["adapts to its input"], ONE),
    "attention of some layers": ("modernbert", PARTS["some layers"], {}),
    "learned rows beside queries and values, norms": (
        "bert",
        {
            "adapter": AdapterPart("gelu", "free", num_features=4, placement="query_value", normalize=False),
            "parts": [NormsPart()],
        },
        ONE,
    ),
    "centroids, parallel adapter": (
        "bert",
        {"attention": CENTROIDS, "adapter": AdapterPart(num_features=4, placement="parallel")},
        ONE,
    ),
    "centroids under one normalisation": ("bert", {"attention": replace(CENTROIDS, **JOINT)}, ONE),
    "the mean over the tokens": ("bert", {"pooler": PoolerPart(num_features=6), "parts": [MeanPoolingPart()]}, ONE),
    "low rank, narrow heads": ("bert", {"parts": [LowRankPart("ffn", rank=3), NarrowHeadsPart(head_dim=6)]}, ONE),
    "vision": (
        "vit",
        {"ffn": FFNPart(num_features=8), "pooler": PoolerPart(num_features=8), "adapter": AdapterPart(num_features=4)},
        ONE,
    ),
    "causal, one normalisation, narrow FFN": (
        "llama",
        {"parts": [replace(CENTROIDS, layers=[0], refit_output=False, **JOINT), NarrowFFNPart(layers=[1])]},
        {},
    ),
    "causal, a full head in 8 bits": (
        "llama",
        {"attention": AttentionPart(num_features=4, full_heads=[[0, 1]], cache_bits=8, position_free=True, **JOINT)},
        {"num_key_value_heads": 2},
    ),
    "causal, near field": ("llama", PARTS["near field"], {}),
    "causal, some layers": ("gpt2", PARTS["some layers"], {}),
}


@with_onnx
@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_onnx(kind, tmp_path):
    """Every kind of conversion: ONNX Runtime alone answers as the patched model does, on shapes of the test's own."""
    onnxruntime = pytest.importorskip("onnxruntime")
    family, parts, changes = KINDS[kind]
    causal = FAMILIES[family].causal
    model = patched(causal_model(family) if causal else tiny(family, **changes), parts)
    report = export(model, "onnx", tmp_path / "model.onnx")
    assert os.listdir(tmp_path) == ["model.onnx"]
    session = onnxruntime.InferenceSession(report.path)
    names = [entry.name for entry in session.get_inputs()]
    for batch in samples(model, causal):
        (logits,) = session.run(["logits"], {name: batch[name].numpy() for name in names})
        with torch.no_grad():
            torch.testing.assert_close(torch.from_numpy(logits), model(**batch).logits, rtol=1e-4, atol=1e-5)


def one_layer():
    return tiny("bert", **ONE)


def test_a_file_of_torch(tmp_path):
    """Written once it is right, for a process that knows torch alone; the model is as it was before."""
    model = bundled(one_layer(), {"ffn": FFNPart(num_features=8)}).train()
    state, attributes = {name: value.clone() for name, value in model.state_dict().items()}, set(vars(model))
    sample = {**inputs_for(model, 1, 6), "labels": torch.ones(1, dtype=torch.long)}
    sample["token_type_ids"] = torch.zeros_like(sample["input_ids"])
    report = export(model, "torch", tmp_path / "deep" / "model.pt2", sample=sample)
    assert os.listdir(tmp_path / "deep") == ["model.pt2"]
    assert report.bytes == os.path.getsize(report.path)
    assert report.opset is None
    assert report.error <= report.tolerance
    assert all(axes == [0, 1] for axes in report.inputs.values())
    assert "token_type_ids" in report.inputs
    shapes = [tuple(entry.shapes["input_ids"]) for entry in report.parity]
    assert shapes == [(1, 6), (1, 1), (1, 9), (2, 39)]  # up to all positions that the model has
    assert model.training
    assert all(module.training for module in model.modules())
    assert set(vars(model)) == attributes
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())

    batch = {**inputs_for(model, 4, 9), "token_type_ids": torch.zeros(4, 9, dtype=torch.long)}
    torch.save(batch, tmp_path / "batch.pt")
    program = (
        "import sys, torch; batch = torch.load('batch.pt'); program = torch.export.load(sys.argv[1]).module(); "
        "torch.save(program(**dict(reversed(batch.items())))['logits'], 'logits.pt'); "
        "assert not {'snnk_peft', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program, report.path], cwd=tmp_path, check=True)
    with torch.no_grad():
        expected = copy.deepcopy(model).eval()(**batch).logits
    torch.testing.assert_close(torch.load(tmp_path / "logits.pt"), expected)
    assert str(report).count("error") == len(report.parity)
    assert report.to_dict()["parity"][0]["error"] < 1e-5


@pytest.mark.parametrize("part", [CENTROIDS, AttentionPart("softmax_pm", "free", 4)], ids=lambda part: part.component)
def test_features_by_their_logarithms_in_a_file_of_torch(part, tmp_path):
    model = bundled(one_layer(), {"attention": part})
    report = export(model, "torch", tmp_path / "model.pt2")
    batch = inputs_for(model, 3, 9)
    with torch.no_grad():
        torch.testing.assert_close(torch.export.load(report.path).module()(**batch)["logits"], model(**batch).logits)


def operations(part: AttentionPart, heads: int) -> int:
    """Operations in the exported program of one layer."""
    model = tiny("bert", num_attention_heads=heads, **ONE)
    seen = []

    class Counting(TorchFormat):
        def write(self, program, path):
            seen.append(sum(node.op == "call_function" for node in program.graph.nodes))
            return super().write(program, path)

    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setitem(FORMATS, "torch", Counting())
        export(bundled(model, {"attention": part}), "torch", f"{folder}/model.pt2")
    return seen[0]


@pytest.mark.parametrize("part", [CENTROIDS, replace(CENTROIDS, **JOINT)], ids=["alone", "joint"])
def test_a_graph_does_not_form_the_maps_of_every_head(part):
    assert operations(part, 4) == operations(part, 2)


@with_onnx
@pytest.mark.parametrize("int8", [False, True])
def test_norms_are_left_to_themselves(int8, tmp_path):
    """What ONNX Runtime makes of the graph before it runs it has each LayerNorm as it is: fused they are slower."""
    onnx, onnxruntime = pytest.importorskip("onnx"), pytest.importorskip("onnxruntime")
    model = one_layer()
    report = export(model, "onnx", tmp_path / "model.onnx", int8=int8)
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath = str(tmp_path / "optimized.onnx")
    onnxruntime.InferenceSession(report.path, options)
    kinds = [node.op_type for node in onnx.load(options.optimized_model_filepath).graph.node]
    assert kinds.count("LayerNormalization") == sum(isinstance(module, nn.LayerNorm) for module in model.modules())
    assert "SkipLayerNormalization" not in kinds


@with_onnx
def test_int8_linears(tmp_path):
    """Of all Linears and of nothing else; as accurate as ONNX Runtime alone says."""
    onnx, onnxruntime = pytest.importorskip("onnx"), pytest.importorskip("onnxruntime")
    parts = {"attention": AttentionPart(num_features=8), "ffn": FFNPart(num_features=8)}
    model = bundled(one_layer(), parts)
    batches = [inputs_for(model, 3, tokens) for tokens in (5, 9)]
    report = export(model, "onnx", tmp_path / "small.onnx", int8=True, batches=iter(batches))
    assert os.listdir(tmp_path) == ["small.onnx"]
    graph = onnx.load(report.path).graph
    small = {node.input[1] for node in graph.node if node.op_type == "MatMulInteger"}
    weights = {value.name: onnx.numpy_helper.to_array(value) for value in graph.initializer}
    shapes = sorted(weights[name].shape for name in small)
    linears = [tuple(module.weight.T.shape) for module in model.modules() if isinstance(module, nn.Linear)]
    assert shapes == sorted([*linears, (32, 8)])  # that of the FFN's features, and none of the attention's
    assert report.int8.linears == len(shapes)
    assert all(weights[name].dtype == np.int8 for name in small)

    session = onnxruntime.InferenceSession(report.path)
    names = [entry.name for entry in session.get_inputs()]
    found = [session.run(["logits"], {name: batch[name].numpy() for name in names})[0] for batch in batches]
    with torch.no_grad():
        expected = np.concatenate([model(**batch).logits.numpy() for batch in batches])
    error = np.linalg.norm(np.concatenate(found) - expected) / np.linalg.norm(expected)
    assert report.int8.error == pytest.approx(error, rel=1e-3)
    assert 1e-4 < error < 0.2
    assert report.int8.examples == 6
    assert report.int8.figures["agreement"] == np.mean(np.concatenate(found).argmax(-1) == expected.argmax(-1))
    assert report.bytes < report.int8.bytes_before
    assert set(report.int8.milliseconds) == {"torch", "onnx", "int8"}


@with_onnx
def test_int8_where_an_ffn_has_lost_all_units(tmp_path):
    pytest.importorskip("onnxruntime")
    model = one_layer()
    layer = model.bert.encoder.layer[0]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch, about tensors without elements
        for block, sizes in ((layer.intermediate, (32, 0)), (layer.output, (0, 32))):
            block.dense = nn.Linear(*sizes)
    batches = [inputs_for(model, 3, tokens) for tokens in (5, 9)]
    linears = sum(isinstance(module, nn.Linear) for module in model.modules())
    report = export(model, "onnx", tmp_path / "model.onnx", int8=True, batches=batches)
    assert report.int8.linears == linears - 2
    assert report.int8.error < 0.2


@with_onnx
def test_int8_with_a_channel_that_is_much_larger(tmp_path):
    """Real batches show it; without them the other channels are rounded with its step."""
    onnxruntime = pytest.importorskip("onnxruntime")
    model = tiny("vit", **ONE)
    block = model.vit.layers[0]
    with torch.no_grad():  # the model stays the same
        block.layernorm_after.weight[3] *= 100
        block.layernorm_after.bias[3] *= 100
        next(block.mlp.parameters())[:, 3] /= 100
    batches = [inputs_for(model, 8), inputs_for(model, 3)]
    held_out = {name: value.numpy() for name, value in inputs_for(model, 16).items()}
    with torch.no_grad():
        expected = model(**{name: torch.from_numpy(value) for name, value in held_out.items()}).logits.numpy()
    errors = []
    for given in (batches, None):
        report = export(
            model, "onnx", tmp_path / "model.onnx", sample=batches[0], batches=given, int8=True, overwrite=True
        )
        assert "the same label for" in str(report)
        (found,) = onnxruntime.InferenceSession(report.path).run(["logits"], held_out)
        errors.append(np.square(found - expected).mean())
    assert errors[0] < errors[1] / 4


def test_half_precision(tmp_path):
    model = bundled(one_layer().bfloat16(), {"ffn": FFNPart(num_features=8)})
    report = export(model, "torch", tmp_path / "model.pt2", sample=inputs_for(model, 2, 6))
    assert report.dtype == "bfloat16"
    batch = inputs_for(model, 3, 9)
    logits = torch.export.load(report.path).module()(**batch)["logits"]
    assert logits.dtype == torch.bfloat16
    with torch.no_grad():
        torch.testing.assert_close(logits, model(**batch).logits, rtol=0.05, atol=0.02)


class TwoWords(BertForSequenceClassification):
    """Takes texts of an even length alone, as soon as it is a program."""

    def forward(self, input_ids, **kwargs):
        if torch.compiler.is_exporting():
            pairs = input_ids.view(len(input_ids), -1, 2)
            input_ids = pairs.flatten(1)
        return super().forward(input_ids, **kwargs)


class Restless(BertForSequenceClassification):
    """Says something else at every call, what no program can."""

    def forward(self, *args, **kwargs):
        output = super().forward(*args, **kwargs)
        output.logits = output.logits + random.random()
        return output


def test_a_program_that_differs_is_not_written(tmp_path):
    model = Restless(one_layer().config).eval()
    target = tmp_path / "model.pt2"
    target.write_bytes(b"older")
    with pytest.raises(ValueError, match=r"logits differs from the model's by .* expected at most 1e-04"):
        export(model, "torch", target, overwrite=True)
    assert os.listdir(tmp_path) == ["model.pt2"]
    assert target.read_bytes() == b"older"
    with pytest.raises(UnsupportedError, match=r"program fails for inputs \{'input_ids': \[1, 1\]"):
        export(TwoWords(model.config).eval(), "torch", target, overwrite=True)
    assert os.listdir(tmp_path) == ["model.pt2"]
    export(one_layer(), "torch", target, overwrite=True)
    assert target.stat().st_size > 10_000


def test_wrong_arguments_are_told_together(tmp_path):
    model = one_layer()
    (tmp_path / "there.onnx").write_text("kept")
    with pytest.raises(ConfigError) as caught:
        export(model, "torch", tmp_path / "there.onnx", int8=True, opset=18, tolerance=0)
    assert len(caught.value.faults) == 5
    for text in ("ends in .pt2", "overwrite=True", "int8", "opset is 18", "tolerance is 0"):
        assert any(text in fault for fault in caught.value.faults)
    for fields, message in (
        ({"format": "tflite"}, "'tflite'; expected 'onnx' or 'torch'"),
        ({"path": tmp_path}, "a folder; expected the name of a file"),
        ({"batches": iter(())}, "batches is empty"),
        ({"sample": {"labels": torch.ones(2)}}, "sample holds labels; expected model inputs"),
        ({"sample": {"input_ids": [[1], [1, 2]]}}, "sample holds input_ids as a list of rows of 1 to 2 entries"),
        ({"sample": inputs_for(model), "batches": [{"input_ids": torch.ones(1, 2).long()}]}, "lack attention_mask"),
    ):
        with pytest.raises(ConfigError, match=message):
            export(model, **{"format": "torch", "path": tmp_path / "model.pt2", **fields})
    with pytest.raises(UnsupportedError, match="Linear is not a transformers PreTrainedModel"):
        export(nn.Linear(2, 2), "torch", tmp_path / "model.pt2")
    types = {"input_ids": torch.ones(2, 3).long(), "token_type_ids": torch.ones(2, 3)}
    with pytest.raises(UnsupportedError, match=r"could not be exported with inputs .*: RuntimeError: Expected"):
        export(model, "torch", tmp_path / "model.pt2", sample=types)
    assert os.listdir(tmp_path) == ["there.onnx"]
    assert (tmp_path / "there.onnx").read_text() == "kept"


def test_packages_that_are_not_installed_are_named(tmp_path, monkeypatch):
    monkeypatch.setattr(OnnxFormat, "packages", ("onnx", "no_such_runtime"))
    with pytest.raises(
        ImportError, match=r"needs no_such_runtime, which is not installed: pip install snnk-peft\[onnx"
    ):
        export(one_layer(), "onnx", tmp_path / "model.onnx")


def test_samples_keep_their_side_of_padding():
    ids, mask = torch.arange(24).view(2, 12), torch.ones(2, 12, dtype=torch.long)
    mask[0, :7], mask[1, 3:] = 0, 0
    sample = {"input_ids": ids, "attention_mask": mask, "scale": torch.ones(5)}
    axes = Axes(sample)
    assert axes.free == {"input_ids": {0, 1}, "attention_mask": {0, 1}, "scale": set()}
    for examples, tokens in ((1, 1), (3, 5), (2, 31)):
        found = axes.resized(sample, examples, tokens)
        assert found["input_ids"].shape == found["attention_mask"].shape == (examples, tokens)
        assert found["attention_mask"].any(-1).all()  # no text of padding alone
        steps = found["attention_mask"].diff(dim=-1)
        assert (steps[0] >= 0).all()
        assert (steps[1:2] <= 0).all()
    choices = {"input_ids": torch.ones(2, 4, 6, dtype=torch.long), "position_ids": torch.ones(1, 6, dtype=torch.long)}
    assert Axes(choices).free == {"input_ids": {0, 2}, "position_ids": set()}
    assert Axes({"pixel_values": torch.ones(2, 3, 8, 8)}).free == {"pixel_values": {0}}
    single = axes.resized(sample, 1, 1)
    assert Axes(single).traced(single)["input_ids"].shape == (2, 2)
