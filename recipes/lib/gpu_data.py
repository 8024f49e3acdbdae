"""Small data that need no download, on which a GPU shows whether training works: sentences, pictures and a model."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np

SIDE = 32  # pixels of a picture


def write_texts(folder: Path, rows: int) -> None:
    """train.csv and eval.csv with the columns text and label: docstrings of Python's standard library, by area.

    Args:
        folder: is there.
        rows: of train.csv at most; eval.csv has a quarter of that at most.
    """
    from snnk_peft.tasks.stdlib_docs import AREAS, load_sentences

    for name, sentences, most in zip(("train", "eval"), load_sentences(), (rows, max(1, rows // 4)), strict=True):
        with (folder / f"{name}.csv").open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow(["text", "label"])
            writer.writerows((sentence.text, AREAS[sentence.area]) for sentence in sentences[:most])


def write_pictures(folder: Path, per_class: int) -> None:
    """{train,test}/CLASS/NUMBER.png in the layout of task cifar10: waves, whose direction and colour are the class.

    Args:
        folder: is there.
        per_class: training pictures of each class; a quarter of that for the test.
    """
    from data import TASKS
    from PIL import Image

    classes = TASKS["cifar10"].label_names
    draw = np.random.default_rng(0)
    places = np.stack(np.meshgrid(np.arange(SIDE), np.arange(SIDE)), -1) / SIDE
    for number, name in enumerate(classes):
        angle = np.pi * number / len(classes)
        colour = np.array([1 + np.cos(2 * angle), 1 + np.sin(2 * angle), 1.0])
        for split, count in (("train", per_class), ("test", max(1, per_class // 4))):
            target = folder / split / name
            target.mkdir(parents=True)
            for index in range(count):
                phase = draw.uniform(0, 2 * np.pi)
                wave = np.sin(20 * places @ np.array([np.cos(angle), np.sin(angle)]) + phase)
                pixels = 60 * (1 + wave)[..., None] * colour / 2 + draw.normal(0, 20, (SIDE, SIDE, 3)) + 40
                Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(target / f"{index:04d}.png")


def write_vit(folder: Path, layers: int) -> None:
    """A vision transformer with random weights for pictures of this size, and its image processor.

    Args:
        folder: is made.
        layers: of 192 numbers and 3 heads, as ViT-Ti has them.
    """
    import torch
    from transformers import ViTConfig, ViTForImageClassification, ViTImageProcessor

    torch.manual_seed(0)
    sizes = {"hidden_size": 192, "num_hidden_layers": layers, "num_attention_heads": 3, "intermediate_size": 768}
    ViTForImageClassification(ViTConfig(image_size=SIDE, patch_size=4, **sizes)).save_pretrained(folder)
    ViTImageProcessor(size={"height": SIDE, "width": SIDE}).save_pretrained(folder)
