"""Benchmarks of pictures and processes at the smallest sizes: they run, and figures follow from what they measured."""

from __future__ import annotations

import json
import statistics
from pathlib import Path

import pytest
from fresh_process import run_python
from image_layouts import cifar10_python, draw
from transformers import ViTConfig, ViTForImageClassification, ViTImageProcessorPil

pytestmark = pytest.mark.slow

BENCHMARKS = Path(__file__).resolve().parents[2] / "recipes/benchmarks"


def test_step(tmp_path: Path) -> None:
    output = tmp_path / "metrics.json"
    given = ["--repetitions", "1", "--processes", "0", "--batch-size", "1", "--output", str(output)]
    done = run_python([str(BENCHMARKS / "vision_step.py"), *given])
    assert done.returncode == 0, done.stderr
    figures = json.loads(output.read_text())
    for name in ("vit_small", "vit_cifar"):
        seconds = figures[name]["seconds"]
        ratios = [ours / theirs for ours, theirs in zip(seconds["snnk"], seconds["lora"], strict=True)]
        assert figures[name]["step_time_ratio"] == pytest.approx(statistics.median(ratios))
    trained = {(row["model"], row["method"]): row["trainable parameters"] for row in figures["rows"]}
    # Two adapters a layer of 16 · d, LoRA's two pairs of 8 · 2d, and the classifier.
    assert trained["vit_cifar", "snnk"] == 6 * 2 * 16 * 192 + 1930
    assert trained["vit_cifar", "lora"] == 6 * 2 * 8 * 2 * 192 + 1930
    assert trained["vit_cifar", "snnk_pfeiffer"] == 6 * 32 * 192 + 1930
    assert trained["vit_cifar", "least"] == 192 + 1930
    assert trained["vit_small", "snnk"] == 12 * 2 * 16 * 384 + 3850


def test_loader(tmp_path: Path) -> None:
    output = tmp_path / "metrics.json"
    given = [
        "--repetitions",
        "1",
        "--batches",
        "2",
        "--batch-size",
        "1",
        "--workers",
        "0",
        "1",
        "--output",
        str(output),
    ]
    done = run_python([str(BENCHMARKS / "data_loading.py"), *given])
    assert done.returncode == 0, done.stderr
    rows = json.loads(output.read_text())["rows"]
    assert [(row["model"], row["workers"]) for row in rows] == [
        (name, workers) for name in ("vit_cifar", "vit_small") for workers in (0, 1)
    ]
    for row in rows:
        assert row["loader_over_step"] == pytest.approx(row["loader_per_second"] / row["step_per_second"])


def test_conversion(tmp_path: Path) -> None:
    sizes = {"hidden_size": 24, "num_attention_heads": 2, "intermediate_size": 288, "num_hidden_layers": 6}
    config = ViTConfig(**sizes, image_size=32, patch_size=8, num_labels=10)
    ViTForImageClassification(config).save_pretrained(tmp_path / "vit")
    ViTImageProcessorPil(size={"height": 32, "width": 32}).save_pretrained(tmp_path / "vit")
    data = cifar10_python(tmp_path / "data", draw(("train", "test"), 10, per_class=25))
    output = tmp_path / "metrics.json"
    given = ["--model", str(tmp_path / "vit"), "--data", str(data), "--repetitions", "1"]
    done = run_python([str(BENCHMARKS / "convert_models.py"), "cifar10", *given, "--output", str(output)])
    assert done.returncode == 0, done.stderr
    rows = {row["model"]: row for row in json.loads(output.read_text())["rows"]}
    # Three blocks of 288 units lose 224, each with a row, a column and a bias.
    saved = rows["teacher"]["parameters"] - rows["3 of 6 FFNs, 64 features"]["parameters"]
    assert saved == 3 * 224 * (2 * 24 + 1)


def test_processes(tmp_path: Path) -> None:
    """DDP's own buckets hold as many bytes as `cost` tells."""
    output = tmp_path / "metrics.json"
    given = ["--repetitions", "1", "--batch-size", "1", "--methods", "snnk", "--output", str(output)]
    done = run_python([str(BENCHMARKS / "data_parallel.py"), *given])
    assert done.returncode == 0, done.stderr
    (row,) = json.loads(output.read_text())["rows"]
    assert row["MB sent"] == row["MB by cost"] > 0
    assert row["efficiency"] == row["s alone"] / row["s together"]
