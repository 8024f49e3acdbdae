"""The whole model trained with SNNK layers in it; the study uptraining and its page.

Oracles: numbers counted by hand, gradients, the weights of the pretrained model, the bundle itself.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import finetune
import pytest
import torch
from data_files import write_task
from fresh_process import run_python
from papers import study
from papers.lib.study import load
from papers.pages import uptraining as uptraining_page
from recipe_world import RECIPES, write_world
from safetensors.torch import load_file
from transformers import AutoModelForSequenceClassification, AutoTokenizer, BertConfig, BertForSequenceClassification

from snnk_cli.config import load_config
from snnk_cli.models import build_model, train_in_use
from snnk_cli.settings import FinetuneConfig, MethodSection
from snnk_peft import AdapterPart, FFNPart, PoolerPart, SNNKConfig, bundle, get_snnk_model
from snnk_peft.cost import estimate_cost
from snnk_peft.errors import ConfigError
from tests.stored_runs import put_runs, report

WIDTH, HIDDEN = 16, 48
SIZES = {"vocab_size": 60, "hidden_size": WIDTH, "intermediate_size": HIDDEN, "num_attention_heads": 2}
TINY = BertConfig(num_hidden_layers=6, **SIZES)


def tiny() -> BertForSequenceClassification:
    torch.manual_seed(0)
    return BertForSequenceClassification(TINY)


def numbers(model: torch.nn.Module, trained: bool = False) -> int:
    return sum(value.numel() for value in model.parameters() if value.requires_grad or not trained)


# --- what is trained --------------------------------------------------------------------------------------------------


def test_what_is_in_use_is_trained_and_nothing_else() -> None:
    """Everything trained has a gradient; everything frozen may become NaN without any effect."""
    parts = {"ffn": FFNPart(num_features=4, layers="top-2"), "pooler": PoolerPart(num_features=4)}
    model = get_snnk_model(tiny(), SNNKConfig(**parts, adapter=AdapterPart(num_features=4), task_type="SEQ_CLS"))
    train_in_use(model)
    tokens = {"input_ids": torch.arange(12).reshape(2, 6), "labels": torch.tensor([0, 1])}
    model.eval()(**tokens).loss.backward()
    assert [name for name, value in model.named_parameters() if value.requires_grad != (value.grad is not None)] == []
    assert any(".attention." in name for name, value in model.named_parameters() if value.requires_grad)
    before, frozen = model(**tokens).logits, [value for value in model.parameters() if not value.requires_grad]
    assert sum(value.numel() for value in frozen) == 2 * (WIDTH + 1) * HIDDEN + (WIDTH + 1) * WIDTH + (WIDTH + 1) * 2
    with torch.no_grad():
        for value in frozen:
            value.fill_(torch.nan)
    assert torch.equal(model(**tokens).logits, before)


METHODS = load("uptraining").tasks["mrpc"].methods


@pytest.mark.parametrize("name", METHODS)
def test_every_method_trains_as_many_numbers_as_it_says(name: str) -> None:
    settings = METHODS[name]
    method = load_config(FinetuneConfig, RECIPES / "papers/configs/uptraining.yaml", settings).method
    base = tiny()
    full, width = numbers(base), WIDTH
    model = build_model(base, method, seed=0, calibration=None)
    head = (width + 1) * 2
    if name.startswith("top"):
        layers, features = int(name[3]), int(name.split("_")[1][1:])
        expected, folded = uptraining_page.honest(layers, features, (full, width, HIDDEN))
        assert (expected, name.endswith(("fitted", "landmarks"))) == (
            full - layers * ((width + 1) * HIDDEN - (features + 1) * HIDDEN),
            method.calibrate,
        )
        if "landmarks" not in name:
            small = bundle(model)
            drawn = sum(value.numel() for key, value in small.state_dict().items() if key.endswith(".projection.W"))
            assert drawn == layers * features * width or drawn == 0
            assert numbers(small) + layers * features * width == folded
    else:
        expected = {
            "full": full,
            "pooler_frozen": head,
            "pooler_dense": head + (width + 1) * width,
            "pooler_cos": head + (32 + 1) * width,
            "pooler_cos_nystrom": head + (32 + 1) * width,
            "adapter_cos": head + 12 * (16 + 1) * width,
            "adapter_relu": head + 12 * (16 + 1) * width,
        }.get(name)
    if expected is not None:
        assert numbers(model, trained=True) == expected


def test_settings_that_lose_the_trained_weights_are_refused() -> None:
    given = ["task=rte", "output.dir=x", "method.ffn={num_features: 8}", "method.train_base=true"]
    with pytest.raises(ConfigError, match=r"output.bundle is false with method.train_base"):
        load_config(FinetuneConfig, None, [*given, "output.bundle=false"])
    assert load_config(FinetuneConfig, None, [*given, "output.bundle=false", "output.save_model=false"])
    with pytest.raises(ConfigError, match="train_base is true; method lora itself decides"):
        load_config(FinetuneConfig, None, [*given, "method.name=lora"])


def test_a_run_leaves_the_whole_model_as_a_bundle_and_says_what_it_costs(tmp_path: Path) -> None:
    world, out = write_world(tmp_path), tmp_path / "run"
    given = ["task=rte", f"data.dir={world / 'glue'}", f"model.name_or_path={world / 'bert'}", f"output.dir={out}"]
    changes = ["method.ffn.layers=top-2", "train.batch_size=8", "train.learning_rate=0.01", "train.device=cpu"]
    assert finetune.main([str(RECIPES / "papers/configs/uptraining.yaml"), *given, *changes]) == 0
    assert (out / "bundle").is_dir()
    assert not (out / "adapter").exists()
    report = json.loads((out / "metrics.json").read_text())
    before, after = (load_file(folder / "model.safetensors") for folder in (world / "bert", out / "bundle"))
    query = "encoder.layer.0.attention.self.query.weight"
    assert not torch.equal(before[query], after[f"bert.{query}"])
    small = AutoModelForSequenceClassification.from_pretrained(out / "bundle")
    assert report["cost"]["bundle"]["parameters"] == numbers(small)
    sizes = (numbers(AutoModelForSequenceClassification.from_pretrained(world / "bert")), 32, 64)
    trained, folded = uptraining_page.honest(2, 8, sizes)
    assert report["trainable_parameters"] == trained
    # Of the inputs' whitening stays one number for each row.
    assert uptraining_page.stored_numbers(report["cost"]) == folded + 2 * 8
    # Products of a layer with one text of n tokens, by hand; attention has n² scores and n² weighted sums per width.
    n, head = 128, 32 * 32 + 32 * 2
    layer = 4 * n * 32 * 32 + 2 * n * n * 32
    assert report["cost"]["full"]["macs"] == 2 * (layer + 2 * n * 32 * 64) + head
    assert report["cost"]["bundle"]["macs"] == 2 * (layer + 2 * n * 32 * 8) + head
    # The bundle scores what the run said: the checkpoint that was scored is the one that was folded.
    rows = [line.split("\t") for line in (world / "glue/RTE/dev.tsv").read_text().splitlines()[1:]]
    tokens = AutoTokenizer.from_pretrained(out / "bundle")
    read = tokens([row[1] for row in rows], [row[2] for row in rows], padding=True, return_tensors="pt")
    with torch.no_grad():
        answers = small.eval()(**read).logits.argmax(1).tolist()
    right = [small.config.id2label[answer] == row[3] for answer, row in zip(answers, rows, strict=True)]
    assert sum(right) / len(rows) == pytest.approx(report["score"])


# --- sweep and page ---------------------------------------------------------------------------------------------------


def store(root: Path, task: str, method: str, scores: list[float], cost: dict[str, Any] | None = None) -> None:
    sizes: dict[str, Any] = {"trainable_parameters": 7000, "examples": {"train": 10, "dev": 5}}
    sizes |= {"epochs": 1.0, "processor_seconds_per_epoch": 3.0, **({"cost": cost} if cost else {})}
    metrics = [{uptraining_page.METRICS[task]: score} for score in scores]
    put_runs(root, task, method, *(report(metrics=each, seed=seed, **sizes) for seed, each in enumerate(metrics)))


def test_the_page_compares_runs_of_one_seed(tmp_path: Path) -> None:
    page = tmp_path / "page"
    cost = {"full": {"parameters": 9, "buffers": 100, "macs": 9}, "bundle": {
        "parameters": 5000, "buffers": 600, "macs": 3_000_000
    }}  # fmt: skip
    store(page, "rte", "full", [0.50, 0.60])
    store(page, "rte", "top6_m8_paper", [0.45, 0.51, 0.99], cost)  # the third has no counterpart
    store(page, "rte", "top6_m8_fitted", [0.52, 0.62], cost)
    store(page, "rte", "top1_m8_fitted", [0.50], cost)
    store(page, "cola", "full", [0.30, 0.30])
    store(page, "cola", "top6_m8_paper", [0.20, 0.20], cost)
    store(page, "cola", "top6_m8_fitted", [0.30, 0.34], cost)
    assert study.main(["page", "uptraining", "--runs", str(tmp_path / "none"), "--out", str(page)]) == 0
    lines = (page / "README.md").read_text().splitlines()
    assert "| full | 55.0 ± 5.0 (2) | 30.0 ± 0.0 (2) | 7.0 | – | – | 3 |" in lines
    assert "| top1_m8_fitted | 50.0 | – | 7.0 | 5.5 | 3 | 3 |" in lines
    # RTE: −5 and −9, so −7 ± 2; CoLA: −10 ± 0; the mean −8.5 ± ½·2. The fitted start: +2 ± 0 and +2 ± 2.
    assert "| 6 | +2.0 ± 1.0 | -8.5 ± 1.0 |" in lines
    assert "| upper FFNs replaced | m8_fitted | m8_paper |" in lines
    assert "With 6 replaced, `m8_fitted` is best (+2.0) and `m8_paper` worst (-8.5)." in lines
    assert "| the same answer to all | 52.7 | 0.0 | – | – | – | – |" in lines
    assert (page / "layers.png").stat().st_size > 10_000


def test_sizes_of_bert_base_are_those_of_the_model() -> None:
    """Table 6's models, built on the meta device."""
    config = SNNKConfig(ffn=FFNPart(component="relu", projection="gaussian", num_features=8, layers="top-6"))
    report = estimate_cost(BertConfig(), config, task="sequence-classification", num_labels=2, batch_size=1, length=8)
    full, folded = report.row("full"), report.row("bundle")
    assert uptraining_page.honest(0) == (full.parameters, full.parameters)
    # Ours whitens its inputs, of which one number for each row stays.
    assert uptraining_page.honest(6)[1] + 6 * 8 == folded.parameters + folded.buffers - full.buffers
    # While it is patched it also holds what is replaced, and the head that PEFT copied.
    replaced = 6 * 769 * 3072 + 769 * 2
    assert uptraining_page.honest(6)[0] == report.row("snnk").parameters - replaced


def test_from_runs_to_the_page(tmp_path: Path) -> None:
    world, out = write_world(tmp_path), tmp_path / "runs"
    write_task(world / "glue", "mrpc", n_train=24, n_dev=8)
    command = [
        *(
            *(str(RECIPES / "papers/study.py"), "run", "uptraining"),
            f"data.dir={world / 'glue'}",
            f"model.name_or_path={world / 'bert'}",
        ),
        *("train.device=cpu", "output.tensorboard=false", "--out", str(out), "--tasks", "mrpc"),
        *("--methods", "top1_m8_fitted"),
    ]
    done = run_python(command)
    assert done.returncode == 0, done.stderr[-3000:]
    assert study.main(["page", "uptraining", "--runs", str(out), "--out", str(tmp_path / "page")]) == 0
    report = json.loads((out / "mrpc/top1_m8_fitted/seed0/metrics.json").read_text())
    page = (tmp_path / "page/README.md").read_text()
    score, trained = f"{100 * report['metrics']['f1']:.1f}", f"{report['trainable_parameters'] / 1e3:,.1f}"
    assert f"| top1_m8_fitted | {score} | {trained} | " in page
    assert str(world / "glue") not in page
    assert "1 runs, 1 finished" in run_python(command).stdout


def test_full_training_is_what_train_base_is_without_parts() -> None:
    assert numbers(build_model(tiny(), MethodSection(name="full"), 0, None), trained=True) == numbers(tiny())
