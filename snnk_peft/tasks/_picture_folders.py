"""Where pictures and their classes are below a folder: class folders, a flat folder with a file of labels, shards."""

from __future__ import annotations

import csv
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from snnk_peft.errors import ConfigError
from snnk_peft.tasks._class_folders import class_names, first_folder, picture_names, read_classes, root_with
from snnk_peft.tasks._hold_out import held_back
from snnk_peft.tasks._lines import MAX_FAULTS, capped, decode, listed
from snnk_peft.tasks._pictures import FilePictures
from snnk_peft.tasks._shards import find_shards, read_shards
from snnk_peft.tasks.base_image import Images, label_fault


@dataclass(frozen=True)
class FolderLayout:
    """What is looked for.

    Args:
        train: names that the folder of the training pictures may have, of which the first found counts.
        evaluation: likewise of the "validation" split.
        inner: where these folders may also be, below the given one.
        class_pattern: what names of class folders look like.
        class_words: the same in words.
        names_file: a file of lines "FOLDER name in words", which is used if it is there.
        labels_file: a CSV file of lines "PICTURE,CLASS ...", for a flat folder of pictures to evaluate on.
        shard_classes: number of classes in tar shards; None counts them.
        hold_out: whether a part of the training pictures is held back where there are none to evaluate on, and CLASS/
            folders without a folder of a split are training pictures.
    """

    train: tuple[str, ...] = ("train",)
    evaluation: tuple[str, ...] = ("val", "validation")
    inner: str | None = None
    class_pattern: str = ".+"
    class_words: str = "a name"
    names_file: str | None = None
    labels_file: str | None = None
    shard_classes: int | None = None
    hold_out: bool = False

    @property
    def expected(self) -> str:
        """What is looked for, in words."""
        flat = ", or CLASS/*.jpg alone" if self.hold_out else ""
        return (
            f"{self.train[0]}/CLASS/*.jpg and {' or '.join(self.evaluation)}/CLASS/*.jpg{flat}, or uncompressed tar "
            "shards whose names say their split"
        )

    def names(self, path: Path) -> dict[str, str]:
        """Class folder -> name in words, from the names file; names that several classes share get the folder added."""
        file = None if self.names_file is None else self._beside(path, self.names_file)
        if file is None:
            return {}
        lines, faults = decode(file)
        pairs = [line.split(maxsplit=1) for line in lines if line.strip()]
        faults += [f"{file}: {pair[0]!r} has no name; expected FOLDER and a name" for pair in pairs if len(pair) < 2]
        if faults:
            raise ConfigError(capped(faults, file))
        counts = Counter(name for _, name in pairs)
        return {folder: name if counts[name] == 1 else f"{name} ({folder})" for folder, name in sorted(pairs)}

    def classes(self, path: Path) -> tuple[str, ...]:
        """Class folders in the order of the ids; of shards the folders of the names file, or the ids as texts.

        Raises:
            ConfigError: no class is found, or folders that cannot be classes.
        """
        folder = self._folder(path, "train")
        found = [] if folder is None else class_names(folder)
        if folder is None or not found:
            if not (shards := self._shards(path, "train")):
                raise ConfigError(f"{path} holds no folders of training pictures; expected {self.expected}")
            if named := tuple(self.names(path)):
                return named
            count = self.shard_classes or int(read_shards(path, shards)["label"].max(initial=0)) + 1
            return tuple(map(str, range(count)))
        faults = [
            f"{folder / name}: {name!r} is no class; expected {self.class_words}"
            for name in found
            if re.fullmatch(self.class_pattern, name) is None
        ]
        if len(found) < 2:
            faults.append(f"{folder} holds the class {found[0]} only; expected at least two")
        if faults:
            raise ConfigError(faults[:MAX_FAULTS])
        return tuple(found)

    def read(
        self, path: Path, wanted: Sequence[str], classes: Sequence[str], share: float, seed: int
    ) -> dict[str, Images]:
        """The wanted splits, "train" or "validation".

        Args:
            path: the folder that is given.
            wanted: splits.
            classes: folders (of shards: names) in the order of the ids.
            share: part of the training pictures of every class to hold back, where there are none to evaluate on.
            seed: decides which ones.

        Raises:
            ConfigError: with every fault that was found.
        """
        divide = self.divides(path)
        found: dict[str, Images] = {}
        faults: list[str] = []
        for split in ["train"] if divide else wanted:
            try:
                found[split] = self._split(path, split, classes)
            except ConfigError as error:
                faults += error.faults
        if faults:
            raise ConfigError(faults[:MAX_FAULTS])
        if not divide:
            return found
        train = found["train"]
        held = held_back(train["label"], share, seed)
        if not held:
            raise ConfigError(
                f"{path}: {len(train)} pictures, of which none can be held back (no class has two); give more, or a "
                f"folder {' or '.join(self.evaluation)}"
            )
        kept = np.setdiff1d(np.arange(len(train)), held).tolist()
        return {split: train.select(kept if split == "train" else held) for split in wanted}

    def divides(self, path: Path) -> bool:
        """Whether a part of the training pictures is held back."""
        return self.hold_out and self._folder(path, "validation") is None and not self._shards(path, "validation")

    def _root(self, path: Path) -> Path | None:
        """The folder that holds the folders of the splits."""
        names = (*self.train, *self.evaluation)
        if self.inner is not None and first_folder(path / self.inner, names) is not None:
            return path / self.inner
        return root_with(path, names)

    def _folder(self, path: Path, split: str) -> Path | None:
        root = self._root(path)
        if root is not None:
            return first_folder(root, self.train if split == "train" else self.evaluation)
        return path if self.hold_out and split == "train" and class_names(path) else None

    def _shards(self, path: Path, split: str) -> list[str]:
        """Shards of a split; none where there are class folders, so that not every picture is listed in vain."""
        folders = [folder for name in ("train", "validation") if (folder := self._folder(path, name)) is not None]
        if any(class_names(folder) for folder in folders):
            return []
        return find_shards(path, {"train": self.train, "validation": self.evaluation}).get(split, [])

    def _beside(self, path: Path, name: str) -> Path | None:
        """A file in the given folder, or beside the folders of the splits."""
        places = [path, self._root(path) or path]
        return next((place / name for place in places if (place / name).is_file()), None)

    def _split(self, path: Path, split: str, classes: Sequence[str]) -> Images:
        if shards := self._shards(path, split):
            images = read_shards(path, shards)
            if (fault := label_fault(images["label"], len(classes), f"{path} ({split} shards)")) is not None:
                raise ConfigError(fault)
            return images
        folder = self._folder(path, split)
        if folder is None:
            names = self.train if split == "train" else self.evaluation
            raise ConfigError(f"{path} has no folder {' or '.join(names)} ({split} split); expected {self.expected}")
        if split == "train" or self.labels_file is None or class_names(folder) or not picture_names(folder):
            return read_classes(folder, classes)
        if (file := self._beside(path, self.labels_file)) is None:
            raise ConfigError(
                f"{folder} holds pictures without class folders, and there is no {self.labels_file} in {path}, which "
                "says their classes; add it, or move the pictures into CLASS/ folders. The numbers of "
                "ILSVRC2012_validation_ground_truth.txt are not read: they count the classes in another order"
            )
        return _read_flat(folder, file, classes)


def _read_flat(folder: Path, file: Path, classes: Sequence[str]) -> Images:
    """Pictures of one folder, with the classes that lines "PICTURE,CLASS x y x y ..." give them (behind a header)."""
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
            faults.append(f"{file}, line {number}: {folder} has no picture {cells[0]}")
        else:
            rows[pictures[cells[0]]] = ids[kind]
    faults += [f"{folder / name}: {file} does not say its class" for name in pictures.values() if name not in rows]
    if faults:
        raise ConfigError(capped(faults, file))
    files = sorted(rows)
    return Images(FilePictures(folder, files), np.array([rows[name] for name in files], dtype=np.int64))
