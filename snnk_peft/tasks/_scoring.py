"""What every task with class labels (or one number per example) has in common: label names, metrics, a score."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from snnk_peft.errors import ConfigError
from snnk_peft.tasks._extras import require
from snnk_peft.tasks.metrics import METRICS, load_metric

if TYPE_CHECKING:
    import evaluate


class Scored:
    """Base of the tasks; the attributes are fields of the dataclasses that inherit from it.

    Attributes:
        name: registry key.
        label_names: class names in the order of the integer ids; None for regression.
        metrics: keys of `snnk_peft.tasks.metrics.METRICS` that are reported.
        primary: those whose mean is the `score` that selects the best checkpoint; None takes all `metrics`.
        splits: "train" first, the others are for evaluation.
        notes: what a user should know about the data before training.
    """

    name: str
    label_names: tuple[str, ...] | None
    metrics: tuple[str, ...]
    primary: tuple[str, ...] | None
    splits: tuple[str, ...]
    notes: tuple[str, ...] = ()

    def with_settings(self, settings: Mapping[str, Any], model: Mapping[str, Any] | None = None) -> Scored:
        """The task itself; `Table`, which is none yet, becomes one here."""
        return self

    @property
    def title(self) -> str:
        """What the data are called in the title of a model card."""
        return self.name

    @property
    def validation_splits(self) -> tuple[str, ...]:
        """All splits but train."""
        return self.splits[1:]

    @property
    def num_labels(self) -> int:
        """Width of the model's output: number of classes, 1 for regression."""
        return 1 if self.label_names is None else len(self.label_names)

    @property
    def tokens(self) -> bool:
        """Whether every word of an example has a label; otherwise the example as a whole has one."""
        return False

    @property
    def problem_type(self) -> str | None:
        """As in a transformers model config: "regression", "single_label_classification" or None."""
        return "regression" if self.label_names is None else "single_label_classification"

    @property
    def id2label(self) -> dict[int, str] | None:
        """Class id -> name, for a model config; None for regression."""
        return None if self.label_names is None else dict(enumerate(self.label_names))

    @property
    def label2id(self) -> dict[str, int] | None:
        """Class name -> id, for a model config; None for regression."""
        return None if self.label_names is None else {name: i for i, name in enumerate(self.label_names)}

    def compute(self, predictions: Any, references: Any) -> dict[str, float]:
        """All metrics of this task on one split, and `score`, the one to select a checkpoint by.

        Args:
            predictions: array or tensor. Classification: logits (examples, num_labels) or class ids (examples,).
                Regression: (examples,) or (examples, 1).
            references: true labels, (examples,).

        Returns:
            One float per metric plus `score`; larger is better.

        Raises:
            ConfigError: wrong shapes, NaN, or class ids out of range.
        """
        predicted, true = to_numpy(predictions), to_numpy(references)
        if self.label_names is not None and predicted.shape == (len(true), self.num_labels):
            if np.isnan(predicted).any():
                raise ConfigError(f"task {self.name!r}: logits contain NaN; expected numbers (did training diverge?)")
            predicted = predicted.argmax(-1)
        elif predicted.shape == (len(true), 1):
            predicted = predicted[:, 0]
        if true.ndim != 1 or not len(true) or predicted.shape != true.shape:
            wide = "" if self.label_names is None else f" or logits (examples, {self.num_labels})"
            raise ConfigError(
                f"task {self.name!r}: predictions {np.shape(predictions)}, references {true.shape}; expected at least "
                f"one example, both (examples,){wide}"
            )
        faults = [
            fault
            for fault in (self._fault("predictions", predicted), self._fault("references", true))
            if fault is not None
        ]
        if faults:
            raise ConfigError(faults)
        result = {name: METRICS[name](predicted, true) for name in self.metrics}
        return {**result, "score": float(np.mean([result[name] for name in self.primary or self.metrics]))}

    def _fault(self, what: str, values: np.ndarray) -> str | None:
        if self.label_names is None:
            bad, expected = ~np.isfinite(values), "finite numbers"
        else:
            bad, expected = ~np.isin(values, np.arange(self.num_labels)), f"class ids 0 to {self.num_labels - 1}"
        if not bad.any():
            return None
        at = int(bad.argmax())
        return f"task {self.name!r}: {what}[{at}] is {values[at]} ({int(bad.sum())} such); expected {expected}"

    def summarize(self, results: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
        """One dict from the `compute` results of several validation splits: their mean, and each under "split/metric".

        Args:
            results: split name -> result of `compute`. With one split, its result is returned unchanged.
        """
        if not results:
            raise ConfigError(f"task {self.name!r}: no results to summarize; expected {self.validation_splits}")
        each = list(results.values())
        if len(each) == 1:
            return dict(each[0])
        means = {key: float(np.mean([result[key] for result in each])) for key in each[0]}
        return {**means, **{f"{split}/{key}": v for split, result in results.items() for key, v in result.items()}}

    def metric(self, **kwargs: Any) -> evaluate.CombinedEvaluations:
        """This task's metrics as one `evaluate` object (offline); `kwargs` go to each `evaluate.Metric`."""
        return require("evaluate").combine([load_metric(name, **kwargs) for name in self.metrics])


def to_numpy(values: Any) -> np.ndarray:
    """Array of numbers from a list, array or tensor (on any device, bfloat16 included)."""
    if hasattr(values, "detach"):
        values = values.detach().cpu().double()
    return np.asarray(values)
