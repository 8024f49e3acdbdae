"""Small decoders trained to recall, converted for a share of their cache, against the original and other methods.

    python recipes/papers/programs/train_copy.py recipes/papers/configs/copy/pieces.yaml
    python recipes/benchmarks/convert_models.py recall --runs runs/copy/pieces

Each run is one of train_copy.py with data.piece: the second half of a text is made of pieces of the first in any order,
so that all of it must be found far back. Calibrated on texts of the training split; the methods are those of `llama`.
Recalled is the share of tokens, after the first few of a piece, that the model predicts as most likely: of all, and of
those whose piece occurred more than half a text before, on texts of the test split, read through the cache.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import torch
from _bench import report
from papers.programs.train_copy import CopyConfig, copies
from transformers import AutoModelForCausalLM

from _conversions.llama import WAYS, made
from snnk_cli.config import load_config
from snnk_cli.language import Read
from snnk_peft.tasks.base import IGNORED


def add_options(options: argparse.ArgumentParser) -> None:
    """Add the options of models and texts."""
    options.add_argument("--runs", type=Path, nargs="+", required=True, help="run folders of train_copy.py")
    options.add_argument("--cache", type=float, nargs="+", default=[0.25], help="shares kept (default 0.25)")
    options.add_argument("--texts", type=int, default=20, help="calibration texts (default 20)")
    options.add_argument("--judged", type=int, default=50, help="evaluation texts (default 50)")
    options.add_argument("--seeds", type=int, default=3, help="draws of the calibration texts (default 3)")


def run(arguments: argparse.Namespace) -> None:
    """Measure and write after each model."""
    rows: list[dict[str, Any]] = []
    settings = {name: getattr(arguments, name) for name in ("cache", "texts", "judged")}
    for folder in arguments.runs:
        data = load_config(CopyConfig, folder / "config.yaml").data
        train, test = (copies(data, 0, split) for split in ("train", "test"))
        model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32).eval()
        for share in arguments.cache:
            for way in WAYS:
                if way == "original" and share != arguments.cache[0]:
                    continue  # the same for every share
                fixed = way in ("original", "window")
                for seed in range(1 if fixed else arguments.seeds):
                    chosen = range(seed * arguments.texts, (seed + 1) * arguments.texts)
                    batches = [{"input_ids": train.batch([index])["input_ids"]} for index in chosen]
                    start = time.perf_counter()
                    changed = made(way, model, batches, share, seed, data.length)
                    seconds = 0.0 if fixed else time.perf_counter() - start
                    given = {"layout": model.config.model_type, "way": way, "cache": share, "seed": seed}
                    rows.append({**given, **recalled(Read(changed), test, arguments.judged), "seconds": seconds})
                    report({"settings": settings}, rows, arguments.output, "Decoders that recall, without labels")


def recalled(read: Read, test: Any, count: int) -> dict[str, float]:
    """Return the shares of correct tokens, and the bytes of the cache."""
    right, far = [], []
    for index in range(count):
        batch = test.batch([index])
        ids, labels = batch["input_ids"][0], batch["labels"][0]
        likely = torch.cat([logits.argmax(-1).cpu() for logits in read.logits(ids)])
        counts = labels[1:] != IGNORED
        right.append((likely[:-1] == labels[1:])[counts])
        half = len(ids) // 2
        starts = torch.from_numpy(test.starts(index)).repeat_interleave(test.piece)
        distance = half + torch.arange(half) - (starts + torch.arange(half) % test.piece)
        far.append((distance > half)[counts[half - 1 :]])
    found, distant = torch.cat(right).float(), torch.cat(far)
    return {
        "recalled": float(found.mean()),
        "recalled from far": float(found[distant].mean()),
        "cache bytes": read.decoding(ids, 3)[0],
    }
