"""Convert a ViT trained on CIFAR-10 without labels: accuracy, speed-up and time of calibrated FFN replacement.

    python recipes/finetune.py recipes/configs/cifar10/scratch.yaml data.dir=path/to/cifar10
    python recipes/benchmarks/convert_models.py cifar10 --model runs/cifar10_scratch/model --data path/to/cifar10

The teacher's FFN blocks are replaced by landmark features, fitted in closed form on 1,000 unlabelled training images
and bundled into a plain model. Accuracy is the bundle's on the test images; speed-up is the teacher's time over
the bundle's for 32 images, taken in turn in one process.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from pathlib import Path

import torch
from _bench import ratio, report
from data import TASKS
from torch import nn
from transformers import AutoImageProcessor, AutoModelForImageClassification

from snnk_cli.images import ImageExamples
from snnk_cli.timing import forward_seconds
from snnk_peft import FFNPart, SNNKConfig, bundle, calibrate, get_snnk_model

CONVERSIONS = {
    "3 of 6 FFNs, 64 features": FFNPart(layers="top-3", num_features=64),
    "6 of 6 FFNs, 64 features": FFNPart(num_features=64),
    "6 of 6 FFNs, 128 features": FFNPart(num_features=128),
    "6 of 6 FFNs, 256 features": FFNPart(num_features=256),
}
BATCH = 100


def add_options(options: argparse.ArgumentParser) -> None:
    """Add the options of model and data."""
    options.add_argument("--model", type=Path, required=True, help="folder of the classifier and its image processor")
    options.add_argument("--data", required=True, help="CIFAR-10 in any layout that the task can read")
    options.add_argument("--pictures", type=int, default=1000, help="unlabelled training images (default 1000)")
    options.add_argument("--test-pictures", type=int, help="evaluate on this many, drawn at random (default: all)")


def run(arguments: argparse.Namespace) -> None:
    """Measure and write."""
    limits = {"train": arguments.pictures, "test": arguments.test_pictures}
    splits = TASKS["cifar10"].load(
        arguments.data, max_samples={name: limit for name, limit in limits.items() if limit is not None}
    )
    processor = AutoImageProcessor.from_pretrained(arguments.model, backend="pil")
    teacher = AutoModelForImageClassification.from_pretrained(arguments.model, dtype=torch.float32).eval()
    train, test = (ImageExamples(splits[name], processor, 3, teacher.config.num_labels) for name in ("train", "test"))

    def pixels(examples: ImageExamples, start: int) -> dict[str, torch.Tensor]:
        return examples.batch(range(start, min(start + BATCH, len(examples))))

    @torch.no_grad()
    def accuracy(model: nn.Module) -> float:
        right = 0
        for start in range(0, len(test), BATCH):
            batch = pixels(test, start)
            right += int((model(pixel_values=batch["pixel_values"]).logits.argmax(-1) == batch["labels"]).sum())
        return right / len(test)

    shown = {"pixel_values": test.batch(range(min(32, len(test))))["pixel_values"]}
    models, fitted, seconds = {"teacher": teacher}, {}, {"teacher": 0.0}
    for name, part in CONVERSIONS.items():
        start = time.perf_counter()
        patched = get_snnk_model(copy.deepcopy(teacher), SNNKConfig(ffn=part, modules_to_save=[]))
        calibration = [pixels(train, start) for start in range(0, len(train), BATCH)]
        fitted[name] = calibrate(patched, calibration, progress=False).to_dict()
        models[name] = bundle(patched).eval()
        seconds[name] = time.perf_counter() - start
    taken = forward_seconds(models, shown, arguments.repetitions)
    rows = [
        {
            "model": name,
            "accuracy": accuracy(model),
            "speed-up": ratio(taken["teacher"], taken[name]),
            "ms per 32 pictures": 1000 * statistics.median(taken[name]),
            "conversion seconds": seconds[name],
            # The rows of a bundle are buffers.
            "parameters": sum(t.numel() for t in model.state_dict().values() if t.is_floating_point()),
        }
        for name, model in models.items()
    ]
    figures = {"calibration": fitted, "teacher": arguments.model.name}
    report(figures, rows, arguments.output, "CIFAR-10 conversion without labels")
