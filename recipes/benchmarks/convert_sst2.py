"""Convert a fine-tuned BERT without labels: accuracy, speed-up and seconds of calibrated FFN replacement on SST-2.

    python recipes/benchmarks/convert_sst2.py --model path/to/minilm-l6-sst2 --data path/to/glue

The teacher's FFN blocks are replaced by landmark features, fitted in closed form on 2,500 unlabelled training sentences
and bundled into a plain model. Accuracy is that of the bundle on the 872 development sentences at 64 tokens; speed-up
is the teacher's time over the bundle's for 32 x 64 tokens, taken in turn in one process.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from _bench import parser
from _conversion import compare_conversions
from transformers import AutoModelForSequenceClassification, AutoTokenizer, logging

from snnk_peft.tasks import TASKS

CONVERSIONS = {
    "3 of 6 FFNs, 32 features": {"layers": "top-3", "num_features": 32},
    "3 of 6 FFNs, 128 features": {"layers": "top-3", "num_features": 128},
    "6 of 6 FFNs, 256 features": {"layers": "all", "num_features": 256},
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

    data = TASKS["sst2"].load(arguments.data)
    chosen = np.random.default_rng(0).permutation(len(data["train"]))[: arguments.sentences]
    unlabelled = [data["train"]["sentence1"][int(i)] for i in chosen]
    sentences, labels = list(data["validation"]["sentence1"]), list(data["validation"]["label"])
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    teacher = AutoModelForSequenceClassification.from_pretrained(arguments.model, dtype=torch.float32).eval()
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
