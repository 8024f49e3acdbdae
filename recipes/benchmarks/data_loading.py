"""Can the loader keep up with training? Images per second of the loader alone and of the training step that reads them.

    python recipes/benchmarks/data_loading.py
    python recipes/benchmarks/data_loading.py --device cuda --workers 8

2,048 generated JPEG files of 32 x 32 pixels for the small ViT of recipes/models/vit_cifar, and 256 of 500 x 375 for
ViT-S/16 at 224 x 224, read, augmented (crop, flip, mixup) and normalised as in recipes/finetune.py; the training
step is that of SNNK adapters on a batch in memory. Loader and step take turns. A ratio above 1 means that a loader with
this number of workers keeps up with the step; on a GPU many workers are needed.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from _bench import add_device, parser, report
from data import TASKS
from PIL import Image
from transformers import ViTImageProcessorPil
from vision_step import config_of, prepare

from snnk_cli.images import Augmentation, ImageExamples
from snnk_cli.settings import AugmentSection

# Model: number of files, and their (width, height).
FILES = {"vit_cifar": (2048, (32, 32)), "vit_small": (256, (500, 375))}


def write_pictures(folder: Path, count: int, size: tuple[int, int]) -> None:
    """Write smooth random JPEG files of two classes, because noise decodes more slowly than photos."""
    rng = np.random.default_rng(0)
    for number in range(count):
        small = Image.fromarray(rng.integers(0, 256, (12, 12, 3), dtype=np.uint8))
        target = folder / "train" / ("cat", "dog")[number % 2] / f"{number:05d}.jpg"
        target.parent.mkdir(parents=True, exist_ok=True)
        small.resize(size, Image.Resampling.BICUBIC).save(target, quality=90)


def loader(folder: Path, side: int, workers: int) -> ImageExamples:
    """Create examples as finetune.py does."""
    processor = ViTImageProcessorPil(size={"height": side, "width": side})
    changes = Augmentation(AugmentSection(crop_scale=0.5, flip=0.5, mixup=0.2), (side, side), 3, seed=0)
    rows = TASKS["cifar10"].load(folder, splits=["train"])["train"]
    return ImageExamples(rows, processor, 3, 10, changes, workers)


def main() -> None:
    """Run the benchmark and write its results."""
    options = parser(__doc__ or "", "data_loading")
    add_device(options, "of the training step")
    options.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"), help="dtype of forward passes")
    options.add_argument("--workers", type=int, nargs="+", default=[0, 1, 2], help="processes that prepare batches")
    options.add_argument("--batch-size", type=int, default=32, help="images per batch")
    options.add_argument("--batches", type=int, help="maximum number per model")
    arguments = options.parse_args()
    batch = arguments.batch_size
    rows: list[dict[str, Any]] = []
    for name, (most, size) in FILES.items():
        count = most if arguments.batches is None else min(most, batch * arguments.batches)
        with tempfile.TemporaryDirectory() as folder:
            write_pictures(Path(folder), count, size)
            step = prepare("snnk", arguments.device, arguments.dtype, name, batch)
            step()
            plan = [list(range(start, start + batch)) for start in range(0, count, batch)]
            for workers in arguments.workers:
                examples = loader(Path(folder), config_of(name).image_size, workers)
                read, trained = [], []
                for repetition in range(arguments.repetitions):
                    started = time.perf_counter()
                    for _ in examples.batches(plan, epoch=repetition):
                        pass
                    read.append(count / (time.perf_counter() - started))
                    started = time.perf_counter()
                    for _ in range(3):
                        step()
                    trained.append(3 * batch / (time.perf_counter() - started))
                row = {"model": name, "workers": workers, "loader_per_second": statistics.median(read)}
                row |= {"step_per_second": statistics.median(trained)}
                ratio = statistics.median(a / b for a, b in zip(read, trained, strict=True))
                rows.append({**row, "loader_over_step": ratio})
    figures = {"device": arguments.device, "dtype": arguments.dtype, "batch": batch}
    report(figures, rows, arguments.output, f"Pictures per second, {arguments.device}")


if __name__ == "__main__":
    main()
