"""The GLUE page lists every seed and marks those that stayed on the plateau; the README names every method that ran."""

# ruff: noqa: E402

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

for package in ("datasets", "matplotlib", "rich", "yaml"):
    pytest.importorskip(package, reason="pip install snnk-peft[recipes]")

sys.path.append(str(Path(__file__).resolve().parent.parent / "recipes"))

import sweep_glue
import table_glue
import table_results


def store(root: Path, scores: dict[tuple[str, str], list[float]]) -> None:
    for (task, method), values in scores.items():
        for seed, score in enumerate(values):
            file = root / "model_cards/glue" / task / method / f"seed{seed}.json"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(json.dumps({
                "score": score,
                "seconds_per_epoch": 1.0,
                "trainable_parameters": 7,
                "examples": {"train": 10},
                "device": "cpu",
                "config": {"model": {"name_or_path": "minilm"}},
                "environment": {"torch_threads": 1},
            }))  # fmt: skip


def test_every_seed_is_listed_and_plateaus_are_marked(tmp_path: Path) -> None:
    store(tmp_path, {("stsb", "lora_r8"): [0.8, 0.07, -0.03, 0.4], ("cola", "lora_r8"): [0.0], ("stsb", "mine"): [0.5]})
    page = table_glue.render(table_glue.read_table(tmp_path / "model_cards/glue"))
    lines = page.split("Every seed.")[1].splitlines()
    assert any(line.startswith("| method |") for line in lines)
    # The best CoLA run is no better than a constant answer, and has stayed there like any other.
    assert "| lora_r8 | 0.0* | 80.0, 7.0*, -3.0*, 40.0 |" in lines
    assert "| mine | – | 50.0 |" in lines


def test_the_readme_names_every_method_that_ran(tmp_path: Path) -> None:
    store(tmp_path, {("stsb", "lora_r8"): [0.8, 0.0], ("stsb", "linear_probe"): [0.1], ("cola", "lora_r8"): [0.2]})
    store(tmp_path, {("stsb", "unheard_of"): [0.6]})
    assert table_results.glue(tmp_path) == (
        "1 tasks (stsb): LoRA 40.0 (1 of 2 runs on a plateau), linear probe 10.0 (1 of 1 runs on a plateau), "
        "unheard_of 60.0"
    )


def test_every_method_of_the_sweep_has_a_name() -> None:
    assert table_glue.NAMES.keys() == sweep_glue.METHODS.keys()
