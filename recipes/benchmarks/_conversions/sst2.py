"""Convert a fine-tuned BERT without labels, in all ways: accuracy, speed-up and seconds on SST-2.

    python recipes/benchmarks/convert_models.py sst2 --model path/to/minilm-l6-sst2 --data path/to/glue

FFN blocks become landmark features, softmax becomes a mixture over centroids, in closed form or with some steps of Adam
per layer behind it; or `plan` chooses. Calibration reads training sentences without labels. Most rows of SST-2 are
phrases, and the development sentences are whole: where attention is converted, rows of more than 40 characters are
taken. Accuracy is that of the bundle on the 872 development sentences at 64 tokens, the mean over calibrations with
different sentences and draws. Speed-ups are the teacher's time over the bundle's, taken in turn in one process: 32 x 64
tokens, and long inputs, full or, as batches are, with a quarter of their last row padding. (The model has 512
positions; beyond, they begin again: such inputs are timed only.)
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import torch
from data import TASKS
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from _conversions.comparison import Conversion, add_conversions, compare_conversions, of_ffn
from snnk_peft import AttentionPart, FFNPart

SHORTEST = 40  # characters of what is taken for a whole sentence
WHOLE = "whole sentences"
SENTENCES = {WHOLE: 1200, "any": 2500}
FFN_STEPS = 200  # of Adam per layer behind the closed form, where attention is not converted


def conversions(layers: int, arguments: argparse.Namespace) -> dict[str, Conversion]:
    """What is compared, in a model of so many layers; of these, what `--only` names."""
    few, *more = arguments.units
    steps, features, half = arguments.steps, arguments.features, layers // 2
    ffn = FFNPart(num_features=more[-1])
    everywhere, above = (
        AttentionPart("mixture", "centroids", num_features=features, layers=chosen) for chosen in ("all", f"top-{half}")
    )
    heads, upper = f"attention, {features} features", f"attention of {half} of {layers}, {features} features"
    rest = f"and {layers} FFNs, {more[-1]}, {steps} steps"
    stepping = {"steps": steps}
    found = {
        f"{half} of {layers} FFNs, {few} features": of_ffn(FFN_STEPS, layers=f"top-{half}", num_features=few),
        **{f"{layers} of {layers} FFNs, {units} features": of_ffn(FFN_STEPS, num_features=units) for units in more},
        f"{heads}, closed form": Conversion({"attention": everywhere}, texts=WHOLE),
        f"{heads}, {steps} steps": Conversion({"attention": everywhere}, stepping, texts=WHOLE),
        f"{heads}, {rest}": Conversion({"attention": everywhere, "ffn": ffn}, stepping, texts=WHOLE),
        f"{upper}, closed form": Conversion({"attention": above}, texts=WHOLE),
        f"{upper}, {rest}": Conversion({"attention": above, "ffn": ffn}, stepping, texts=WHOLE),
        **{
            f"plan {budget}": Conversion({}, {"steps": FFN_STEPS}, budget, arguments.of) for budget in arguments.budgets
        },
    }
    words = arguments.only or [""]
    return {name: made for name, made in found.items() if any(word in name for word in words)}


def batches(tokenizer, sentences: list[str], size: int = 64, max_length: int = 64) -> list[dict[str, torch.Tensor]]:
    """Padded batches, sentences of similar length together."""
    ordered = sorted(sentences, key=len)
    return [
        dict(
            tokenizer(ordered[i : i + size], truncation=True, max_length=max_length, padding=True, return_tensors="pt")
        )
        for i in range(0, len(ordered), size)
    ]


@torch.no_grad()
def accuracy(model, tokenizer, sentences: list[str], labels: list[int], max_length: int = 64) -> float:
    """Fraction of sentences classified as labelled."""
    order = sorted(range(len(sentences)), key=lambda i: len(sentences[i]))
    right = 0
    for start in range(0, len(order), 64):
        index = order[start : start + 64]
        batch = tokenizer(
            [sentences[i] for i in index], truncation=True, max_length=max_length, padding=True, return_tensors="pt"
        )
        predicted = model(**batch).logits.argmax(-1)
        right += int((predicted == torch.tensor([labels[i] for i in index])).sum())
    return right / len(order)


def load(model: Path, data: str) -> tuple[Any, Any, list[str], list[str], list[int]]:
    """Teacher, tokenizer, the training sentences, the development sentences, their labels."""
    rows = TASKS["sst2"].load(data)
    sentences, labels = list(rows["validation"]["sentence1"]), list(rows["validation"]["label"])
    teacher = AutoModelForSequenceClassification.from_pretrained(model, dtype=torch.float32).eval()
    return teacher, AutoTokenizer.from_pretrained(model), list(rows["train"]["sentence1"]), sentences, labels


def some(sentences: list[str], texts: str, seed: int, count: int | None = None) -> list[str]:
    """So many of them, by default as `SENTENCES` says for texts of this kind."""
    found = [text for text in sentences if len(text) > SHORTEST] if texts == WHOLE else sentences
    return [found[int(i)] for i in np.random.default_rng(seed).permutation(len(found))[: count or SENTENCES[texts]]]


def timed_inputs(shapes: list[str], vocabulary: int, positions: int) -> dict[str, dict[str, torch.Tensor]]:
    """Random tokens of every shape, such as "4x512"; those behind the first with padding as well."""
    found = {}
    generator = torch.Generator().manual_seed(0)
    for shape in shapes:
        rows, length = map(int, shape.split("x"))
        ids = torch.randint(vocabulary // 30, vocabulary, (rows, length), generator=generator)
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "token_type_ids": torch.zeros_like(ids)}
        inputs["position_ids"] = (torch.arange(length) % positions).expand(rows, -1)
        found[f"{shape} tokens"] = inputs
        if shape != shapes[0]:
            padded = torch.ones_like(ids)
            padded[-1, -length // 4 :] = 0
            found[f"{shape}, padded"] = {**inputs, "attention_mask": padded}
    return found


def add_options(options: argparse.ArgumentParser) -> None:
    """What is converted, and with what."""
    options.add_argument("--model", type=Path, required=True, help="folder of the fine-tuned classifier")
    options.add_argument("--data", required=True, help="folder that holds SST-2/{train,dev}.tsv")
    options.add_argument("--sentences", type=int, help="unlabelled training sentences (default 2500, whole ones 1200)")
    add_conversions(options, seeds=3)
    options.add_argument("--landmarks", default="greedy", help="greedy or importance")


def run(arguments: argparse.Namespace) -> None:
    """Measure and write."""
    teacher, tokenizer, unlabelled, sentences, labels = load(arguments.model, arguments.data)
    wanted = conversions(teacher.config.num_hidden_layers, arguments)

    def calibration(seed: int, conversion: Conversion) -> list[dict[str, torch.Tensor]]:
        return batches(tokenizer, some(unlabelled, conversion.texts, seed, arguments.sentences))

    compare_conversions(
        teacher,
        wanted,
        calibration,
        lambda model: accuracy(model, tokenizer, sentences, labels),
        timed_inputs(arguments.shapes, teacher.config.vocab_size, teacher.config.max_position_embeddings),
        arguments,
        title="SST-2 conversion without labels",
        landmarks=arguments.landmarks,
    )
