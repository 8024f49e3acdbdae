"""Train a small Transformer from scratch on a Long Range Arena task: softmax or any linear attention, same recipe.

    python recipes/papers/programs/train_lra.py recipes/papers/configs/lra/listops.yaml
    python recipes/papers/programs/train_lra.py \\
        recipes/papers/configs/lra/text.yaml data.dir=path/to/imdb method.attention=softmax
    python recipes/papers/programs/train_lra.py \\
        recipes/papers/configs/lra/listops.yaml train.max_cpu_minutes=15 train.schedule=constant
    python recipes/papers/programs/train_lra.py \\
        recipes/papers/configs/lra/listops.yaml method.attention=performer_pytorch  (a peer library)

Settings are `section.key=value`; `--help` lists them. The test accuracy reported is that of the checkpoint with the
best validation score. A run killed at any moment continues with `--resume` and ends with the same weights, bit for
bit, as one that was never interrupted (on the same number of threads). SIGTERM and Ctrl-C save first (exit codes 143,
130) and print the command that continues.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from papers.lib.lra_model import build_classifier
from papers.lib.lra_settings import PERFORMER, LongRangeConfig
from papers.lib.performer_peer import require_performer
from papers.lib.sequences import SequenceExamples
from papers.lib.training import Training
from snnk_cli.experiment import Data, Finished
from snnk_cli.launch import launch
from snnk_cli.terminal import read_log


class LongRange(Training[LongRangeConfig]):
    """Experiment that trains a small encoder from scratch on a `SequenceTask` of `data.TASKS`."""

    settings, program = LongRangeConfig, "papers/programs/train_lra.py"

    def __init__(self, config: LongRangeConfig):
        super().__init__(config)
        self.task, self.max_length = config.read_task()

    def data(self, accelerator: Any) -> Data:
        if self.config.method.attention == PERFORMER:
            require_performer()
        data = self.config.data
        limits = {name: getattr(data, f"max_{name}_samples") for name in ("train", "validation", "test")}
        rows = self.task.load(data.dir, max_samples=limits, seed=self.config.train.seed)
        splits = {name: SequenceExamples(part, self.max_length) for name, part in rows.items()}
        return Data(splits["train"], {"validation": splits["validation"]}, {"test": splits["test"]})

    def model(self, data: Data, accelerator: Any, resumed: bool) -> torch.nn.Module:
        """Build a freshly initialised encoder with a head; all of it is trained."""
        config = self.config
        return build_classifier(self.task, config.model, config.method, self.max_length, config.train.seed)

    def report(self, done: Finished) -> dict[str, Any]:
        """Return test accuracy of the checkpoint best on validation, the learning curve, and the cost of a step."""
        rows = read_log(done.folder / "log.jsonl")
        return {
            "accuracy": done.test["accuracy"],
            "validation_accuracy": done.best["metrics"]["accuracy"],
            "learning_curve": [[row["step"], row["accuracy"]] for row in rows if "accuracy" in row],
            **done.costs,
            "peak_memory_bytes_before_training": done.memory_before,
            "longest_sequence": max(done.data.train.lengths),
        }

    def summary(self, done: Finished, figures: Mapping[str, Any]) -> str:
        return (
            f"test accuracy {done.test['accuracy']:.4f}, validation {done.best['score']:.4f} at step "
            f"{done.best['step']}; everything is in {done.folder}"
        )


def main(argv: list[str] | None = None) -> int:
    """Train the encoder; return the exit code (0 done, 1 diverged, 2 wrong input, 130 or 143 stopped)."""
    return launch(LongRange, __doc__, argv)


if __name__ == "__main__":
    sys.exit(main())
