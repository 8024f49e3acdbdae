"""CIFAR-10 and CIFAR-100: 50,000 + 10,000 images of 32 x 32 pixels in ten or a hundred classes (Krizhevsky 2009).

Read from the archives of python or binary batches as distributed, or unpacked, or from class folders; python batches
are read without unpickling them. The twenty coarse classes of CIFAR-100 are not used.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from data import TASKS
from data._folders import archived, of_archive, read_class_folders, read_files
from data._images import ArrayPictures, HubImageTask, HubSource
from data._pickled_batches import read_pickled_batch
from snnk_peft.errors import ConfigError
from snnk_peft.tasks._files import MAX_FAULTS, listed
from snnk_peft.tasks.base_image import Images, label_fault

SIDE = 32
PIXELS = SIDE * SIDE
PARTS = {"train": ("train",), "test": ("test",)}
_HOME = "fetch it again from https://www.cs.toronto.edu/~kriz/cifar.html"


@dataclass(frozen=True)
class CifarLayout:
    """Names and format of the official files of CIFAR-10 or CIFAR-100.

    Args:
        classes: names in the order of the ids.
        files: split -> pattern of the names of its batches; binary ones end in .bin.
        labels: key of the class ids in python batches.
        label_bytes: class bytes of a record in binary batches; the last one is used.
        example: description of the expected files.
    """

    classes: tuple[str, ...]
    files: tuple[tuple[str, str], ...]
    labels: str
    label_bytes: int
    example: str

    def read(self, path: Path, wanted: Sequence[str]) -> dict[str, Images]:
        """Return the requested splits of a folder or an archive.

        Raises:
            ConfigError: there are neither batches nor class folders, or files are damaged.
        """
        if (of_folders := read_class_folders(path, self.classes, PARTS, wanted)) is not None:
            return of_folders
        names = [f"(?P<{split}>{name})" for split, name in self.files if split in wanted]
        pattern = rf"(?:(?:{'|'.join(names)})(?P<binary>\.bin)?|{archived(PARTS, wanted)})"
        files = read_files(path, pattern, f"{self.example} or {{train,test}}/CLASS/*.{{png,jpg}} ({', '.join(wanted)})")
        if all(match["kind"] for match, _ in files):
            return of_archive(path, files, self.classes, PARTS, wanted)
        faults = _doubled(path, files)
        found = {}
        for split in wanted:
            pixels, labels = [np.zeros((0, 3, SIDE, SIDE), np.uint8)], [np.zeros(0, np.int64)]
            for match, content in files:
                if match[split] is None:
                    continue
                where = f"{path}: {match[0]}"
                try:
                    batch, ids = self._binary(content) if match["binary"] else self._pickled(content)
                except ValueError as error:
                    faults.append(f"{where}: {error}; {_HOME}")
                    continue
                if (fault := label_fault(ids, len(self.classes), where)) is not None:
                    faults.append(fault)
                pixels.append(batch)
                labels.append(ids)
            stacked = np.concatenate(pixels).transpose(0, 2, 3, 1)
            found[split] = Images(ArrayPictures(stacked, f"{path} ({split})"), np.concatenate(labels))
        if faults:
            raise ConfigError(faults[:MAX_FAULTS])
        return found

    def _binary(self, content: bytes) -> tuple[np.ndarray, np.ndarray]:
        """Return (n, 3, 32, 32) uint8 and (n,) class ids."""
        size = self.label_bytes + 3 * PIXELS
        if not content or len(content) % size:
            raise ValueError(f"{len(content)} bytes; expected a multiple of {size}: truncated, or a different file")
        records = np.frombuffer(content, np.uint8).reshape(-1, size)
        return records[:, self.label_bytes :].reshape(-1, 3, SIDE, SIDE), records[:, self.label_bytes - 1]

    def _pickled(self, content: bytes) -> tuple[np.ndarray, np.ndarray]:
        batch = read_pickled_batch(content)
        if missing := [key for key in ("data", self.labels) if key not in batch]:
            raise ValueError(f"no {' and no '.join(missing)}; found {listed(str(key)[:40] for key in batch)}")
        pixels, labels = batch["data"], batch[self.labels]
        if not isinstance(pixels, np.ndarray) or pixels.ndim != 2 or pixels.shape[1] != 3 * PIXELS:
            raise ValueError(
                f"data is {getattr(pixels, 'shape', type(pixels).__name__)}; expected an array (n, {3 * PIXELS})"
            )
        if not isinstance(labels, list) or not all(type(label) is int for label in labels):
            raise ValueError(f"{self.labels} is not a list of class ids")
        if len(labels) != len(pixels):
            raise ValueError(f"{len(pixels)} images and {len(labels)} {self.labels}; expected one label each")
        return pixels.reshape(-1, 3, SIDE, SIDE), np.array(labels, dtype=np.int64)


def _doubled(path: Path, files: list[tuple[re.Match[str], bytes]]) -> list[str]:
    """List batches that are present twice, for example as python and as binary ones."""
    counts = Counter(match[0].rsplit("/", 1)[-1].removesuffix(".bin") for match, _ in files)
    return [
        f"{path} holds {count} files of the batch {name}; expected one: give a folder that holds only one layout"
        for name, count in counts.items()
        if count > 1
    ]


CIFAR10 = CifarLayout(
    classes=("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"),
    files=(("train", "data_batch_[1-5]"), ("test", "test_batch")),
    labels="labels",
    label_bytes=1,
    example="data_batch_N, data_batch_N.bin",
)
_CLASSES_100 = """
apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus butterfly camel can castle
caterpillar cattle chair chimpanzee clock cloud cockroach couch crab crocodile cup dinosaur dolphin elephant
flatfish forest fox girl hamster house kangaroo keyboard lamp lawn_mower leopard lion lizard lobster man maple_tree
motorcycle mountain mouse mushroom oak_tree orange orchid otter palm_tree pear pickup_truck pine_tree plain plate
poppy porcupine possum rabbit raccoon ray road rocket rose sea seal shark shrew skunk skyscraper snail snake spider
squirrel streetcar sunflower sweet_pepper table tank telephone television tiger tractor train trout tulip turtle
wardrobe whale willow_tree wolf woman worm
"""
CIFAR100 = CifarLayout(
    classes=tuple(_CLASSES_100.split()),
    files=(("train", "train"), ("test", "test")),
    labels="fine_labels",
    label_bytes=2,
    example="train and test, train.bin and test.bin",
)

for _task in (
    HubImageTask(
        name="cifar10",
        read=CIFAR10.read,
        label_names=CIFAR10.classes,
        folder="cifar-10-batches-py, cifar-10-batches-bin, or {train,test}/CLASS/*.{png,jpg}",
        source="CIFAR-10 (Krizhevsky 2009)",
        hub=HubSource("uoft-cs/cifar10", image="img"),
    ),
    HubImageTask(
        name="cifar100",
        read=CIFAR100.read,
        label_names=CIFAR100.classes,
        folder="cifar-100-python, cifar-100-binary, or {train,test}/CLASS/*.{png,jpg}",
        source="CIFAR-100 (Krizhevsky 2009)",
        # The Hub's copy misspells one class.
        hub=HubSource("uoft-cs/cifar100", image="img", label="fine_label", renamed=(("cra", "crab"),)),
    ),
):
    TASKS.register(_task.name, _task)
