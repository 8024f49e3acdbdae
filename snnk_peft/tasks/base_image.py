"""`ImageTask`: images with one class each, and `Images`, a split of them from any source.

An image is decoded on access by Pillow (the `recipes` extra), in the accessing process (a loader's worker), so a split
may be larger than memory.
"""

from __future__ import annotations

import hashlib
import io
import struct
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from snnk_peft.errors import ConfigError
from snnk_peft.tasks._files import read_bytes, require
from snnk_peft.tasks.base import Request, Task

if TYPE_CHECKING:
    from PIL.Image import Image

# Raised by Pillow for damaged files of its many formats.
DAMAGED = (OSError, SyntaxError, ValueError, EOFError, IndexError, KeyError, TypeError, OverflowError, struct.error)
# Modes with eight bits per channel, which convert to grey or RGB without loss of meaning.
_MODES = ("1", "L", "LA", "P", "PA", "RGB", "RGBA", "RGBX", "CMYK", "YCbCr")
LARGEST = 1 << 30
"""Bytes of an encoded picture; what claims more is damaged."""
_ORIENTATION = 0x0112  # the EXIF tag for the orientation of the camera


class UnreadableImageError(ValueError):
    """Raised for an image that cannot be decoded, or whose mode has no 8-bit equivalent; gives image and reason."""


class Pictures(ABC):
    """Images by index."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def name(self, index: int) -> str:
        """Return the location of image `index`, for messages."""

    @abstractmethod
    def _opened(self, index: int) -> Image: ...

    @abstractmethod
    def _content(self, index: int) -> bytes:
        """Return the stored image, encoded or as pixels."""

    @abstractmethod
    def _identity(self, index: int) -> bytes:
        """Return bytes that identify an image across runs; not the pixels of large sets, which take minutes to read."""

    def open(self, index: int) -> Image:
        """Decode image `index` in full and upright, like `datasets.Image` and transformers' pipelines.

        Raises:
            UnreadableImageError: a damaged image, or one with more than eight bits per channel.
        """
        bomb = require("PIL.Image").DecompressionBombError
        try:
            image = self._opened(index)
            image.load()
            if image.getexif().get(_ORIENTATION) is not None:
                image = require("PIL.ImageOps").exif_transpose(image)
        except (*DAMAGED, bomb) as error:
            raise UnreadableImageError(f"{self.name(index)}: cannot be decoded ({error})") from error
        if image.mode not in _MODES:
            raise UnreadableImageError(
                f"{self.name(index)}: mode {image.mode!r}; expected eight bits per channel ({', '.join(_MODES)}): "
                "convert it"
            )
        return image

    def digest(self, index: int) -> bytes | None:
        """Return the SHA-256 of the stored image `index`; None if it cannot be read."""
        try:
            return hashlib.sha256(self._content(index)).digest()
        except DAMAGED:
            return None

    def fingerprint(self, indices: Sequence[int]) -> bytes:
        """Compute a digest of the chosen images, in this order."""
        digest = hashlib.sha256()
        for index in indices:
            content = self._identity(index)
            digest.update(len(content).to_bytes(8, "little"))
            digest.update(content)
        return digest.digest()


class FilePictures(Pictures):
    """Images in files."""

    def __init__(self, root: Path, files: Sequence[str]):
        self._root, self._files = root, files

    def __len__(self) -> int:
        return len(self._files)

    def name(self, index: int) -> str:
        return str(self._root / self._files[index])

    def _opened(self, index: int) -> Image:
        # Read in full, because an image opened by name keeps its file open.
        image: Image = require("PIL.Image").open(io.BytesIO(self._content(index)))
        return image

    def _content(self, index: int) -> bytes:
        return read_bytes(self._root / self._files[index], LARGEST)

    def _identity(self, index: int) -> bytes:
        try:
            size = (self._root / self._files[index]).stat().st_size
        except OSError:  # a broken link, reported with the other unreadable images
            size = -1
        return f"{self._files[index]}\n{size}".encode()


def converted(image: Any, channels: int) -> Image:
    """Convert an image to grey (1 channel) or RGB (3)."""
    mode = {1: "L", 3: "RGB"}[channels]
    # A palette with transparency is converted via RGBA, or Pillow warns.
    if image.mode == "P" and "transparency" in image.info:
        image = image.convert("RGBA")
    result: Image = image if image.mode == mode else image.convert(mode)
    return result


class Images:
    """The examples of one split.

    Args:
        pictures: all images of the source.
        labels: (n,) class ids.
        indices: image index of each example; None for all, in order.
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
        """Return the examples at these indices, in this order."""
        chosen = np.asarray(indices, dtype=np.int64)
        return Images(self._pictures, self.labels[chosen], self._indices[chosen])

    def picture(self, index: int) -> Image:
        """Decode example `index`; UnreadableImageError names a damaged one."""
        return self._pictures.open(int(self._indices[index]))

    def name(self, index: int) -> str:
        return self._pictures.name(int(self._indices[index]))

    def digest(self, index: int) -> bytes | None:
        """Return the SHA-256 of the stored example `index`, equal for equal images; None if it cannot be read."""
        return self._pictures.digest(int(self._indices[index]))

    def fingerprint(self) -> str:
        """Compute a digest of labels and images (for files, their names and sizes)."""
        digest = hashlib.sha256(self.labels.tobytes())
        digest.update(self._pictures.fingerprint(self._indices.tolist()))
        return digest.hexdigest()


@dataclass(frozen=True)
class ImageTask(Task):
    """One data set of images; a split is `Images`.

    Args:
        name: registry key.
        read: function (folder or archive, requested splits) -> {split: Images}; raises ConfigError with all faults.
        label_names: class names in the order of the integer ids.
        folder: the official files, for messages.
        source: description of the data set, for model cards.
        metrics: keys of `snnk_peft.tasks.metrics.METRICS`.
        primary: see `Task`.
        splits: "train" and the evaluation splits.
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
        """The data set on the Hub, or None."""
        return None

    def _read(self, request: Request) -> dict[str, Images]:
        path, wanted = request.path, list(request.splits or self.splits)
        if path is None:
            return self._fetched(wanted, request.cache_dir)
        if not path.exists():
            raise ConfigError(f"data_dir {path} does not exist; expected {self.folder}")
        images = self.read(path, wanted)
        if faults := [f"{path} holds no image of the {split} split" for split in wanted if not len(images[split])]:
            raise ConfigError(faults)
        return images

    def _fetched(self, wanted: Sequence[str], cache_dir: str | None) -> dict[str, Images]:
        """Return the splits if no folder is given; overridden by tasks that download or generate them."""
        raise ConfigError(f"task {self.name!r} needs data.dir (data_dir=...): {self.folder}")


def label_fault(labels: Any, count: int, source: str) -> str | None:
    """Return a message if class ids exceed the `count` classes of a task, else None."""
    values = np.asarray(labels)
    wrong = np.flatnonzero((values < 0) | (values >= count))
    if not len(wrong):
        return None
    at = int(wrong[0])
    return f"{source}, image {at}: class {values[at]} ({len(wrong)} such); expected 0 to {count - 1}"
