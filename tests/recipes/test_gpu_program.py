"""`make gpu` as far as a machine without a GPU can: a few of its tests, and its programs at the smallest sizes."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import gpu
import numpy as np
import pytest
import torch
from lib.gpu_run import perform
from lib.gpu_steps import STEPS, Plan, Step, write_pictures
from PIL import Image
from recipe_world import RECIPES

ON_CPU = ["--device", "cpu", "--small", "--output"]


def report_of(folder: Path) -> dict:
    return json.loads((folder / "metrics.json").read_text())


@pytest.mark.slow
def test_programs_run_on_a_processor(tmp_path, minilm_dir, capfd):
    wanted = ["tests", "kernels", "adapter_step", "adapter_step_llama", "attention", "pairs", "text", "images"]
    # The limits of the steps are for a card.
    assert gpu.main([*ON_CPU, str(tmp_path), "--limit", "300", "--steps", *wanted]) == 0, capfd.readouterr().out
    report = report_of(tmp_path)
    assert report["card"]["name"] == "cpu"
    assert report["card"]["torch"] == torch.__version__
    figures = {entry["step"]: entry["figures"] for entry in report["steps"]}
    assert list(figures) == wanted
    assert figures["tests"]["tests"] >= 15
    kernels = [
        file for file in (RECIPES.parent / "tests/gpu").glob("*.py") if 'importorskip("triton"' in file.read_text()
    ]
    assert figures["tests"]["skipped"] == (len(kernels) if find_spec("triton") is None else 0)
    assert figures["text"]["device"].startswith("cpu")
    assert figures["text"]["examples"]["train"] == 16
    assert figures["images"]["examples"]["train"] == 20
    assert [row["length"] for row in figures["attention"]["causal"]] == [128]
    kinds = {row["kind"] for row in figures["kernels"]["rows"]}
    assert kinds == {"decode", "forward", "causal", "training", "training, causal"}
    assert all({"layer_ms", "flash_ms"} <= row.keys() for row in figures["kernels"]["rows"] if row["kind"] != "decode")
    assert figures["kernels"]["left_out"] == []
    assert (tmp_path / "attention_on_gpu/attention_on_gpu.png").stat().st_size > 0
    for name, model in (("adapter_step", "minilm"), ("adapter_step_llama", "llama")):
        assert {row["method"] for row in figures[name]["rows"]} == {"snnk", "lora"}
        assert figures[name]["model"] == model
    names = ["softmax", "softmax, weights formed", "posrf-mm", "saderf-orf"]
    assert [row["pair"] for row in figures["pairs"]["pairs"]] == names
    assert figures["pairs"]["pairs"][1]["memory_of_softmax"] > 2  # 2 heads · 4000² weights, formed several times
    assert figures["pairs"]["pairs_on"] == {"device": "cpu", "batch_size": 1}
    commands = [entry["command"] for entry in report["steps"]]
    assert commands[-2].startswith("python -m accelerate.commands.launch --config_file recipes/accelerate/cpu.yaml ")
    assert f"output.dir={tmp_path.name}/text" in commands[-2]
    assert not [command for command in commands if str(tmp_path) in command or str(RECIPES) in command]


def test_one_failure_does_not_hide_the_rest(tmp_path, capfd):
    """No step can be done in so short a time."""
    assert gpu.main([*ON_CPU, str(tmp_path), "--steps", "attention", "adapter_step", "--limit", "0.2"]) == 1
    entries = report_of(tmp_path)["steps"]
    assert [entry["status"] for entry in entries] == ["failed", "failed"]
    assert all("took longer than its limit of 0 s" in entry["reason"] for entry in entries)
    assert "adapter_step" in capfd.readouterr().out


def test_a_program_that_fails_says_why(tmp_path, monkeypatch):
    plan = Plan("cpu", True, tmp_path)
    broken = Step(60, lambda plan: ["-c", "print('error: no such thing'); print('bye'); exit(3)"], lambda plan: {})
    monkeypatch.setitem(STEPS, "broken", broken)
    entry = perform("broken", plan, 60)
    assert entry["status"] == "failed"
    assert entry["reason"].startswith("exit code 3; ")
    assert entry["reason"].endswith("says: error: no such thing")


def test_a_run_on_another_device_is_a_failure(tmp_path):
    (tmp_path / "text").mkdir()
    (tmp_path / "text/metrics.json").write_text(json.dumps({"device": "cpu"}))
    with pytest.raises(ValueError, match="it ran on cpu; expected cuda"):
        STEPS["text"].figures(Plan("cuda", False, tmp_path))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU, and `make gpu` would use it")
def test_without_a_gpu_there_is_a_message(tmp_path, capsys):
    assert gpu.main(["--output", str(tmp_path / "out")]) == 0
    assert capsys.readouterr().out.startswith(f"skipped: torch {torch.__version__} ")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_every_file_that_a_step_names_is_there(device, tmp_path):
    plan = Plan(device, False, tmp_path)
    named = [Path(word) for step in STEPS.values() for word in step.command(plan) if word.endswith((".py", ".yaml"))]
    assert {file.parent.name for file in named} >= {"accelerate", "configs", "benchmarks"}
    assert not [file for file in named if not file.is_file()]


def test_limits_fit_into_ten_minutes():
    assert sum(step.limit for step in STEPS.values() if step.cards == 1) <= 600


def test_pictures_of_two_classes_differ(tmp_path):
    """What is trained on can be learned: the mean colours of classes lie apart."""
    write_pictures(tmp_path, 2)
    folders = sorted((tmp_path / "train").iterdir())
    assert len(folders) == 10
    colours = [[np.asarray(Image.open(file)).mean((0, 1)) for file in folder.iterdir()] for folder in folders]
    centres = torch.tensor(np.mean(colours, 1))
    assert torch.cdist(centres, centres).fill_diagonal_(torch.inf).min() > 5
