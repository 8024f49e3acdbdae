"""Convert a fine-tuned BERT of any text task without labels, in the ways of `sst2`: score, speed-up, seconds.

    python recipes/benchmarks/convert_models.py task --task mrpc --model runs/mrpc_full/model --data path/to/glue
    python recipes/benchmarks/convert_models.py task --task imdb --model runs/imdb_full/model --data path/to/aclImdb \\
        --max-length 512 --sentences 320 --batch-size 8 --score-at-most 1000 --shapes 4x512 32x64 1x2048

The model is one of recipes/finetune.py with method.name=full. Calibration reads training examples without labels, drawn
by the seed. The score is the task's own (the mean of what it reports: accuracy and F1, Pearson and Spearman, ...) on
its validation examples. The first of `--shapes` is what `plan` plans for and what "speed-up" is about. Figures go to
results/convert_task/TASK.json.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from _bench import RESULTS
from data import TASKS
from torch import nn

from _conversions.comparison import Conversion, add_conversions, compare_conversions
from _conversions.sst2 import conversions, timed_inputs
from snnk_cli.evaluation import Alone, evaluation_splits, predict
from snnk_cli.modality import modality_of
from snnk_cli.settings import DataSection
from snnk_cli.teacher import load_teacher
from snnk_peft.tasks.texts import batches_by_length, drawn


def add_options(options: argparse.ArgumentParser) -> None:
    """What is converted, and with what."""
    options.add_argument("--task", required=True, choices=[n for n in TASKS.names() if TASKS[n].modality == "text"])
    options.add_argument("--model", type=Path, required=True, help="folder of the fine-tuned classifier")
    options.add_argument("--data", required=True, help="folder that holds the task's files")
    options.add_argument("--max-length", type=int, default=128, help="tokens of an example (default 128)")
    options.add_argument("--sentences", type=int, default=2500, help="unlabelled training examples (default 2500)")
    options.add_argument("--batch-size", type=int, default=64, help="of calibration and scoring (default 64)")
    options.add_argument("--score-at-most", type=int, help="validation examples that are scored (default all)")
    add_conversions(options, seeds=1)
    options.set_defaults(output=None)


def run(arguments: argparse.Namespace) -> None:
    """Measure and write."""
    arguments.output = arguments.output or RESULTS / "convert_task" / f"{arguments.task}.json"

    task: Any = TASKS[arguments.task]
    data, modality = DataSection(dir=arguments.data, max_length=arguments.max_length), modality_of(task)
    teacher, reader = load_teacher(str(arguments.model), task)
    modality.check(teacher, reader, data)
    rows = task.load(data.dir, splits=["train", *task.validation_splits])
    train = rows["train"]
    splits = {
        name: modality.examples(part, reader, data, task)
        for name, part in evaluation_splits(task, rows, arguments.score_at_most).items()
    }

    def calibration(seed: int, conversion: Conversion) -> list[dict[str, torch.Tensor]]:
        chosen = drawn(len(train), min(len(train), arguments.sentences), seed)
        examples = modality.examples(train.select(chosen), reader, data, task)
        shares = batches_by_length(examples.lengths, list(range(len(examples))), arguments.batch_size)
        batches = [examples.batch(indices) for indices in shares]
        return [{name: values for name, values in batch.items() if name != "labels"} for batch in batches]

    def score(model: nn.Module) -> float:
        alone = Alone(torch.device("cpu"))
        found = {name: predict(model, part, arguments.batch_size, alone) for name, part in splits.items()}
        return float(task.summarize({name: task.compute(*both) for name, both in found.items() if both})["score"])

    compare_conversions(
        teacher,
        conversions(teacher.config.num_hidden_layers, arguments),
        calibration,
        score,
        timed_inputs(arguments.shapes, teacher.config.vocab_size, teacher.config.max_position_embeddings),
        arguments,
        title=f"{arguments.task} conversion without labels",
        scored="score",
    )
