"""`Task`: description, loading and scoring of a data set; `TextTask`, whose examples are texts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import numpy as np

from snnk_peft.errors import ConfigError
from snnk_peft.registry import did_you_mean
from snnk_peft.tasks._files import require
from snnk_peft.tasks.metrics import METRICS, load_metric

if TYPE_CHECKING:
    import datasets
    import evaluate

# The examples of an evaluation on a subset must not depend on the seed of the run.
_EVALUATION_SEED = 0

IGNORED = -100
"""The label of tokens that are not scored, as in torch's cross entropy."""


class Split(Protocol):
    """A split as returned by `Task.load`, for any kind of example: their number, labels, and subsets.

    Examples depend on the class of the task: rows of a `datasets.Dataset` (`TextTask`), `Images` (`ImageTask`),
    `Sequences` (`SequenceTask`), `Columns` (`ColumnsTask`). Recipes turn a split into an ExampleSet, which makes
    batches.
    """

    def __len__(self) -> int: ...

    def __getitem__(self, name: str, /) -> Any:
        """Return a column; every task has "label": class ids, numbers, or one list of ids per example."""

    def select(self, indices: list[int], /) -> Split:
        """Return the examples at these indices, in this order."""


@dataclass(frozen=True)
class Request:
    """The checked arguments of `Task.load`; `limits` holds the values of `max_samples`."""

    path: Path | None
    splits: Sequence[str] | None
    limits: Mapping[str, int]
    cache_dir: str | None


class Task(ABC):
    """One data set with its labels and metrics. Subclasses are frozen dataclasses and define `_read`.

    Attributes:
        modality: kind of example, "text", "image", "sequence" or "columns"; used by recipes.
        name: registry key.
        label_names: class names in the order of the integer ids; None for regression.
        metrics: keys of `snnk_peft.tasks.metrics.METRICS` that are reported.
        primary: those whose mean is the `score` that selects the best checkpoint; None uses all `metrics`.
        splits: "train" first, then those for evaluation.
        notes: notes about the data for the user, shown before training.
    """

    modality: ClassVar[str]
    name: str
    label_names: tuple[str, ...] | None
    metrics: tuple[str, ...]
    primary: tuple[str, ...] | None
    splits: tuple[str, ...]
    notes: tuple[str, ...] = ()

    def load(
        self,
        data_dir: str | Path | None = None,
        *,
        splits: Sequence[str] | None = None,
        max_samples: Mapping[str, int | None] | None = None,
        seed: int = 0,
        cache_dir: str | Path | None = None,
    ) -> MutableMapping[str, Any]:
        """Load the data as split name -> examples, a `Split` each.

        Args:
            data_dir: folder of the official files (text: with one subfolder per task, or the task's own; sequences: for
                some tasks also an archive). None downloads or generates the data, if the task supports it.
            splits: the splits to load, all of which must exist; None loads all that exist, including train.
            max_samples: split -> size of a random subset to keep, in the order of the files; None keeps all.
            seed: seed of the training subset; subsets of the other splits are always the same. The global random state
                is not changed.
            cache_dir: cache folder of `datasets` for downloads from the Hub; None for its default.

        Raises:
            ConfigError: no such folder, file or split, the Hub is unreachable, or faults in files, with their lines.
            ImportError: the task needs the `recipes` extra, which is not installed.
        """
        splits = [splits] if isinstance(splits, str) else splits
        limits = {split: size for split, size in (max_samples or {}).items() if size is not None}
        faults = [
            did_you_mean(f"split of {self.name}", split, list(self.splits))
            for split in dict.fromkeys((*(splits or ()), *limits))
            if split not in self.splits
        ]
        if splits is not None and not splits:
            faults.append(f"splits is empty; expected some of {', '.join(self.splits)}, or None for all")
        for split, size in limits.items():
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                faults.append(f"max_samples of {split} is {size!r}; expected a whole number of at least 1, or None")
            if splits is not None and split not in splits:
                faults.append(f"max_samples of {split} is {size!r}, but splits {list(splits)} has no {split}")
        if faults:
            raise ConfigError(faults)
        path = None if data_dir is None else Path(data_dir).expanduser()
        examples = self._read(Request(path, splits, limits, None if cache_dir is None else str(cache_dir)))
        for split, size in limits.items():
            if split in examples and size < (count := len(examples[split])):
                rng = np.random.default_rng(seed if split == "train" else _EVALUATION_SEED)
                examples[split] = examples[split].select(np.sort(rng.choice(count, size, replace=False)).tolist())
        return examples

    @abstractmethod
    def _read(self, request: Request) -> MutableMapping[str, Any]:
        """Read the splits; more examples than the limit may be returned."""

    def check(self, settings: Mapping[str, Any]) -> list[str]:
        """List the faults of the settings (see `with_settings`) that can be found without reading the data."""
        return [
            f"{key} is {value!r}, but task {self.name} has its own files; set task=table, or leave it out"
            for key, value in settings.items()
            if value is not None
        ]

    def with_settings(self, settings: Mapping[str, Any], model: Mapping[str, Any] | None = None) -> Task:
        """Return the task itself; a `Table` without data becomes a task here."""
        return self

    @property
    def inferred(self) -> dict[str, Any]:
        """The settings that `with_settings` inferred, for the record of a run."""
        return {}

    @property
    def title(self) -> str:
        """The name of the data in the title of a model card."""
        return self.name

    @property
    def validation_splits(self) -> tuple[str, ...]:
        """All splits but train."""
        return self.splits[1:]

    @property
    def num_labels(self) -> int:
        """The width of the model's output: number of classes, or 1 for regression."""
        return 1 if self.label_names is None else len(self.label_names)

    @property
    def tokens(self) -> bool:
        """True if every word of an example has a label; otherwise the whole example has one."""
        return False

    @property
    def problem_type(self) -> str | None:
        """The `problem_type` of a transformers config: "regression", "single_label_classification" or None."""
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
        """Compute all metrics of this task on one split, and `score`, which selects a checkpoint.

        Args:
            predictions: array or tensor. Classification: logits (examples, num_labels) or class ids (examples,).
                Regression: (examples,) or (examples, 1).
            references: true labels, (examples,).

        Returns:
            One float per metric, and `score`; larger is better.

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
        """Combine the `compute` results of several validation splits: their mean, and each under "split/metric".

        Args:
            results: split name -> result of `compute`. The result of a single split is returned unchanged.
        """
        if not results:
            raise ConfigError(f"task {self.name!r}: no results to summarize; expected {self.validation_splits}")
        each = list(results.values())
        if len(each) == 1:
            return dict(each[0])
        means = {key: float(np.mean([result[key] for result in each])) for key in each[0]}
        return {**means, **{f"{split}/{key}": v for split, result in results.items() for key, v in result.items()}}

    def metric(self, **kwargs: Any) -> evaluate.CombinedEvaluations:
        """Return this task's metrics as one `evaluate` object (offline); `kwargs` go to each `evaluate.Metric`."""
        return require("evaluate").combine([load_metric(name, **kwargs) for name in self.metrics])


def to_numpy(values: Any) -> np.ndarray:
    """Convert a list, array or tensor (on any device, including bfloat16) to a numpy array."""
    if hasattr(values, "detach"):
        values = values.detach().cpu().double()
    return np.asarray(values)


class TextTask(Task):
    """A task whose examples are texts (or words): a split is a `datasets.Dataset`, all splits a `DatasetDict`.

    Its columns are sentence1, (sentence2), label, idx; for tagged words: words, label, idx.
    """

    modality: ClassVar[str] = "text"

    @property
    @abstractmethod
    def text_columns(self) -> tuple[str, ...]:
        """The text columns: ("sentence1",) or ("sentence1", "sentence2"); ("words",) if every word has a label."""

    def _dataset(self, texts: Sequence[Sequence[Any]], labels: Sequence[Any], idx: Sequence[int]) -> datasets.Dataset:
        """Build one split from its columns, one list per text column."""
        columns = dict(zip((*self.text_columns, "label", "idx"), (*texts, labels, idx), strict=True))
        return require("datasets").Dataset.from_dict(columns, features=self._features())

    def _features(self) -> datasets.Features:
        hf = require("datasets")
        label: Any = hf.Value("float32") if self.label_names is None else hf.ClassLabel(names=list(self.label_names))
        text: Any = hf.Value("string")
        if self.tokens:
            label, text = hf.List(label), hf.List(text)
        return hf.Features({**dict.fromkeys(self.text_columns, text), "label": label, "idx": hf.Value("int32")})


def held_back(groups: np.ndarray, share: float, seed: int) -> list[int]:
    """Return the sorted indices of the examples to hold out: a share of every group, at least one of two or more."""
    rng = np.random.default_rng(seed)
    held: list[int] = []
    for group in np.unique(groups):
        members = rng.permutation(np.flatnonzero(groups == group))
        size = min(max(1, round(share * len(members))), len(members) - 1)
        held += members[:size].tolist()
    return sorted(held)
