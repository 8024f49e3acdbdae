"""`SequenceTask`: a data set of long token sequences with class labels (Long Range Arena).

Other than a `TaskSpec`, it brings its own tokens: symbols, bytes or pixels, with 0 for padding. Files are read into
`Sequences`; nothing beyond numpy is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from snnk_peft.errors import ConfigError
from snnk_peft.registry import did_you_mean
from snnk_peft.tasks._scoring import Scored

# Which examples an evaluation on a subset sees must not depend on the seed of a run.
_SUBSET_SEED = 0


@dataclass(frozen=True)
class Sequences:
    """The examples of one split.

    Args:
        tokens: one list per document of an example (one, or two for pairs); each holds an array (length,) of unsigned
            ids per example, none of them 0.
        labels: (examples,) class ids.
    """

    tokens: tuple[list[np.ndarray], ...]
    labels: np.ndarray

    def __len__(self) -> int:
        return len(self.labels)

    def subset(self, size: int | None, seed: int) -> Sequences:
        """`size` examples drawn at random without replacement, in file order; all of them if there are no more."""
        if size is None or size >= len(self):
            return self
        chosen = np.sort(np.random.default_rng(seed).choice(len(self), size, replace=False))
        return Sequences(tuple([part[index] for index in chosen] for part in self.tokens), self.labels[chosen])

    def cut(self, max_length: int) -> Sequences:
        """The first `max_length` tokens of every document."""
        return replace(self, tokens=tuple([ids[:max_length] for ids in part] for part in self.tokens))


@dataclass(frozen=True)
class SequenceTask(Scored):
    """One data set of token sequences.

    Args:
        name: registry key.
        read: (folder or archive, or None; split -> how many examples are wanted, None for all) -> split -> Sequences.
            A reader may return more examples than are wanted. It raises ConfigError, with every fault it found.
        vocab_size: number of token ids, 0 (padding) included.
        max_length: tokens per document in the published task.
        label_names: class names in the order of the integer ids.
        documents: 1, or 2 for pairs.
        generated: whether the task makes its own data when no folder is given.
        metrics: keys of `snnk_peft.tasks.metrics.METRICS`.
        primary: see `Scored`.
        splits: the checkpoint is chosen on the second and reported on the third.
    """

    name: str
    read: Callable[[Path | None, Mapping[str, int | None]], dict[str, Sequences]]
    vocab_size: int
    max_length: int
    label_names: tuple[str, ...]
    documents: int = 1
    generated: bool = False
    metrics: tuple[str, ...] = ("accuracy",)
    primary: tuple[str, ...] | None = None
    splits: tuple[str, ...] = ("train", "validation", "test")

    def load(
        self,
        data_dir: str | Path | None = None,
        *,
        splits: Sequence[str] | None = None,
        max_length: int | None = None,
        max_samples: Mapping[str, int | None] | None = None,
        seed: int = 0,
    ) -> dict[str, Sequences]:
        """Read the splits.

        Args:
            data_dir: folder (or, where the task says so, archive) of the official files; None makes the data of a task
                that is `generated`.
            splits: which ones; None takes all.
            max_length: longer documents are cut; None takes the task's own length.
            max_samples: split -> keep a random subset of so many examples.
            seed: of the training subset; those of the other splits are always the same.

        Raises:
            ConfigError: no such folder or split, or faults in files, with their lines.
        """
        limits = max_samples or {}
        faults = [
            did_you_mean(f"split of {self.name}", split, list(self.splits))
            for split in (*(splits or ()), *limits)
            if split not in self.splits
        ]
        if data_dir is None and not self.generated:
            faults.append(f"task {self.name!r} needs data.dir (data_dir=...): the folder of its official files")
        path = None if data_dir is None else Path(data_dir).expanduser()
        if path is not None and not path.exists():
            faults.append(f"data_dir {path} does not exist; expected the official files of task {self.name!r}")
        if faults:
            raise ConfigError(faults)
        wanted = {split: limits.get(split) for split in (self.splits if splits is None else splits)}
        found = self.read(path, wanted)
        length = self.max_length if max_length is None else max_length
        return {
            split: found[split].subset(limit, seed if split == "train" else _SUBSET_SEED).cut(length)
            for split, limit in wanted.items()
        }


def byte_tokens(values: bytes, max_length: int) -> np.ndarray:
    """(length,) uint16: the first `max_length` bytes, each plus 1, because 0 is padding."""
    return np.frombuffer(values[:max_length], np.uint8).astype(np.uint16) + 1
