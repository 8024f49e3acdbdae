"""Train an image classifier with low-rank layers, from scratch or from pretrained weights.

    python recipes/papers/programs/train_lowrank.py \\
        recipes/papers/configs/lowrank/cifar10_resnet20.yaml data.dir=path/to/cifar10
    python recipes/papers/programs/train_lowrank.py \\
        recipes/papers/configs/lowrank/cifar10_resnet20.yaml data.dir=path/to/cifar10 \\
        method.low_rank.init=spectral method.low_rank.rank_scale=0.05 method.low_rank.frobenius_decay=0.001
    python recipes/papers/programs/train_lowrank.py \\
        recipes/papers/configs/lowrank/cifar10_resnet20.yaml data.dir=path/to/cifar10 \\
        method.low_rank=null                                                        (the dense network)

Settings are `section.key=value`; `--help` lists them. A run killed at any moment continues with `--resume` and ends
with the same weights, bit for bit, as one that was never interrupted (on the same number of threads). SIGTERM and
Ctrl-C save first (exit codes 143, 130) and print the command that continues.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from papers.lib.lowrank_model import (
    dense_model,
    image_processor,
    init_errors,
    low_rank_model,
    make_optimizer,
    rebuilt_errors,
)
from papers.lib.lowrank_settings import LowRankConfig
from papers.lib.training import Training
from snnk_cli.evaluation import evaluation_splits
from snnk_cli.experiment import Data, Finished
from snnk_cli.launch import launch
from snnk_cli.modality import modality_of
from snnk_cli.task_settings import completed, find_task


class LowRankTraining(Training[LowRankConfig]):
    """Experiment that trains a convolutional network or a ViT on an `ImageTask` of `data.TASKS`."""

    settings, program = LowRankConfig, "papers/programs/train_lowrank.py"

    def __init__(self, config: LowRankConfig):
        self.task = find_task(config)
        super().__init__(completed(config, self.task))

    def data(self, accelerator: Any) -> Data:
        config, task = self.config, self.task
        modality, self.reader = modality_of(task), image_processor(config.model, task)
        for note in task.notes:
            accelerator.print(f"note: {note}")
        seed, limits = config.train.seed, {"train": config.data.max_train_samples}
        data = task.load(config.data.dir, max_samples=limits, seed=seed)
        examples = modality.training_examples(data["train"], self.reader, config.data, task, config.augment, seed)
        splits = {
            name: modality.examples(rows, self.reader, config.data, task)
            for name, rows in evaluation_splits(task, data, config.data.max_eval_samples).items()
        }
        return Data(examples, splits)

    def model(self, data: Data, accelerator: Any, resumed: bool) -> torch.nn.Module:
        """Build the dense network, then make it low-rank; everything in use is trained."""
        base: Any = dense_model(self.config.model, self.task)
        if hasattr(base, "config"):
            modality_of(self.task).check(base, self.reader, self.config.data)
        self.dense_parameters = sum(value.numel() for value in base.parameters())
        model, self.init_seconds = low_rank_model(base, self.config.method, self.config.train.seed, resumed)
        # The factors of a resumed run are no longer its initial ones.
        self.init_errors = None if resumed else init_errors(model)
        return model

    def optimizer(self, model: torch.nn.Module) -> torch.optim.Optimizer:
        return make_optimizer(model, self.config.train, self.config.method.frobenius_decay)

    def report(self, done: Finished) -> dict[str, Any]:
        """Return the score of the best checkpoint, and the costs of the network and its initialisation."""
        state, best = done.state, done.best
        errors = rebuilt_errors(self.config) if self.init_errors is None else self.init_errors
        return {
            "score": best["score"],
            "metrics": best["metrics"],
            "best_epoch": best["step"] / done.per_epoch,
            "total_parameters": done.counts["trainable"],  # replaced dense layers are unused
            "dense_parameters": self.dense_parameters,
            "init_seconds": self.init_seconds,
            # Error of the start against each dense layer's output; none for a dense network.
            **({"init_error": sum(errors.values()) / len(errors), "init_errors": errors} if errors else {}),
            "seconds_per_epoch": state.train_seconds / state.step * done.per_epoch,
        }


def main(argv: list[str] | None = None) -> int:
    """Train the network; return the exit code (0 done, 1 diverged, 2 wrong input, 130 or 143 stopped)."""
    return launch(LowRankTraining, __doc__, argv)


if __name__ == "__main__":
    sys.exit(main())
