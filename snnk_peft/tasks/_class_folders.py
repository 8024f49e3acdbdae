"""Pictures in folders that name their class: SPLIT/CLASS/anything.png, in a folder or in a tar archive of it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from snnk_peft.errors import ConfigError
from snnk_peft.registry import did_you_mean
from snnk_peft.tasks._folders import archive_in, read_files
from snnk_peft.tasks._pictures import EncodedPictures, FilePictures, Pictures
from snnk_peft.tasks._tsv import MAX_FAULTS
from snnk_peft.tasks.base_image import Images

_SUFFIXES = ("png", "jpg", "jpeg", "webp", "bmp", "gif", "tif", "tiff", "ppm")
_PICTURE = rf"\.(?i:{'|'.join(_SUFFIXES)})"


def read_class_folders(
    path: Path, classes: Sequence[str], parts: Mapping[str, Sequence[str]], wanted: Sequence[str]
) -> dict[str, Images] | None:
    """The wanted splits, ordered by file name; None if there is no folder of any split.

    Args:
        path: a folder, a tar archive, or a folder that holds exactly one archive.
        classes: names of the class folders, in the order of the ids.
        parts: split -> names that its folder may have, e.g. {"test": ("test", "val")}.
        wanted: splits.

    Raises:
        ConfigError: class folders that are no class, or hold no picture.
    """
    found = _of_folder(path, classes, parts, wanted) if path.is_dir() else None
    archive = archive_in(path) if found is None else None
    return found if archive is None else _of_archive(archive, classes, parts, wanted)


def _of_folder(
    path: Path, classes: Sequence[str], parts: Mapping[str, Sequence[str]], wanted: Sequence[str]
) -> dict[str, Images] | None:
    roots = {split: next((path / name for name in parts[split] if (path / name).is_dir()), None) for split in wanted}
    if not any(roots.values()):
        return None
    found, faults = {}, []
    for split, root in roots.items():
        if root is None:
            faults.append(f"{path} has no folder {' or '.join(parts[split])} ({split} split)")
            continue
        paths: list[Path] = []
        labels: list[int] = []
        for folder in sorted(entry for entry in root.iterdir() if entry.is_dir()):
            if folder.name not in classes:
                faults.append(f"{folder}: {did_you_mean('class', folder.name, list(classes))}")
                continue
            files = sorted(entry for entry in folder.rglob("*") if re.search(rf"{_PICTURE}$", entry.name))
            if not files:
                faults.append(f"{folder} holds no picture; expected files *.{{{','.join(_SUFFIXES)}}}")
            paths += files
            labels += [classes.index(folder.name)] * len(files)
        found[split] = Images(FilePictures(root, paths), np.array(labels, dtype=np.int64))
    if faults:
        raise ConfigError(faults[:MAX_FAULTS])
    return found


def _of_archive(
    path: Path, classes: Sequence[str], parts: Mapping[str, Sequence[str]], wanted: Sequence[str]
) -> dict[str, Images] | None:
    names = {name: split for split in wanted for name in parts[split]}
    pattern = rf"(?P<part>{'|'.join(map(re.escape, names))})/(?P<kind>[^/]+)/[^/]+{_PICTURE}"
    try:
        files = read_files(path, pattern, f"{{{','.join(names)}}}/CLASS/*.{{png,jpg,...}}")
    except ConfigError as error:
        if "holds no" in str(error):
            return None
        raise
    unknown = sorted({match["kind"] for match, _ in files} - set(classes))
    if unknown:
        raise ConfigError([f"{path}: {did_you_mean('class', name, list(classes))}" for name in unknown[:MAX_FAULTS]])
    found = {}
    for split in wanted:
        chosen = [(match, content) for match, content in files if names[match["part"]] == split]
        pictures: Pictures = EncodedPictures([content for _, content in chosen], [f"{path}: {m[0]}" for m, _ in chosen])
        found[split] = Images(pictures, np.array([classes.index(m["kind"]) for m, _ in chosen], dtype=np.int64))
    return found
