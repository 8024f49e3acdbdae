"""A fine-tuned model on its task: batches to calibrate on, and the share of its answers that another model keeps."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import torch
from data import TASKS
from torch import nn

from snnk_cli.evaluation import Alone, evaluation_splits, predict
from snnk_cli.modality import modality_of
from snnk_cli.settings import DataSection
from snnk_cli.teacher import load_teacher
from snnk_peft.calibrating.answers import Answers, Comparison
from snnk_peft.tasks.texts import batches_by_length

SHORTEST = 40  # characters: most training rows of SST-2 are sentence fragments, unlike any user's texts
COLUMNS = ("sentence1", "sentence2")
Batch = dict[str, torch.Tensor]


class FineTuned:
    """A text classifier or regressor, in eval mode and float32, with the data of its task.

    Args:
        task: name of the task.
        model: folder of the model and its tokenizer.
        data: folder of the task's files.
        max_length: tokens of an example.
        batch_size: examples per batch.
        score_at_most: maximum number of scored examples; None for all.
    """

    def __init__(
        self, task: str, model: Path, data: str, max_length: int, batch_size: int, score_at_most: int | None = None
    ):
        self.task: Any = TASKS[task]
        self.teacher, self.reader = load_teacher(str(model), self.task)
        self.section, self.batch_size = DataSection(dir=data, max_length=max_length), batch_size
        rows = self.task.load(data, splits=["train", *self.task.validation_splits])
        columns = [rows["train"][name] for name in COLUMNS if name in rows["train"].column_names]
        long = [number for number, texts in enumerate(zip(*columns, strict=True)) if sum(map(len, texts)) > SHORTEST]
        self.train = rows["train"].select(long)
        scored = evaluation_splits(self.task, rows, score_at_most)
        self.scored = {name: self.examples(part) for name, part in scored.items()}
        self.expected = self.logits(self.teacher)

    def examples(self, rows: Any) -> Any:
        """Tokenise rows."""
        return modality_of(self.task).examples(rows, self.reader, self.section, self.task)

    def batches(self, count: int, seed: int) -> list[Batch]:
        """Draw `count` training examples with labels, batched by similar length."""
        index = np.random.default_rng(seed).permutation(len(self.train))[:count].tolist()
        examples = self.examples(self.train.select(index))
        lengths = examples.lengths
        return [examples.batch(each) for each in batches_by_length(lengths, range(len(lengths)), self.batch_size)]

    def logits(self, model: nn.Module) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
        """Return the logits of the scored examples with their labels, by split."""
        alone = Alone(torch.device("cpu"))
        found = {name: predict(model, each, self.batch_size, alone) for name, each in self.scored.items()}
        return {name: both for name, both in found.items() if both is not None}

    def figures(self, model: nn.Module) -> dict[str, float]:
        """Return the task's `score`, and `agreement` and `distance` between these answers and the original's.

        Agreement is the share of answers kept (for numbers, the correlation), and the distance is in nats (for
        numbers, the error over the variance).
        """
        given, comparison = self.logits(model), Comparison(Answers(self.teacher))
        for name, (logits, _) in given.items():
            comparison.update({"logits": self.expected[name][0]}, {"logits": logits}, {})
        found = comparison.figures()
        scores = {name: self.task.compute(*both) for name, both in given.items()}
        return {
            "score": float(self.task.summarize(scores)["score"]),
            "agreement": found["agreement"] if "agreement" in found else found["correlation"],
            "distance": comparison.distance(),
        }


def add_options(options: argparse.ArgumentParser) -> None:
    """Add the arguments of `FineTuned`."""
    texts = [name for name in TASKS.names() if TASKS[name].modality == "text"]
    options.add_argument("--task", default="sst2", choices=texts, metavar="TASK", help="text task (default sst2)")
    options.add_argument("--model", type=Path, required=True, help="folder of the fine-tuned model")
    options.add_argument("--data", required=True, help="folder of the task's files")
    options.add_argument("--max-length", type=int, default=64, help="tokens per example (default 64)")
    options.add_argument("--batch-size", type=int, default=64, help="examples per batch (default 64)")
    options.add_argument("--score-at-most", type=int, help="maximum number of scored examples (default all)")
    options.add_argument("--sentences", type=int, default=2500, help="training examples per draw (default 2500)")


def timed(model: Any, shape: str) -> Batch:
    """Draw random tokens of a shape such as "32x64"."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(model.config.vocab_size, tuple(map(int, shape.split("x"))), generator=generator)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "token_type_ids": torch.zeros_like(ids)}
