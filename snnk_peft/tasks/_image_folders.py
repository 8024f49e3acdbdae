"""Layouts of images and classes in a folder: class folders (SPLIT/CLASS/anything.png), or shards."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from snnk_peft.errors import ConfigError
from snnk_peft.options import closest
from snnk_peft.tasks._files import MAX_FAULTS, listed
from snnk_peft.tasks._shards import find_shards, read_shards
from snnk_peft.tasks.base import held_back
from snnk_peft.tasks.base_image import FilePictures, Images, label_fault

SUFFIXES = ("png", "jpg", "jpeg", "webp", "bmp", "gif", "tif", "tiff", "ppm")
PICTURE = rf"\.(?i:{'|'.join(SUFFIXES)})"
EXPECTED = f"files *.{{{','.join(SUFFIXES)}}}"
_IS_PICTURE = re.compile(rf"[^.].*{PICTURE}")  # file managers leave behind names that begin with a dot


def root_with(path: Path, names: Iterable[str]) -> Path | None:
    """Return `path`, or the only folder in it, if it contains a folder with one of these names."""
    if not path.is_dir():
        return None
    names = list(names)
    candidates = [path, *(path / name for name in class_names(path))]
    roots = [folder for folder in candidates if first_folder(folder, names) is not None]
    return roots[0] if roots and (roots[0] == path or len(roots) == 1) else None


def first_folder(root: Path, names: Iterable[str]) -> Path | None:
    """Return the first of these folders that exists."""
    return next((root / name for name in names if (root / name).is_dir()), None)


def class_names(folder: Path) -> list[str]:
    """Return the names of the folders in a folder, sorted."""
    with os.scandir(folder) as entries:
        return sorted(entry.name for entry in entries if entry.is_dir() and not entry.name.startswith("."))


def picture_names(folder: Path) -> list[str]:
    """Return the names of the images directly in a folder."""
    with os.scandir(folder) as entries:
        return [entry.name for entry in entries if _IS_PICTURE.fullmatch(entry.name)]


def read_classes(folder: Path, classes: Sequence[str]) -> Images:
    """Read the images under CLASS/ in one folder, ordered by name.

    Raises:
        ConfigError: folders that are not classes or contain no images, or no folders at all.
    """
    ids = {name: number for number, name in enumerate(classes)}
    files: list[tuple[str, int]] = []
    faults: list[str] = []
    for name in (present := class_names(folder)):
        if len(faults) == MAX_FAULTS:
            break
        if name not in ids:
            faults.append(f"{folder / name}: {unknown_class(name, classes)}")
            continue
        before = len(files)
        seen: set[tuple[int, int]] = set()
        for parent, below_it, entries in os.walk(folder / name, followlinks=True):
            place = os.stat(parent)
            if (place.st_dev, place.st_ino) in seen:  # a link to a parent folder
                below_it.clear()
                continue
            seen.add((place.st_dev, place.st_ino))
            below = Path(parent).relative_to(folder).as_posix()
            files += [(f"{below}/{entry}", ids[name]) for entry in entries if _IS_PICTURE.fullmatch(entry)]
        if len(files) == before:
            faults.append(f"{folder / name} holds no picture; expected {EXPECTED}")
    if not present:
        flat = ", but pictures" if picture_names(folder) else ""
        faults.append(f"{folder} holds no class folder{flat}; expected {folder.name}/CLASS/ with {EXPECTED}")
    if faults:
        raise ConfigError(faults)
    files.sort()
    return Images(
        FilePictures(folder, [file for file, _ in files]), np.array([label for _, label in files], dtype=np.int64)
    )


def unknown_class(name: str, classes: Sequence[str]) -> str:
    """Return the message for a folder that is not a class."""
    close = closest(name, list(classes))
    hint = f"; did you mean {close!r}?" if close else "."
    return f"unknown class {name!r}{hint} Expected: {listed(classes)}"


@dataclass(frozen=True)
class FolderLayout:
    """Expected layout of a folder.

    Args:
        train: possible names of the folder of training images; the first found is used.
        evaluation: likewise for the "validation" split.
        hold_out: whether to hold out part of the training images if there are none to evaluate on, and to use CLASS/
            folders outside a split's folder as training images.
    """

    train: tuple[str, ...] = ("train",)
    evaluation: tuple[str, ...] = ("val", "validation")
    hold_out: bool = False

    @property
    def expected(self) -> str:
        """A description of the expected layout."""
        flat = ", or CLASS/*.jpg alone" if self.hold_out else ""
        return (
            f"{self.train[0]}/CLASS/*.jpg and {' or '.join(self.evaluation)}/CLASS/*.jpg{flat}, or uncompressed tar "
            "shards whose names say their split"
        )

    def names(self, path: Path) -> dict[str, str]:
        """Return class folder -> readable name, where known."""
        return {}

    def classes(self, path: Path) -> tuple[str, ...]:
        """Return the class folders in the order of the ids; for shards, the ids as strings.

        Raises:
            ConfigError: no classes found, or folders that cannot be classes.
        """
        folder = self._folder(path, "train")
        names = [] if folder is None else class_names(folder)
        if folder is None or not names:
            if not (shards := self._shards(path, "train")):
                raise ConfigError(f"{path} holds no folders of training pictures; expected {self.expected}")
            return self._shard_classes(path, shards)
        faults = [fault for name in names if (fault := self._class_fault(folder / name)) is not None]
        if len(names) < 2:
            faults.append(f"{folder} holds the class {names[0]} only; expected at least two")
        if faults:
            raise ConfigError(faults[:MAX_FAULTS])
        return tuple(names)

    def _shard_classes(self, path: Path, shards: Sequence[str]) -> tuple[str, ...]:
        return tuple(map(str, range(int(read_shards(path, shards)["label"].max(initial=0)) + 1)))

    def _class_fault(self, folder: Path) -> str | None:
        """Return why a folder cannot be a class; None if it can."""
        return None

    def read(
        self, path: Path, wanted: Sequence[str], classes: Sequence[str], share: float, seed: int
    ) -> dict[str, Images]:
        """Read the requested splits, "train" or "validation".

        Raises:
            ConfigError: lists all faults.
        """
        divide = self.divides(path)
        images: dict[str, Images] = {}
        faults: list[str] = []
        for split in ["train"] if divide else wanted:
            try:
                images[split] = self._split(path, split, classes)
            except ConfigError as error:
                faults += error.faults
        if faults:
            raise ConfigError(faults[:MAX_FAULTS])
        if not divide:
            return images
        train = images["train"]
        held = held_back(train["label"], share, seed)
        if not held:
            raise ConfigError(
                f"{path}: {len(train)} pictures, of which none can be held back (no class has two); give more, or a "
                f"folder {' or '.join(self.evaluation)}"
            )
        kept = np.setdiff1d(np.arange(len(train)), held).tolist()
        return {split: train.select(kept if split == "train" else held) for split in wanted}

    def divides(self, path: Path) -> bool:
        return self.hold_out and self._folder(path, "validation") is None and not self._shards(path, "validation")

    def _root(self, path: Path) -> Path | None:
        return root_with(path, (*self.train, *self.evaluation))

    def _folder(self, path: Path, split: str) -> Path | None:
        root = self._root(path)
        if root is not None:
            return first_folder(root, self.train if split == "train" else self.evaluation)
        return path if self.hold_out and split == "train" and class_names(path) else None

    def _shards(self, path: Path, split: str) -> list[str]:
        """Return the shards of a split; none if there are class folders, to avoid listing every image."""
        folders = [folder for name in ("train", "validation") if (folder := self._folder(path, name)) is not None]
        if any(class_names(folder) for folder in folders):
            return []
        return find_shards(path, {"train": self.train, "validation": self.evaluation}).get(split, [])

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
        return self._pictures(path, folder, split, classes)

    def _pictures(self, path: Path, folder: Path, split: str, classes: Sequence[str]) -> Images:
        return read_classes(folder, classes)
