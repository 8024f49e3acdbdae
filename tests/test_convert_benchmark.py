"""benchmarks/convert_sst2.py: every kind of conversion of one model in one run, on a random BERT and stand-in data."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import BertConfig, BertForSequenceClassification

from tests.fresh_process import run_python
from tests.glue_files import write_task
from tests.recipe_world import write_world


def test_every_conversion_is_made_scored_and_timed(tmp_path: Path):
    for package in ("accelerate", "datasets", "rich"):
        pytest.importorskip(package, reason="pip install snnk-peft[recipes]")
    write_world(tmp_path)
    write_task(tmp_path / "glue", "sst2", n_train=300, n_dev=20)
    torch.manual_seed(0)
    BertForSequenceClassification(BertConfig.from_pretrained(tmp_path / "bert")).save_pretrained(tmp_path / "bert")
    output = tmp_path / "metrics.json"
    given = ["--model", str(tmp_path / "bert"), "--data", str(tmp_path / "glue"), "--repetitions", "1", "--seeds", "2"]
    given += ["--sentences", "200", "--features", "4", "--steps", "2", "--units", "4", "6", "--budgets", "1.1x"]
    given += ["--shapes", "4x16", "2x40", "--of", "macs", "--output", str(output)]
    done = run_python([str(Path(__file__).parent.parent / "recipes" / "benchmarks" / "convert_sst2.py"), *given])
    assert done.returncode == 0, done.stderr
    found = json.loads(output.read_text())
    names = ["1 of 2 FFNs, 4 features", "2 of 2 FFNs, 6 features"]
    names += [f"attention, 4 features, {rest}" for rest in ("closed form", "2 steps", "and 2 FFNs, 6, 2 steps")]
    assert [row["model"] for row in found["rows"]] == ["teacher", *names, "plan 1.1x"]
    for row in found["rows"]:
        assert row["least"] <= row["accuracy"] <= row["greatest"]
        assert min(row["speed-up"], row["at 2x40 tokens"], row["at 2x40, padded"]) > 0
    slots = {name: len(report["slots"]) for name, report in found["calibration"].items()}
    assert [slots[f"{name}, seed 1"] for name in names] == [1, 2, 2, 2, 4]
    first, second = (found["calibration"][f"{names[1]}, seed {seed}"]["slots"][0]["error_after"] for seed in (0, 1))
    assert first != second  # other sentences
    assert found["calibration"][f"{names[1]}, seed 0"]["settings"]["steps"] == 200
    parameters = {row["model"]: row["parameters"] for row in found["rows"]}
    assert parameters["plan 1.1x"] < parameters["teacher"]
    assert len(found["plans"]) == 2
