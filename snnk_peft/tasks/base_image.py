"""`ImageTask`: pictures with a class each, and `Images`, a split of them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from snnk_peft.errors import ConfigError
from snnk_peft.tasks._pictures import Pictures
from snnk_peft.tasks.base import Request, Task

if TYPE_CHECKING:
    from PIL.Image import Image


class Images:
    """The examples of one split.

    Args:
        pictures: all pictures of the source.
        labels: (n,) class ids.
        indices: which pictures the examples are; None for all, in order.
    """

    def __init__(self, pictures: Pictures, labels: np.ndarray, indices: np.ndarray | None = None):
        self._pictures = pictures
        self._indices = np.arange(len(pictures)) if indices is None else indices
        self.labels = np.asarray(labels, dtype=np.int64)
        if len(self.labels) != len(self._indices):
            raise ConfigError(f"{len(self._indices)} pictures and {len(self.labels)} labels; expected one label each")

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, name: str) -> np.ndarray:
        if name != "label":
            raise KeyError(f"images have no column {name!r}; expected 'label', and `picture(index)` for the rest")
        return self.labels

    def select(self, indices: Sequence[int]) -> Images:
        """The examples at these places, in this order."""
        chosen = np.asarray(indices, dtype=np.int64)
        return Images(self._pictures, self.labels[chosen], self._indices[chosen])

    def picture(self, index: int) -> Image:
        """Example `index`, decoded; UnreadableImageError names a damaged one."""
        return self._pictures.open(int(self._indices[index]))

    def name(self, index: int) -> str:
        """Where example `index` is."""
        return self._pictures.name(int(self._indices[index]))

    def digest(self, index: int) -> bytes | None:
        """SHA-256 of example `index` as it is kept: equal where pictures are; None if it cannot be read."""
        return self._pictures.digest(int(self._indices[index]))

    def fingerprint(self) -> str:
        """A digest of labels and pictures (of files: their names and sizes)."""
        found = hashlib.sha256(self.labels.tobytes())
        found.update(self._pictures.fingerprint(self._indices.tolist()))
        return found.hexdigest()


@dataclass(frozen=True)
class ImageTask(Task):
    """One data set of pictures; a split is `Images`.

    Args:
        name: registry key.
        read: (folder or archive, wanted splits) -> split -> Images. It raises ConfigError, with every fault it found.
        label_names: class names in the order of the integer ids.
        folder: the official files, for messages.
        source: the data set in words, for model cards.
        metrics: keys of `snnk_peft.tasks.metrics.METRICS`.
        primary: see `Task`.
        splits: "train" and what is evaluated.
    """

    modality: ClassVar[str] = "image"
    name: str
    read: Callable[[Path, Sequence[str]], dict[str, Images]]
    label_names: tuple[str, ...]
    folder: str
    source: str
    metrics: tuple[str, ...] = ("accuracy",)
    primary: tuple[str, ...] | None = None
    splits: tuple[str, ...] = ("train", "test")

    @property
    def hub_path(self) -> str | None:
        """Data set on the Hub, or None if it is not there."""
        return None

    def _read(self, request: Request) -> dict[str, Images]:
        path, wanted = request.path, list(request.splits or self.splits)
        if path is None:
            return self._fetched(wanted, request.cache_dir)
        if not path.exists():
            raise ConfigError(f"data_dir {path} does not exist; expected {self.folder}")
        found = self.read(path, wanted)
        if faults := [f"{path} holds no image of the {split} split" for split in wanted if not len(found[split])]:
            raise ConfigError(faults)
        return found

    def _fetched(self, wanted: Sequence[str], cache_dir: str | None) -> dict[str, Images]:
        """The splits of a task that was given no folder; one that fetches or makes them replaces this."""
        raise ConfigError(f"task {self.name!r} needs data.dir (data_dir=...): {self.folder}")


def label_fault(labels: Any, count: int, source: str) -> str | None:
    """Class ids beyond the `count` classes of a task, as a message; None if there are none."""
    values = np.asarray(labels)
    wrong = np.flatnonzero((values < 0) | (values >= count))
    if not len(wrong):
        return None
    at = int(wrong[0])
    return f"{source}, image {at}: class {values[at]} ({len(wrong)} such); expected 0 to {count - 1}"
