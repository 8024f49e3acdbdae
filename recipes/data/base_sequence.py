"""`SequenceTask`: a data set of long token sequences with class labels (Long Range Arena).

Unlike a `TaskSpec`, it brings its own tokens: symbols, bytes or pixels, with 0 for padding. Files are read into
`Sequences`; only numpy is needed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np

from snnk_peft.errors import ConfigError
from snnk_peft.tasks.base import Request, Task


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

    def __getitem__(self, name: str) -> np.ndarray:
        """Return the column "label", which every `Split` has."""
        if name != "label":
            raise KeyError(f"{name!r}: expected 'label'")
        return self.labels

    def select(self, indices: list[int]) -> Sequences:
        """Return the examples at these indices, in this order."""
        return Sequences(tuple([part[index] for index in indices] for part in self.tokens), self.labels[indices])


@dataclass(frozen=True)
class SequenceTask(Task):
    """A data set of token sequences; a split is `Sequences`.

    Args:
        name: registry key.
        read: (folder or archive, or None; split -> number of examples requested, None for all) -> split -> Sequences.
            May return more examples than requested. Raises a ConfigError with every fault found.
        vocab_size: number of token ids, 0 (padding) included.
        max_length: tokens per document in the published task, to which recipes cut longer ones.
        label_names: class names in the order of the integer ids.
        documents: 1, or 2 for pairs.
        generated: whether the task generates its data when no folder is given.
        metrics: keys of `snnk_peft.tasks.metrics.METRICS`.
        primary: see `Task`.
        splits: the checkpoint is chosen on the second and reported on the third.
        remade: builds the task for another document length, if shorter documents are generated, not cut.
    """

    modality: ClassVar[str] = "sequence"
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
    remade: Callable[[int], SequenceTask] | None = None

    def of_length(self, max_length: int | None) -> SequenceTask:
        """Return the task for documents of `max_length` tokens; itself for None, or if longer documents are cut.

        Raises:
            ConfigError: there is no task with this length.
        """
        if max_length in (None, self.max_length) or self.remade is None:
            return self
        assert max_length is not None
        return self.remade(max_length)

    def _read(self, request: Request) -> dict[str, Sequences]:
        path, splits = request.path, request.splits or self.splits
        if path is None and not self.generated:
            raise ConfigError(f"task {self.name!r} needs data.dir (data_dir=...): the folder of its official files")
        if path is not None and not path.exists():
            raise ConfigError(f"data_dir {path} does not exist; expected the official files of task {self.name!r}")
        return self.read(path, {split: request.limits.get(split) for split in splits})


def byte_tokens(values: bytes, max_length: int) -> np.ndarray:
    """Return (length,) uint16: the first `max_length` bytes, each plus 1, because 0 is padding."""
    return np.frombuffer(values[:max_length], np.uint8).astype(np.uint16) + 1


def with_validation(examples: Iterable[tuple[str, int, np.ndarray]], every: int) -> dict[str, Sequences]:
    """Split ("train" or "test", class id, tokens); every `every`-th training example per class is for validation."""
    rows: dict[str, tuple[list[np.ndarray], list[int]]] = {split: ([], []) for split in ("train", "validation", "test")}
    seen: Counter[int] = Counter()
    for part, label, ids in examples:
        seen[label] += part == "train"
        tokens, labels = rows["validation" if part == "train" and seen[label] % every == 0 else part]
        tokens.append(ids)
        labels.append(label)
    return {split: Sequences((tokens,), np.array(labels)) for split, (tokens, labels) in rows.items()}
