"""The benchmarks of pictures, at the smallest sizes: they run, and their figures follow from what they measured."""

from __future__ import annotations

import json
import statistics
from pathlib import Path

import pytest
from fresh_process import run_python

pytest.importorskip("rich", reason="pip install snnk-peft[recipes]")
BENCHMARKS = Path(__file__).resolve().parent.parent / "recipes/benchmarks"


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
