"""recipes/finetune.py on a device: mixed precision, and runs that are continued on another device."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import finetune
import pytest
import torch
from safetensors.torch import load_file

from tests.recipe_world import last_weights, reset_accelerate, write_settings, write_world

pytestmark = pytest.mark.gpu
SETTING = {"cpu": "cpu", "cuda": "auto"}  # of train.device


@pytest.fixture(autouse=True)
def _fresh_accelerate_state() -> Iterator[None]:
    yield
    reset_accelerate()


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model without dropout: random numbers differ from one kind of device to another."""
    folder = write_world(tmp_path_factory.mktemp("world"))
    file = folder / "bert/config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps({**config, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}))
    return folder


def train(world: Path, out: Path, device: str, *more: str) -> int:
    reset_accelerate()
    file = world / "run.yaml"
    write_settings(file, str(world / "bert"), str(world / "glue"), str(out), method="snnk")
    return finetune.main([str(file), f"train.device={SETTING[device]}", f"output.dir={out}", *more])


@pytest.mark.parametrize("turned", [False, True], ids=["from the processor", "to the processor"])
def test_a_run_is_continued_on_another_device(turned, world, device, tmp_path, capsys):
    first, second = ("cpu", device)[:: -1 if turned else 1]
    assert train(world, tmp_path / "whole", first, "train.keep_checkpoints=9") == 0
    shutil.copytree(tmp_path / "whole", tmp_path / "moved")
    capsys.readouterr()
    again = ["--resume", "--checkpoint", "step-0000004", "train.keep_checkpoints=9"]
    assert train(world, tmp_path / "moved", second, *again) == 0
    assert ("note: saved on" in capsys.readouterr().out) == (first != second)
    whole, moved = last_weights(tmp_path / "whole"), last_weights(tmp_path / "moved")
    before = load_file(tmp_path / "whole/checkpoints/step-0000004/model.safetensors")
    assert any(not torch.equal(before[name], value) for name, value in whole.items()), "nothing was trained since"
    for name, value in whole.items():
        torch.testing.assert_close(moved[name], value, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_mixed_precision_and_its_scaler(precision, world, device, tmp_path):
    if precision == "fp16" and device == "cpu":
        pytest.skip("train.mixed_precision=fp16 needs a GPU")
    changes = [f"train.mixed_precision={precision}", "train.keep_checkpoints=9"]
    assert train(world, tmp_path / "run", device, *changes) == 0
    assert train(world, tmp_path / "run", device, "--resume", "--checkpoint", "step-0000004", *changes) == 0
    report = json.loads((tmp_path / "run/metrics.json").read_text())
    assert report["device"].startswith(device)
    assert 0 <= report["score"] <= 1
