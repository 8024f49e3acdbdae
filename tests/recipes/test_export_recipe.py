"""recipes/export.py: a folder becomes a file, scored beside its model."""

from __future__ import annotations

import json
from pathlib import Path

import export
import pytest
import torch
from recipe_world import write_world
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from snnk_peft import FFNPart, SNNKConfig, bundle, get_snnk_model


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A bundle that answers RTE at random, and its tokenizer."""
    write_world(tmp_path)
    names = {0: "entailment", 1: "not_entailment"}
    base = AutoModelForSequenceClassification.from_pretrained(tmp_path / "bert", id2label=names)
    parts = SNNKConfig(ffn=FFNPart(num_features=8, layers=[1]), modules_to_save=[])
    bundle(get_snnk_model(base, parts)).save_pretrained(tmp_path / "bundle")
    AutoTokenizer.from_pretrained(tmp_path / "bert").save_pretrained(tmp_path / "bundle")
    return tmp_path / "bundle"


def test_a_folder_becomes_a_file_with_the_same_scores(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = f"data.dir={folder.parent / 'glue'}"
    assert export.main([str(folder), "--task", "rte", data, "--format", "torch", "batch_size=4"]) == 0
    result = json.loads((folder / "model.metrics.json").read_text())
    assert result["files"] == {"model.pt2": (folder / "model.pt2").stat().st_size}
    assert max(entry["error"] for entry in result["parity"]) < 1e-5
    assert len(result["parity"]) >= 5  # the shapes of the dev set's three batches are among them
    scores = result["scores"]
    assert scores["model"]["accuracy"] == scores["model.pt2"]["accuracy"]
    printed = capsys.readouterr().out
    assert "any size on input_ids[0, 1]" in printed
    assert "accuracy" in printed
    words = torch.ones(1, 3, dtype=torch.long)
    program = torch.export.load(folder / "model.pt2").module()
    inputs = dict.fromkeys(result["inputs"], words)
    assert program(**inputs)["logits"].shape == (1, 2)

    for arguments, message in (
        ([str(folder), "--format", "torch"], "replace it with --overwrite"),
        ([str(folder), "--format", "torch", "--overwrite", "--int8"], "int8 Linears are written for ONNX Runtime"),
        ([str(folder.parent / "glue")], "has no config.json"),
        ([str(folder / "nowhere")], "does not exist"),
        ([str(folder), "--task", "rtee"], "did you mean 'rte'"),
    ):
        assert export.main(arguments) == 2
        assert message in capsys.readouterr().err
    assert not list(folder.glob(".model*"))
