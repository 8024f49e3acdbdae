"""Images kept in memory, as an array or as encoded bytes, and images of data sets on the Hub.

The latter stay encoded, in the memory-mapped files of `datasets`.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from snnk_peft.errors import ConfigError
from snnk_peft.registry import did_you_mean
from snnk_peft.tasks import Images, ImageTask
from snnk_peft.tasks._files import listed, read_bytes, require
from snnk_peft.tasks.base_image import LARGEST, Pictures, label_fault

if TYPE_CHECKING:
    from PIL.Image import Image


class ArrayPictures(Pictures):
    """Images of one size, in an array.

    Args:
        pixels: (n, height, width) grey or (n, height, width, 3) RGB, uint8.
        source: the file they come from.
    """

    def __init__(self, pixels: np.ndarray, source: str):
        self._pixels, self._source = pixels, source

    def __len__(self) -> int:
        return len(self._pixels)

    def name(self, index: int) -> str:
        """Return the file and the number of the image."""
        return f"{self._source}, image {index}"

    def _opened(self, index: int) -> Image:
        image: Image = require("PIL.Image").fromarray(self._pixels[index])
        return image

    def _content(self, index: int) -> bytes:
        return self._pixels[index].tobytes()

    def _identity(self, index: int) -> bytes:
        return self._content(index)


class EncodedPictures(Pictures):
    """Encoded images in memory.

    Args:
        contents: PNG, JPEG or the like.
        names: name of each image's source.
    """

    def __init__(self, contents: Sequence[bytes], names: Sequence[str]):
        self._contents, self._names = contents, names

    def __len__(self) -> int:
        return len(self._contents)

    def name(self, index: int) -> str:
        """Return the given name."""
        return self._names[index]

    def _opened(self, index: int) -> Image:
        image: Image = require("PIL.Image").open(io.BytesIO(self._contents[index]))
        return image

    def _content(self, index: int) -> bytes:
        return self._contents[index]

    def _identity(self, index: int) -> bytes:
        return self._contents[index]


if TYPE_CHECKING:
    from PIL.Image import Image


@dataclass(frozen=True)
class HubSource:
    """A data set on the Hub.

    Args:
        path: its id (or a folder in the Hub's layout).
        image: column of the images.
        label: column of the class ids.
        renamed: (name there, name here) of classes with different names.
        access: what the user must do first, for messages.
    """

    path: str
    image: str = "image"
    label: str = "label"
    renamed: tuple[tuple[str, str], ...] = ()
    access: str = ""


class HubPictures(Pictures):
    """Images in one column of a Hub data set.

    Args:
        dataset: a `datasets.Dataset`.
        column: a feature `Image`.
        source: data set and split, for messages.
    """

    def __init__(self, dataset: Any, column: str, source: str):
        hf = require("datasets")
        self._dataset = dataset.select_columns([column]).cast_column(column, hf.Image(decode=False))
        self._column, self._source = column, source
        self._sizes: list[int] | None = None

    def __len__(self) -> int:
        return len(self._dataset)

    def name(self, index: int) -> str:
        """Return data set, split and row."""
        return f"{self._source}, row {index}"

    def _opened(self, index: int) -> Image:
        image: Image = require("PIL.Image").open(io.BytesIO(self._content(index)))
        return image

    def _content(self, index: int) -> bytes:
        stored = self._dataset[index][self._column]
        if stored is None:
            raise ValueError("the row has no image")
        content: bytes | None = stored["bytes"]
        return read_bytes(Path(stored["path"]), LARGEST) if content is None else content

    def _identity(self, index: int) -> bytes:
        if self._sizes is None:  # sizes of the encoded images, from the offsets of the column
            compute = require("pyarrow.compute")
            self._sizes = [
                size
                for chunk in self._dataset.data.column(self._column).chunks
                for size in compute.binary_length(compute.struct_field(chunk, "bytes")).to_pylist()
            ]
        return f"{index}\n{self._sizes[index]}".encode()


def fetch(hub: HubSource, cache_dir: str | Path | None, otherwise: str) -> Any:
    """Load all splits as a `datasets.DatasetDict`.

    Args:
        hub: the data set.
        cache_dir: cache folder of `datasets`; None for its default.
        otherwise: the files that can be read instead, for messages.

    Raises:
        ConfigError: the Hub cannot be reached, or the data set does not exist or is not accessible to this user.
    """
    return _asked(hub, "load_dataset", otherwise, cache_dir=None if cache_dir is None else str(cache_dir))


def published_names(hub: HubSource, otherwise: str) -> tuple[str, ...]:
    """Return class names from the description of the data set, without the data; raise like `fetch`."""
    features = _asked(hub, "load_dataset_builder", otherwise).info.features or {}
    if (names := getattr(features.get(hub.label), "names", None)) is None:
        raise ConfigError(f"{hub.path} does not name its classes; give data.labels, in the order of the ids")
    return tuple(dict(hub.renamed).get(name, name) for name in names)


def _asked(hub: HubSource, function: str, otherwise: str, **arguments: Any) -> Any:
    hf = require("datasets")
    try:
        return getattr(hf, function)(hub.path, **arguments)
    except (ConnectionError, hf.exceptions.DatasetNotFoundError) as error:
        raise ConfigError(
            f"{hub.path} could not be loaded from the Hub: {error}. {hub.access}To work offline, give data.dir "
            f"(data_dir=...): {otherwise}"
        ) from error


def class_names(raw: Any, hub: HubSource, split: str) -> tuple[str, ...]:
    """Return the class names of a split in the order of the ids; ConfigError if there is no such split or column."""
    if split not in raw:
        raise ConfigError(f"{hub.path}: {did_you_mean('split', split, list(raw))}")
    features = raw[split].features
    where = f"{hub.path}, split {split!r}"
    if faults := [
        f"{where}: {did_you_mean('column', name, list(features))}"
        for name in (hub.image, hub.label)
        if name not in features
    ]:
        raise ConfigError(faults)
    if (names := getattr(features[hub.label], "names", None)) is None:
        raise ConfigError(f"{where}: column {hub.label!r} is {features[hub.label]}; expected a ClassLabel")
    renamed = dict(hub.renamed)
    return tuple(renamed.get(name, name) for name in names)


def pictures_of(dataset: Any, hub: HubSource, where: str) -> tuple[HubPictures, np.ndarray]:
    """Return the images and (n,) class ids of one split."""
    labels = dataset.data.column(hub.label)
    if labels.null_count:
        raise ConfigError(f"{where}: {labels.null_count} rows have no {hub.label}; expected one each")
    return HubPictures(dataset, hub.image, where), np.array(labels.to_pylist(), dtype=np.int64)


def fetched(task: ImageTask, hub: HubSource, wanted: Sequence[str], cache_dir: str | None) -> dict[str, Images]:
    """Load the requested splits from the Hub, or its local cache; images stay encoded.

    Raises:
        ConfigError: splits, columns or classes are not the task's (lists all faults at once); or see `fetch`.
    """
    raw = fetch(hub, cache_dir, task.folder)
    found, faults = {}, []
    for split in wanted:
        where = f"{hub.path}, split {split!r}"
        try:
            names = class_names(raw, hub, split)
            pictures, labels = pictures_of(raw[split], hub, where)
        except ConfigError as error:
            faults += error.faults
            continue
        if names != task.label_names:
            faults.append(f"{where}: classes are {listed(names)}; expected {listed(task.label_names)}")
        if (fault := label_fault(labels, task.num_labels, where)) is not None:
            faults.append(fault)
        found[split] = Images(pictures, labels)
    if faults:
        raise ConfigError(faults)
    return found


@dataclass(frozen=True, kw_only=True)
class HubImageTask(ImageTask):
    """Images fetched from the Hub if no folder is given.

    Args:
        hub: the data set on the Hub.
    """

    hub: HubSource

    @property
    def hub_path(self) -> str:
        """The data set on the Hub."""
        return self.hub.path

    def _fetched(self, wanted: Sequence[str], cache_dir: str | None) -> dict[str, Images]:
        return fetched(self, self.hub, wanted, cache_dir)
