"""`TaskSpec`: everything a training program must know about one data set, as plain data.

A task names its columns and labels in two places (the Hub's copy and the official files) and maps both to the same
columns: `sentence1`, for pairs also `sentence2`, then `label` and `idx`. Label ids are the Hub's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from snnk_peft.errors import ConfigError
from snnk_peft.registry import did_you_mean
from snnk_peft.tasks._extras import require
from snnk_peft.tasks._loading import load_folder, load_hub
from snnk_peft.tasks._scoring import Scored
from snnk_peft.tasks._tsv import TsvLayout
from snnk_peft.tasks.metrics import METRICS

if TYPE_CHECKING:
    import datasets


@dataclass(frozen=True)
class TaskSpec(Scored):
    """One data set with its labels and metrics.

    Args:
        name: registry key, and the configuration name on the Hub.
        folder: name of the folder of official files, e.g. "CoLA".
        tsv: layout of the official files.
        hub_columns: the one or two text columns on the Hub, in the order sentence1, sentence2.
        label_names: class names in the order of the Hub's integer ids; None for regression.
        metrics: keys of `snnk_peft.tasks.metrics.METRICS` that are reported.
        primary: those whose mean is the `score` that selects the best checkpoint; None takes all `metrics`.
        splits: names of the splits with public labels; "train" first, the others are validation splits.
        files: official file of each split, without `.tsv`.
        hub_path: data set on the Hub, or None if it is not there.

    Raises:
        ConfigError: fields that contradict each other, all of them at once.
    """

    name: str
    folder: str
    tsv: TsvLayout
    hub_columns: tuple[str, ...]
    label_names: tuple[str, ...] | None
    metrics: tuple[str, ...]
    primary: tuple[str, ...] | None = None
    splits: tuple[str, ...] = ("train", "validation")
    files: tuple[str, ...] = ("train", "dev")
    hub_path: str | None = "nyu-mll/glue"

    def __post_init__(self) -> None:
        faults = [did_you_mean("metric", name, sorted(METRICS)) for name in self.metrics if name not in METRICS]
        if not self.metrics:
            faults.append(f"metrics is empty; expected some of {', '.join(METRICS)}")
        if self.primary is not None and (not self.primary or not set(self.primary) <= set(self.metrics)):
            faults.append(f"primary is {self.primary}; expected some of metrics {self.metrics}, or None for all")
        if len(self.splits) != len(self.files) or len(self.splits) < 2 or self.splits[0] != "train":
            faults.append(f"splits {self.splits}, files {self.files}: expected a file per split, train first")
        if len(self.hub_columns) != len(self.tsv.text) or len(self.hub_columns) not in (1, 2):
            faults.append(f"hub_columns {self.hub_columns}, tsv.text {self.tsv.text}: expected one or two text columns")
        if len(self.label_names or ()) != len(self.tsv.labels or ()):
            faults.append(f"label_names {self.label_names}, tsv.labels {self.tsv.labels}: expected one cell per class")
        if faults:
            raise ConfigError([f"task {self.name!r}: {fault}" for fault in faults])

    @property
    def hub_config(self) -> str:
        """Configuration name on the Hub."""
        return self.name

    @property
    def source(self) -> str:
        """The data set in words, for model cards."""
        return f"{self.folder} ({self.hub_path}, {self.hub_config})"

    @property
    def text_columns(self) -> tuple[str, ...]:
        """("sentence1",) or ("sentence1", "sentence2")."""
        return ("sentence1", "sentence2")[: len(self.hub_columns)]

    def load(
        self,
        data_dir: str | Path | None = None,
        *,
        splits: Sequence[str] | None = None,
        max_train_samples: int | None = None,
        seed: int = 0,
        cache_dir: str | Path | None = None,
    ) -> datasets.DatasetDict:
        """Examples with the columns sentence1, (sentence2), label, idx.

        Args:
            data_dir: folder of official files, either with one subfolder per task (`<data_dir>/RTE/train.tsv`) or the
                task's own; None loads from the Hub.
            splits: which splits, all of which must exist; None takes train and every validation split there is (MNLI:
                at least one of matched and mismatched).
            max_train_samples: keep a random subset of this many training examples, in file order.
            seed: of that subset; the global random generators are not touched.
            cache_dir: where `datasets` keeps what it fetches from the Hub; None is its default.

        Raises:
            ConfigError: no such folder, file or split, the Hub out of reach, or faults in files, with their lines.
            ImportError: the `recipes` extra is not installed.
        """
        splits = [splits] if isinstance(splits, str) else splits
        faults = [
            did_you_mean(f"split of {self.name}", split, list(self.splits))
            for split in splits or ()
            if split not in self.splits
        ]
        if splits is not None and not splits:
            faults.append(f"splits is empty; expected some of {', '.join(self.splits)}, or None for all")
        if max_train_samples is not None:
            if isinstance(max_train_samples, bool) or not isinstance(max_train_samples, int) or max_train_samples < 1:
                faults.append(f"max_train_samples is {max_train_samples!r}; expected a whole number of at least 1")
            if splits is not None and "train" not in splits:
                faults.append(f"max_train_samples is {max_train_samples}, but splits {list(splits)} has no train")
        if faults:
            raise ConfigError(faults)
        if data_dir is None:
            found = load_hub(self, splits, cache_dir)
        else:
            found = load_folder(self, Path(data_dir).expanduser(), splits)
        if max_train_samples is not None and max_train_samples < len(found["train"]):
            chosen = np.random.default_rng(seed).choice(len(found["train"]), max_train_samples, replace=False)
            found["train"] = found["train"].select(np.sort(chosen).tolist())
        return require("datasets").DatasetDict(found)
