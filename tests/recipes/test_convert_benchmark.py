"""benchmarks/convert_models.py, sst2 and task: conversions of a random BERT in one run, on stand-in data."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from data import TASKS
from scipy.stats import pearsonr, spearmanr
from transformers import AutoTokenizer, BertConfig, BertForSequenceClassification

from tests.fresh_process import run_python
from tests.glue_files import write_task
from tests.recipe_world import write_world

pytestmark = pytest.mark.slow

BENCHMARKS = Path(__file__).parents[2] / "recipes" / "benchmarks"


def test_every_conversion_is_made_scored_and_timed(tmp_path: Path):
    write_world(tmp_path)
    write_task(tmp_path / "glue", "sst2", n_train=300, n_dev=20)
    torch.manual_seed(0)
    BertForSequenceClassification(BertConfig.from_pretrained(tmp_path / "bert")).save_pretrained(tmp_path / "bert")
    output = tmp_path / "metrics.json"
    given = ["--model", str(tmp_path / "bert"), "--data", str(tmp_path / "glue"), "--repetitions", "1", "--seeds", "2"]
    given += ["--sentences", "200", "--features", "4", "--steps", "2", "--units", "4", "6", "--budgets", "1.1x"]
    given += ["--shapes", "4x16", "2x40", "--of", "macs", "--output", str(output)]
    done = run_python([str(BENCHMARKS / "convert_models.py"), "sst2", *given])
    assert done.returncode == 0, done.stderr
    found = json.loads(output.read_text())
    names = ["1 of 2 FFNs, 4 features", "2 of 2 FFNs, 6 features"]
    names += [f"attention, 4 features, {rest}" for rest in ("closed form", "2 steps", "and 2 FFNs, 6, 2 steps")]
    names += [f"attention of 1 of 2, 4 features, {rest}" for rest in ("closed form", "and 2 FFNs, 6, 2 steps")]
    assert [row["model"] for row in found["rows"]] == ["teacher", *names, "plan 1.1x"]
    for row in found["rows"]:
        assert row["least"] <= row["accuracy"] <= row["greatest"]
        assert min(row["speed-up"], row["at 2x40 tokens"], row["at 2x40, padded"]) > 0
    slots = {name: len(report["slots"]) for name, report in found["calibration"].items()}
    assert [slots[f"{name}, seed 1"] for name in names] == [1, 2, 2, 2, 4, 1, 3]
    first, second = (found["calibration"][f"{names[1]}, seed {seed}"]["slots"][0]["error_after"] for seed in (0, 1))
    assert first != second  # other sentences
    assert found["calibration"][f"{names[1]}, seed 0"]["settings"]["steps"] == 200
    parameters = {row["model"]: row["parameters"] for row in found["rows"]}
    assert parameters["plan 1.1x"] < parameters["teacher"]
    assert len(found["plans"]) == 2


def test_any_text_task_is_scored_by_its_own_metric(tmp_path: Path):
    write_world(tmp_path)
    write_task(tmp_path / "glue", "stsb", n_train=120, n_dev=30)
    config = BertConfig.from_pretrained(tmp_path / "bert", num_labels=1)
    torch.manual_seed(0)
    teacher = BertForSequenceClassification(config).eval()
    teacher.save_pretrained(tmp_path / "bert")
    output = tmp_path / "metrics.json"
    given = ["--task", "stsb", "--model", str(tmp_path / "bert"), "--data", str(tmp_path / "glue"), "--sentences", "80"]
    given += [
        "--batch-size",
        "8",
        "--only",
        "2 of 2 FFNs",
        "--units",
        "4",
        "6",
        "--shapes",
        "4x16",
        "--repetitions",
        "1",
    ]
    done = run_python([str(BENCHMARKS / "convert_models.py"), "task", *given, "--output", str(output)])
    assert done.returncode == 0, done.stderr
    rows = json.loads(output.read_text())["rows"]
    assert [row["model"] for row in rows] == ["teacher", "2 of 2 FFNs, 6 features"]

    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "bert")
    dev = TASKS["stsb"].load(tmp_path / "glue")["validation"]
    pairs = zip(dev["sentence1"], dev["sentence2"], strict=True)
    with torch.no_grad():
        predicted = [float(teacher(**tokenizer(*pair, return_tensors="pt")).logits) for pair in pairs]
    expected = [measure(predicted, list(dev["label"])).statistic for measure in (pearsonr, spearmanr)]
    assert rows[0]["score"] == pytest.approx(sum(expected) / 2, abs=1e-3)
