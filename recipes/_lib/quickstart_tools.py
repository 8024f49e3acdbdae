"""What the quickstart needs around its steps: batches, latency, sizes, and a bundle loaded in a fresh process."""

from __future__ import annotations

import json
import math
import os
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from _lib.quickstart_data import Example

CUT = {"truncation": True, "max_length": 64}
BATCH_SIZE = 32

RELOAD = """
import json, sys
import snnk_peft  # lets the Auto classes and pipelines load bundled models
from transformers import pipeline
given = json.load(sys.stdin)
classify = pipeline("text-classification", model=given["folder"], top_k=None)
print(json.dumps(classify(given["texts"], **given["cut"])))
"""


class Batches:
    """Padded batches of sentences of similar length; with `shuffle` they come in another order on every pass."""

    def __init__(self, sentences: Sequence[Example], tokenizer: Any, shuffle: torch.Generator | None = None):
        self.tokenizer, self.shuffle = tokenizer, shuffle
        self.tokens = tokenizer([sentence.text for sentence in sentences], **CUT)["input_ids"]
        self.labels = [sentence.label for sentence in sentences]

    def __len__(self) -> int:
        return math.ceil(len(self.labels) / BATCH_SIZE)

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        order = list(range(len(self.labels)))
        if self.shuffle is not None:
            order = torch.randperm(len(order), generator=self.shuffle).tolist()
        pools = [order[i : i + 8 * BATCH_SIZE] for i in range(0, len(order), 8 * BATCH_SIZE)]
        order = [i for pool in pools for i in sorted(pool, key=lambda j: len(self.tokens[j]))]
        for start in range(0, len(order), BATCH_SIZE):
            chosen = order[start : start + BATCH_SIZE]
            batch = self.tokenizer.pad({"input_ids": [self.tokens[i] for i in chosen]}, return_tensors="pt")
            yield {**batch, "labels": torch.tensor([self.labels[i] for i in chosen])}


@torch.no_grad()
def quicker_precision(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.dtype:
    """float32, or bfloat16 where this processor computes in it faster: twice as fast on some, far slower on others."""
    seconds = {}
    for precision in (torch.float32, torch.bfloat16):
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == torch.bfloat16):
            model(**batch)  # the first pass only warms up
            start = time.perf_counter()
            model(**batch)
            seconds[precision] = time.perf_counter() - start
    return min(seconds, key=seconds.__getitem__)


@torch.no_grad()
def latencies(
    models: Sequence[nn.Module], shape: tuple[int, int], repetitions: int, tick: Callable[[], None]
) -> list[float]:
    """Median milliseconds of one batch of `shape` (batch, tokens) for each model.

    The models take turns, so a busy moment of the machine hits all of them.
    """
    ids = torch.randint(1000, 30000, shape, generator=torch.Generator().manual_seed(0))
    seconds: list[list[float]] = [[] for _ in models]
    for repetition in range(repetitions + 1):
        for model, times in zip(models, seconds, strict=True):
            start = time.perf_counter()
            model(input_ids=ids, attention_mask=torch.ones_like(ids))
            if repetition:  # the first pass only warms up
                times.append(time.perf_counter() - start)
            tick()
    return [1000 * statistics.median(times) for times in seconds]


def weight_bytes(folder: Path) -> int:
    """Bytes of the weight files that `save_pretrained` wrote."""
    return sum(file.stat().st_size for file in folder.rglob("*.safetensors"))


def numbers(model: nn.Module) -> int:
    """Parameters and floating-point buffers: frozen matrices of feature maps are buffers."""
    return sum(t.numel() for t in (*model.parameters(), *model.buffers()) if t.is_floating_point())


def reload_in_fresh_process(folder: Path, texts: list[str]) -> list[dict[str, float]]:
    """Class probabilities of each text from `pipeline(...)` in a new Python."""
    given = json.dumps({"folder": str(folder), "texts": texts, "cut": CUT})
    done = subprocess.run([sys.executable, "-c", RELOAD], input=given, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"the bundle in {folder} could not be loaded in a fresh process:\n{done.stderr}")
    return [{score["label"]: score["score"] for score in scores} for scores in json.loads(done.stdout.splitlines()[-1])]


def command_to_try(folder: Path) -> str:
    """A command for the shell that classifies a sentence with the bundle in `folder`."""
    code = (
        "import snnk_peft; from transformers import pipeline; "
        f'print(pipeline("text-classification", {json.dumps(str(folder))})("Write your own sentence here."))'
    )
    python = os.path.relpath(sys.executable)
    return shlex.join([sys.executable if python.startswith("..") else python, "-c", code])
