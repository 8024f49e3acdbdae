"""Cost of `convert` for models of common sizes: time, memory, and the speed gained.

    python recipes/benchmarks/convert_models.py sizes
    python recipes/benchmarks/convert_models.py sizes --shapes bert-base vit-base --budget 2x

Weights and inputs are random, so this measures cost only, not quality: texts of 24 tokens on average, and images.
Each shape has its own process, whose peak memory is reported next to that of the model's forward passes alone.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from _bench import peak_of_process, report
from transformers import (
    AutoModelForImageClassification,
    AutoModelForSequenceClassification,
    BertConfig,
    ModernBertConfig,
    RobertaConfig,
    ViTConfig,
    logging,
)

from snnk_peft import convert

LARGE = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096}
SHAPES: dict[str, Callable[[], Any]] = {
    "minilm-l6": lambda: BertConfig(
        hidden_size=384, num_hidden_layers=6, num_attention_heads=12, intermediate_size=1536
    ),
    "bert-base": BertConfig,
    "modernbert-base": lambda: ModernBertConfig(reference_compile=False),
    "vit-base": ViTConfig,
    "roberta-large": lambda: RobertaConfig(**LARGE, max_position_embeddings=514),
}
ROWS, SHORTEST, LONGEST = 32, 8, 40  # rows of a text batch, and their lengths
IMAGE_ROWS = 8


def batches_of(config: Any, texts: int, images: int) -> list[dict[str, torch.Tensor]]:
    """Draw random inputs, with texts of similar length together."""
    generator = torch.Generator().manual_seed(0)
    if isinstance(config, ViTConfig):
        shape = IMAGE_ROWS, config.num_channels, config.image_size, config.image_size
        return [{"pixel_values": torch.randn(shape, generator=generator)} for _ in range(images // IMAGE_ROWS)]
    lengths = torch.linspace(SHORTEST, LONGEST, texts // ROWS).round().int().tolist()
    made = []
    for length in lengths:
        ids = torch.randint(1000, config.vocab_size, (ROWS, length), generator=generator)
        made.append({"input_ids": ids, "attention_mask": torch.ones_like(ids)})
    return made


def prepared(
    shape: str, budget: str | None, texts: int, images: int, recover: float | None, threads: int, told: Path
) -> Callable[[], None]:
    """Build model and batches; return the function to measure, which without a budget runs only forward passes."""
    logging.disable_progress_bar()
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    config = SHAPES[shape]()
    kind: Any = AutoModelForImageClassification if isinstance(config, ViTConfig) else AutoModelForSequenceClassification
    model, batches = kind.from_config(config).eval(), batches_of(config, texts, images)

    def run() -> None:
        if budget is None:
            with torch.no_grad():
                for batch in batches:
                    model(**batch)
            return
        made = convert(model, batches, budget, recover=recover, progress=False).report
        original, converted = (made.models[name] for name in ("original", "converted"))
        found = {
            "speed-up": made.speed_up,
            "parameters": original["parameters"],
            "converted": converted["parameters"],
            **{f"{name} s": value for name, value in made.seconds.items()},
            "seconds": sum(made.seconds.values()),
        }
        told.write_text(json.dumps(found), encoding="utf-8")

    return run


def add_options(options: argparse.ArgumentParser) -> None:
    """Add the options of shapes and data."""
    options.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES), help="models (default all)")
    options.add_argument("--budget", default="2x", help="latency budget (default 2x)")
    options.add_argument("--texts", type=int, default=2500, help="number of texts (default 2500)")
    options.add_argument("--images", type=int, default=320, help="number of images (default 320)")
    options.add_argument("--recover", type=float, help="seconds of recovery (default: that of convert)")


def run(arguments: argparse.Namespace) -> None:
    """Measure and write."""
    threads, rows = torch.get_num_threads(), []
    for shape in arguments.shapes:
        with tempfile.TemporaryDirectory() as folder:
            told = Path(folder) / "told.json"
            measure = partial(peak_of_process, prepared, shape)
            given = arguments.texts, arguments.images, arguments.recover, threads, told
            alone, whole = (sum(measure(budget, *given)) for budget in (None, arguments.budget))
            found = json.loads(told.read_text(encoding="utf-8"))
        rows.append({"model": shape, **found, "peak MB": whole / 1e6, "forward alone, MB": alone / 1e6})
        settings = {
            "budget": arguments.budget,
            "threads": threads,
            "texts": arguments.texts,
            "images": arguments.images,
        }
        report(settings, rows, arguments.output, "What convert takes, by size of the model")
