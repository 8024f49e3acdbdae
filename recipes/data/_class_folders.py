"""Pictures of known classes in folders that name them, SPLIT/CLASS/anything.png, or in a tar archive of these."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from data._pictures import EncodedPictures
from snnk_peft.errors import ConfigError
from snnk_peft.tasks import Images
from snnk_peft.tasks._files import MAX_FAULTS
from snnk_peft.tasks._image_folders import PICTURE, first_folder, read_classes, root_with, unknown_class


def read_class_folders(
    path: Path, classes: Sequence[str], parts: Mapping[str, Sequence[str]], wanted: Sequence[str]
) -> dict[str, Images] | None:
    """The wanted splits, ordered by file name; None if there is no folder of any split.

    Args:
        path: a folder, or one that holds only one such.
        classes: names of the class folders, in the order of the ids.
        parts: split -> names that its folder may have, e.g. {"test": ("test", "val")}.
        wanted: splits.

    Raises:
        ConfigError: class folders that are no class, or hold no picture.
    """
    root = root_with(path, [name for split in wanted for name in parts[split]])
    if root is None:
        return None
    found, faults = {}, []
    for split in wanted:
        folder = first_folder(root, parts[split])
        if folder is None:
            faults.append(f"{root} has no folder {' or '.join(parts[split])} ({split} split)")
            continue
        try:
            found[split] = read_classes(folder, classes)
        except ConfigError as error:
            faults += error.faults
    if faults:
        raise ConfigError(faults[:MAX_FAULTS])
    return found


def archived(parts: Mapping[str, Sequence[str]], wanted: Sequence[str]) -> str:
    """Pattern of the pictures in an archive of class folders, for `read_files`."""
    names = "|".join(re.escape(name) for split in wanted for name in parts[split])
    return rf"(?P<part>{names})/(?P<kind>[^/.][^/]*)/(?:[^/]+/)*[^/.][^/]*{PICTURE}"


def of_archive(
    path: Path,
    files: Sequence[tuple[re.Match[str], bytes]],
    classes: Sequence[str],
    parts: Mapping[str, Sequence[str]],
    wanted: Sequence[str],
) -> dict[str, Images]:
    """As `read_class_folders`, from what `read_files` found by the pattern `archived`; contents stay in memory."""
    if unknown := sorted({match["kind"] for match, _ in files} - set(classes)):
        raise ConfigError([f"{path}: {unknown_class(name, classes)}" for name in unknown[:MAX_FAULTS]])
    found = {}
    for split in wanted:
        chosen = [(match, content) for match, content in files if match["part"] in parts[split]]
        pictures = EncodedPictures([content for _, content in chosen], [f"{path}: {match[0]}" for match, _ in chosen])
        labels = [classes.index(match["kind"]) for match, _ in chosen]
        found[split] = Images(pictures, np.array(labels, dtype=np.int64))
    return found
