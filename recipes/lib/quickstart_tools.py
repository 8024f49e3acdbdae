"""What the quickstart needs around its steps: latency, sizes, and a bundle loaded in a fresh process."""

from __future__ import annotations

import json
import os
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn

from lib.terminal import bar

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


@torch.no_grad()
def quicker_precision(model: nn.Module, batch: dict[str, torch.Tensor]) -> str:
    """Setting train.mixed_precision: bf16 is twice as fast as no (float32) on some processors, far slower on others."""
    seconds = {}
    for precision in ("no", "bf16"):
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
            model(**batch)  # the first pass only warms up
            start = time.perf_counter()
            model(**batch)
            seconds[precision] = time.perf_counter() - start
    return min(seconds, key=seconds.__getitem__)


@torch.no_grad()
def latencies(models: Sequence[nn.Module], shape: tuple[int, int], repetitions: int) -> list[float]:
    """Median milliseconds of one batch of `shape` (batch, tokens) for each model.

    The models take turns, so a busy moment of the machine hits all of them.
    """
    ids = torch.randint(1000, 30000, shape, generator=torch.Generator().manual_seed(0))
    seconds: list[list[float]] = [[] for _ in models]
    for repetition in bar(range(repetitions + 1), "latency"):
        for model, times in zip(models, seconds, strict=True):
            start = time.perf_counter()
            model(input_ids=ids, attention_mask=torch.ones_like(ids))
            if repetition:  # the first pass only warms up
                times.append(time.perf_counter() - start)
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
