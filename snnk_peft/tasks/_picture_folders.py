"""Where pictures and their classes are below a folder: class folders, a flat folder with a file of labels, shards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from snnk_peft.errors import ConfigError
from snnk_peft.tasks._class_folders import class_names, first_folder, read_classes, root_with
from snnk_peft.tasks._hold_out import held_back
from snnk_peft.tasks._lines import MAX_FAULTS
from snnk_peft.tasks._shards import find_shards, read_shards
from snnk_peft.tasks.base_image import Images, label_fault


@dataclass(frozen=True)
class FolderLayout:
    """What is looked for.

    Args:
        train: names that the folder of the training pictures may have, of which the first found counts.
        evaluation: likewise of the "validation" split.
        hold_out: whether a part of the training pictures is held back where there are none to evaluate on, and CLASS/
            folders without a folder of a split are training pictures.
    """

    train: tuple[str, ...] = ("train",)
    evaluation: tuple[str, ...] = ("val", "validation")
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
        """Class folder -> name in words, where these are known."""
        return {}

    def classes(self, path: Path) -> tuple[str, ...]:
        """Class folders in the order of the ids; of shards the ids as texts.

        Raises:
            ConfigError: no class is found, or folders that cannot be classes.
        """
        folder = self._folder(path, "train")
        found = [] if folder is None else class_names(folder)
        if folder is None or not found:
            if not (shards := self._shards(path, "train")):
                raise ConfigError(f"{path} holds no folders of training pictures; expected {self.expected}")
            return self._shard_classes(path, shards)
        faults = [fault for name in found if (fault := self._class_fault(folder / name)) is not None]
        if len(found) < 2:
            faults.append(f"{folder} holds the class {found[0]} only; expected at least two")
        if faults:
            raise ConfigError(faults[:MAX_FAULTS])
        return tuple(found)

    def _shard_classes(self, path: Path, shards: Sequence[str]) -> tuple[str, ...]:
        return tuple(map(str, range(int(read_shards(path, shards)["label"].max(initial=0)) + 1)))

    def _class_fault(self, folder: Path) -> str | None:
        """Why a folder can be no class; None if it can."""
        return None

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
        return root_with(path, (*self.train, *self.evaluation))

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
        """The pictures in the folder of a split."""
        return read_classes(folder, classes)
