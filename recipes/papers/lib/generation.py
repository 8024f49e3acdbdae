"""A bundled language model in a fresh process: its logits, and samples and costs with each kind of cache."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, DynamicCache

from snnk_cli.config import ROOT
from snnk_peft.attention import RecurrentCache

PREFIXES, DECODED = (512, 8192), 32  # tokens already in the cache, tokens timed
SAMPLE = 200  # tokens


def in_fresh_process(folder: Path, given: dict[str, Any]) -> dict[str, Any]:
    """Return the result of `reloaded` in a new Python process."""
    command = [sys.executable, str(ROOT / "recipes/papers/programs/tiny_llama.py"), "--reload", str(folder)]
    done = subprocess.run(command, input=json.dumps(given), capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"the bundle in {folder} could not be used in a fresh process:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


@torch.no_grad()
def reloaded(folder: Path, given: dict[str, Any]) -> dict[str, Any]:
    """Load the bundle; return its logits on the probe, samples, and speed and size of both kinds of cache."""
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    torch.manual_seed(given["seed"])
    prompt = torch.tensor([given["prompt"]])
    settings = {"max_new_tokens": SAMPLE, "return_dict_in_generate": True}
    sampled = model.generate(prompt, **settings, do_sample=True, temperature=0.7)
    greedy = model.generate(prompt, **settings, do_sample=False)
    if not torch.equal(
        greedy.sequences, model.generate(prompt, **settings, do_sample=False, use_cache=False).sequences
    ):
        raise SystemExit("greedy generation with the recurrent cache differs from generation without a cache")
    caches = {"recurrent": lambda: RecurrentCache(model), "growing": lambda: DynamicCache(config=model.config)}
    decoding = {
        name: {str(length): decode(model, make(), length) for length in PREFIXES} for name, make in caches.items()
    }
    return {
        "logits": model(input_ids=torch.tensor([given["probe"]])).logits[0, -1].tolist(),
        "cache": type(sampled.past_key_values).__name__,
        "sample": bytes(sampled.sequences[0].tolist()).decode(errors="replace"),
        "greedy": bytes(greedy.sequences[0].tolist()).decode(errors="replace"),
        "decoding": decoding,
    }


def decode(model: nn.Module, cache: Any, prefix: int) -> dict[str, float]:
    """Fill the cache with `prefix` tokens in chunks, then time single tokens."""
    ids = torch.randint(32, 127, (1, prefix), generator=torch.Generator().manual_seed(0))
    for chunk in ids.split(1024, -1):
        model(input_ids=chunk, past_key_values=cache, logits_to_keep=1)
    times = []
    for _ in range(DECODED):
        start = time.perf_counter()
        model(input_ids=ids[:, :1], past_key_values=cache)
        times.append(time.perf_counter() - start)
    layers = [getattr(layer, "nbytes", None) or layer.keys.nbytes + layer.values.nbytes for layer in cache.layers]
    return {"tokens_per_second": 1 / statistics.median(times), "cache_bytes": sum(layers)}
