"""scikit-learn's digits: the task, and its recipes on a model that they make themselves.

Oracles: the pictures of scikit-learn, parameters counted by hand, real weights where they are at hand.
"""

from __future__ import annotations

import json
from pathlib import Path

import finetune
import numpy as np
import pytest
from data import TASKS
from recipe_world import RECIPES
from sklearn import datasets
from transformers import AutoModelForImageClassification, ViTImageProcessorPil

from snnk_cli.models import build_model, parameter_counts
from snnk_cli.settings import MethodSection
from snnk_peft.errors import ConfigError

CONFIGS = RECIPES / "configs/digits"


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run of scratch.yaml, as its first line says, of half as many epochs."""
    run = tmp_path_factory.mktemp("digits") / "scratch"
    changes = ["train.epochs=12", f"model.name_or_path={RECIPES / 'models/vit_digits'}"]
    assert finetune.main([str(CONFIGS / "scratch.yaml"), *changes, f"output.dir={run}"]) == 0
    return run


# --- the task ---------------------------------------------------------------------------------------------------------


def test_splits_are_all_pictures_once_and_every_class_alike() -> None:
    found, original = TASKS["digits"].load(), datasets.load_digits()
    everything = sorted(
        (int(label), np.asarray(images.picture(index)).tobytes())
        for images in found.values()
        for index, label in enumerate(images["label"])
    )
    # 255 sixteenths of a dark point's count; halves are rounded to even numbers, and there are none.
    expected = (original.images.astype(int) * 255 * 2 + 16) // 32
    assert everything == sorted(
        (int(label), pixels.astype(np.uint8).tobytes()) for label, pixels in zip(original.target, expected, strict=True)
    )
    counts = {split: np.bincount(images["label"]) for split, images in found.items()}
    assert np.abs(counts["train"] - 2 * counts["test"]).max() <= 2
    assert {split: len(images) for split, images in found.items()} == {"train": 1201, "test": 596}


def test_the_split_is_always_the_same_and_parts_of_it_are_parts() -> None:
    task = TASKS["digits"]
    whole = task.load()
    assert task.load(splits=["test"])["test"].fingerprint() == whole["test"].fingerprint()
    assert whole["test"].name(0) == "scikit-learn's digits, image 20"  # the third 0 there
    part = task.load(max_samples={"train": 50}, seed=3)["train"]
    names = {whole["train"].name(index) for index in range(len(whole["train"]))}
    assert len({part.name(index) for index in range(50)} & names) == 50


def test_a_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="the digits come with scikit-learn: leave it out"):
        TASKS["digits"].load(tmp_path)


# --- the recipes ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_tiny_model_learns_the_digits_without_files(scratch: Path) -> None:
    report = json.loads((scratch / "metrics.json").read_text())
    assert report["score"] > 0.6  # chance is a tenth
    assert report["examples"] == {"train": 1201, "test": 596}


@pytest.mark.parametrize("name", ["snnk", "lora"])
def test_a_model_folder_is_adapted(name: str, scratch: Path, tmp_path: Path) -> None:
    changes = [f"model.name_or_path={scratch / 'model'}", "train.epochs=1", f"method.name={name}"]
    changes += [f"output.dir={tmp_path / 'run'}", "output.tensorboard=false"]
    assert finetune.main([str(CONFIGS / "adapter.yaml"), *changes]) == 0
    report = json.loads((tmp_path / "run/metrics.json").read_text())
    # The head of the model that is adapted has these ten classes, and stays.
    assert report["score"] > 0.5
    # It is trained by every method.
    assert report["trainable_parameters"] - report["trainable_parameters_without_classifier"] == 10 * 48 + 10


def test_a_new_pooler_is_not_counted_as_classifier(scratch: Path) -> None:
    model = AutoModelForImageClassification.from_pretrained(scratch / "model")
    method = MethodSection(pooler={"component": "cos", "num_features": 12})
    counts = parameter_counts(build_model(model, method, 0, None))
    assert counts["trainable_without_classifier"] == 48 * 12 + 48
    assert counts["trainable"] == 48 * 12 + 48 + 10 * 48 + 10


def test_real_weights_are_adapted(tmp_path: Path, shared_dir: Path) -> None:
    """The lines that the study vision tells, on a ViT that was trained on MNIST."""
    encoder, folder = shared_dir / "weights/vit_mnist", tmp_path / "vit"
    if not encoder.is_dir():
        pytest.skip(f"no weights in {encoder}")
    AutoModelForImageClassification.from_pretrained(encoder, ignore_mismatched_sizes=True).save_pretrained(folder)
    size = {"height": 28, "width": 28}
    ViTImageProcessorPil(size=size, image_mean=[0.1307], image_std=[0.3081]).save_pretrained(folder)
    run, changes = tmp_path / "run", ["train.epochs=2", "output.tensorboard=false"]
    given = [str(CONFIGS / "adapter.yaml"), f"model.name_or_path={folder}", f"output.dir={run}", *changes]
    assert finetune.main(given) == 0
    # Two epochs from random weights give about a fifth.
    assert json.loads((run / "metrics.json").read_text())["score"] > 0.6
