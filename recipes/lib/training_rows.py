"""The training examples of fine-tuning: their weights, the rows held back, those to calibrate on, and the threshold."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch.nn.functional import one_hot

from snnk_cli.data import AroundExamples, Examples, ExampleSet
from snnk_cli.settings import FinetuneConfig
from snnk_peft.errors import ConfigError
from snnk_peft.tasks.base import held_back


class WeightedExamples(AroundExamples):
    """Examples whose cross-entropy is weighted in training by w(y), the weight of their class.

    The weight w(y) takes the place of the label's 1 in soft_labels (batch, classes).

    Args:
        examples: examples with one class each.
        weights: weights of the classes, (classes,).
    """

    def __init__(self, examples: ExampleSet, weights: torch.Tensor):
        super().__init__(examples)
        self.weights = weights

    def batches(
        self, wanted: Sequence[Sequence[int]], device: torch.device | str = "cpu", epoch: int | None = None
    ) -> Iterator[dict[str, torch.Tensor]]:
        for inputs in self.inner.batches(wanted, device, epoch):
            if epoch is not None:
                labels = inputs.pop("labels", None)
                soft = inputs.get("soft_labels")
                if soft is None and labels is not None:
                    kept = labels >= 0
                    soft = one_hot(labels.clamp_min(0), len(self.weights)) * kept[:, None]
                assert soft is not None
                inputs["soft_labels"] = soft * self.weights.to(soft.device)
            yield inputs


def balanced_weights(labels: torch.Tensor, classes: int) -> torch.Tensor:
    """Return n / (classes · examples of the class), (classes,); classes without examples count as having one.

    Args:
        labels: (n,); negative ones are ignored.
        classes: number of classes.
    """
    counts = torch.bincount(labels[labels >= 0], minlength=classes).clamp_min(1)
    return counts.sum() / (classes * counts.float())


def calibration_batches(
    examples: Examples,
    config: FinetuneConfig,
    device: torch.device | str,
    rank: int = 0,
    world: int = 1,
    count: int | None = None,
    by_length: bool = False,
) -> list[dict[str, torch.Tensor]]:
    """Draw this process's share of `method.calibrate_samples`, or `count`, training examples as model inputs.

    Batches `by_length` have less padding, but are not random samples.
    """
    generator = torch.Generator().manual_seed(config.train.seed)
    count = config.method.calibrate_samples if count is None else count
    chosen = torch.randperm(len(examples), generator=generator)[:count].tolist()
    if by_length:
        chosen.sort(key=lambda index: examples.lengths[index])
    # Whole batches are held out to choose the regularisation, so use at least eight, to make one a small share, and
    # at least one per process.
    size = min(config.train.eval_batch_size, max(1, len(chosen) // max(8, world)))
    starts = range(0, len(chosen), size)[rank::world]
    return [examples.batch(chosen[start : start + size], device) for start in starts]


def held_back_rows(rows: Any, share: float, seed: int = 0) -> tuple[Any, Any]:
    """Split rows into (rows to train on, rows to choose the epoch on), stratified if labels are classes.

    Args:
        rows: a `datasets.Dataset` with the column label.
        share: share to hold back.
        seed: seed of the choice.
    """
    labels = rows["label"][:]
    groups = np.asarray(labels) if isinstance(labels[0], int | np.integer) else np.zeros(len(rows), int)
    held = held_back(groups, share, seed)
    if not held:
        raise ConfigError(
            f"train.choose_share is {share}: none of {len(rows)} training examples can be held back (no class has two)"
        )
    return rows.select(np.setdiff1d(np.arange(len(rows)), held).tolist()), rows.select(held)


def matched_threshold(logits: torch.Tensor, labels: torch.Tensor) -> float:
    """Find the threshold that as many logit differences exceed as there are examples of the second class.

    The predicted rates of both classes are then correct on these examples, whereas argmax neglects the rarer class. 0
    if all are of one class.

    Args:
        logits: (n, 2).
        labels: (n,) of 0 and 1.
    """
    margins = (logits[:, 1] - logits[:, 0]).double().sort(descending=True).values
    count = int(labels.sum())
    return 0.0 if count in (0, len(margins)) else float(margins[count - 1 : count + 1].mean())
