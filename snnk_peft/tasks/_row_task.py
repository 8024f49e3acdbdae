"""`RowTask`: a task whose examples are texts (or words) with labels, loaded as a `datasets.DatasetDict`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from snnk_peft.errors import ConfigError
from snnk_peft.registry import did_you_mean
from snnk_peft.tasks._extras import require
from snnk_peft.tasks._scoring import Scored

if TYPE_CHECKING:
    import datasets


class RowTask(Scored, ABC):
    """A task whose examples are texts: it reads splits, and this loads them. Subclasses define `_read`."""

    def load(
        self,
        data_dir: str | Path | None = None,
        *,
        splits: Sequence[str] | None = None,
        max_train_samples: int | None = None,
        seed: int = 0,
        cache_dir: str | Path | None = None,
    ) -> datasets.DatasetDict:
        """Examples with the columns sentence1, (sentence2), label, idx; of a tagged table words, label, idx.

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
        found = self._read(None if data_dir is None else Path(data_dir).expanduser(), splits, cache_dir)
        if max_train_samples is not None and max_train_samples < len(found["train"]):
            chosen = np.random.default_rng(seed).choice(len(found["train"]), max_train_samples, replace=False)
            found["train"] = found["train"].select(np.sort(chosen).tolist())
        return require("datasets").DatasetDict(found)

    @abstractmethod
    def _read(
        self, data_dir: Path | None, splits: Sequence[str] | None, cache_dir: str | Path | None
    ) -> dict[str, datasets.Dataset]:
        """All rows of the splits; None as in `load`."""
