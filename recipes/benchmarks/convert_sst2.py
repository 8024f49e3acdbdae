"""Convert a fine-tuned BERT without labels: accuracy, speed-up and seconds of calibrated FFN replacement on SST-2.

    python recipes/benchmarks/convert_sst2.py --model path/to/minilm-l6-sst2 --data path/to/glue

The teacher's FFN blocks are replaced by landmark features, fitted in closed form on 2,500 unlabelled training sentences
and bundled into a plain model. Accuracy is that of the bundle on the 872 development sentences at 64 tokens; speed-up
is the teacher's time over the bundle's for 32 x 64 tokens, taken in turn in one process.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from _bench import parser
from _conversion import compare_conversions, of_ffn
from transformers import AutoModelForSequenceClassification, AutoTokenizer, logging

from snnk_peft.tasks import TASKS

CONVERSIONS = {
    "3 of 6 FFNs, 32 features": of_ffn(layers="top-3", num_features=32),
    "3 of 6 FFNs, 128 features": of_ffn(layers="top-3", num_features=128),
    "6 of 6 FFNs, 256 features": of_ffn(layers="all", num_features=256),
}


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


def load(model: Path, data: str, count: int, seed: int = 0) -> tuple[Any, Any, list[str], list[str], list[int]]:
    """Teacher, tokenizer, `count` unlabelled training sentences, the development sentences, their labels."""
    rows = TASKS["sst2"].load(data)
    chosen = np.random.default_rng(seed).permutation(len(rows["train"]))[:count]
    unlabelled = [rows["train"]["sentence1"][int(i)] for i in chosen]
    sentences, labels = list(rows["validation"]["sentence1"]), list(rows["validation"]["label"])
    teacher = AutoModelForSequenceClassification.from_pretrained(model, dtype=torch.float32).eval()
    return teacher, AutoTokenizer.from_pretrained(model), unlabelled, sentences, labels


def main() -> None:
    """Measure and write."""
    options = parser(__doc__, "convert_sst2")
    options.add_argument("--model", type=Path, required=True, help="folder of the fine-tuned classifier")
    options.add_argument("--data", required=True, help="folder that holds SST-2/{train,dev}.tsv")
    options.add_argument("--sentences", type=int, default=2500, help="unlabelled training sentences (default 2500)")
    options.add_argument("--landmarks", default="greedy", help="greedy or importance")
    arguments = options.parse_args()
    logging.set_verbosity_error()
    logging.disable_progress_bar()

    teacher, tokenizer, unlabelled, sentences, labels = load(arguments.model, arguments.data, arguments.sentences)
    calibration = batches(tokenizer, unlabelled)

    ids = torch.randint(1000, 20000, (32, 64), generator=torch.Generator().manual_seed(0))
    compare_conversions(
        teacher,
        CONVERSIONS,
        calibration,
        lambda model: accuracy(model, tokenizer, sentences, labels),
        {"input_ids": ids, "attention_mask": torch.ones_like(ids)},
        arguments,
        title="SST-2 conversion without labels",
        timed="32x64 tokens",
        landmarks=arguments.landmarks,
    )


if __name__ == "__main__":
    main()
