"""ImageNet-1k: 1,281,167 training and 50,000 validation images in 1000 classes (Russakovsky et al. 2015).

Read from (`data.dir`):

- class folders, train/WNID/*.JPEG and val/WNID/*.JPEG, also at their path in Kaggle's archive (ILSVRC/Data/CLS-LOC).
  The classes are the folders in train, sorted, so part of ImageNet has fewer. Validation images in one flat folder need
  Kaggle's LOC_val_solution.csv; with LOC_synset_mapping.txt the classes have names instead of WNIDs.
- uncompressed tar shards in WebDataset's layout (KEY.jpg with KEY.cls or KEY.json), whose names contain "train",
  "val" or "validation".

Without `data.dir`, all of the Hub's copy is fetched. Streams (`datasets` with streaming=True, WebDataset pipes) are
not supported: without random access, a run could neither shuffle all images nor be resumed bit for bit. If there is no
room for two copies, fetch tar shards into a folder and pass that: they are read in place.
"""

from __future__ import annotations

import csv
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from data import TASKS
from data._images import HubSource, fetched, published_names
from snnk_peft.errors import ConfigError
from snnk_peft.tasks import Images
from snnk_peft.tasks._files import capped, decode, listed
from snnk_peft.tasks._image_folders import FolderLayout, class_names, first_folder, picture_names, read_classes
from snnk_peft.tasks.base_image import FilePictures
from snnk_peft.tasks.image_folder import ImageFolderTask, unsettled

KAGGLE = "ILSVRC/Data/CLS-LOC"
NAMES_FILE = "LOC_synset_mapping.txt"
"""Lines "WNID name in words", used if it is there."""
LABELS_FILE = "LOC_val_solution.csv"
"""Lines "PICTURE,WNID ...", for a flat folder of validation pictures."""
SHARD_CLASSES = 1000


@dataclass(frozen=True)
class ImageNetLayout(FolderLayout):
    """Class folders named by WNIDs, also at the paths of Kaggle's archive, or validation images in one flat folder."""

    def names(self, path: Path) -> dict[str, str]:
        """Return WNID -> name, from `NAMES_FILE`; names shared by several classes get the WNID appended."""
        file = self._beside(path, NAMES_FILE)
        if file is None:
            return {}
        lines, faults = decode(file)
        pairs = [line.split(maxsplit=1) for line in lines if line.strip()]
        faults += [f"{file}: {pair[0]!r} has no name; expected FOLDER and a name" for pair in pairs if len(pair) < 2]
        if faults:
            raise ConfigError(capped(faults, file))
        counts = Counter(name for _, name in pairs)
        return {folder: name if counts[name] == 1 else f"{name} ({folder})" for folder, name in sorted(pairs)}

    def _shard_classes(self, path: Path, shards: Sequence[str]) -> tuple[str, ...]:
        return tuple(self.names(path)) or tuple(map(str, range(SHARD_CLASSES)))

    def _class_fault(self, folder: Path) -> str | None:
        if re.fullmatch(r"n\d{8}", folder.name) is not None:
            return None
        return f"{folder}: {folder.name!r} is not a class; expected a WNID: n and eight digits"

    def _root(self, path: Path) -> Path | None:
        if first_folder(path / KAGGLE, (*self.train, *self.evaluation)) is not None:
            return path / KAGGLE
        return super()._root(path)

    def _beside(self, path: Path, name: str) -> Path | None:
        """Find a file in the given folder, or next to the folders of the splits."""
        places = [path, self._root(path) or path]
        return next((place / name for place in places if (place / name).is_file()), None)

    def _pictures(self, path: Path, folder: Path, split: str, classes: Sequence[str]) -> Images:
        if split == "train" or class_names(folder) or not picture_names(folder):
            return read_classes(folder, classes)
        if (file := self._beside(path, LABELS_FILE)) is None:
            raise ConfigError(
                f"{folder} holds images without class folders, and there is no {LABELS_FILE} in {path} to give "
                "their classes; add it, or move the images into CLASS/ folders. The numbers in "
                "ILSVRC2012_validation_ground_truth.txt are not read: they number the classes in a different order"
            )
        return _read_flat(folder, file, classes)


def _read_flat(folder: Path, file: Path, classes: Sequence[str]) -> Images:
    """Read the images of one folder, with the classes from lines "PICTURE,CLASS x y x y ..." after a header."""
    lines, faults = decode(file)
    ids = {name: number for number, name in enumerate(classes)}
    pictures = {name.rpartition(".")[0]: name for name in picture_names(folder)}
    rows: dict[str, int] = {}
    for number, cells in enumerate(csv.reader(lines), start=1):
        if number == 1 or not cells:
            continue
        kind = cells[1].split(" ")[0] if len(cells) > 1 else ""
        if kind not in ids:
            faults.append(f"{file}, line {number}: class {kind!r}; expected one of {listed(classes)}")
        elif cells[0] not in pictures:
            faults.append(f"{file}, line {number}: {folder} has no image {cells[0]}")
        else:
            rows[pictures[cells[0]]] = ids[kind]
    faults += [f"{folder / name}: {file} does not give its class" for name in pictures.values() if name not in rows]
    if faults:
        raise ConfigError(capped(faults, file))
    files = sorted(rows)
    return Images(FilePictures(folder, files), np.array([rows[name] for name in files], dtype=np.int64))


@dataclass(frozen=True, kw_only=True)
class ImageNet(ImageFolderTask):
    """The task; without a folder, classes and images come from the Hub.

    Args:
        hub: the data set on the Hub.
    """

    hub: HubSource

    @property
    def hub_path(self) -> str:
        """The data set on the Hub."""
        return self.hub.path

    def _without_folder(self, labels: Sequence[str]) -> ImageNet:
        return replace(self, label_names=tuple(labels) or published_names(self.hub, self.folder))

    def _fetched(self, wanted: Sequence[str], cache_dir: str | None) -> dict[str, Images]:
        return fetched(self, self.hub, wanted, cache_dir)


LAYOUT = ImageNetLayout()
IMAGENET1K = ImageNet(
    name="imagenet1k",
    read=unsettled,
    label_names=(),
    folder=LAYOUT.expected,
    source="ImageNet-1k (Russakovsky et al. 2015)",
    hub=HubSource(
        "ILSVRC/imagenet-1k",
        access="It is open to those who accepted its terms: do so at "
        "https://huggingface.co/datasets/ILSVRC/imagenet-1k, then run `hf auth login`. ",
    ),
    layout=LAYOUT,
)
TASKS.register(IMAGENET1K.name, IMAGENET1K)
