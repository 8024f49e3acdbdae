"""Pictures in folders that name their class: SPLIT/CLASS/anything.png."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from snnk_peft.errors import ConfigError
from snnk_peft.options import closest
from snnk_peft.tasks._lines import MAX_FAULTS, listed
from snnk_peft.tasks._pictures import FilePictures
from snnk_peft.tasks.base_image import Images

SUFFIXES = ("png", "jpg", "jpeg", "webp", "bmp", "gif", "tif", "tiff", "ppm")
PICTURE = rf"\.(?i:{'|'.join(SUFFIXES)})"
EXPECTED = f"files *.{{{','.join(SUFFIXES)}}}"
_IS_PICTURE = re.compile(rf"[^.].*{PICTURE}")  # names that begin with a dot are what file managers leave behind


def root_with(path: Path, names: Iterable[str]) -> Path | None:
    """`path`, or the only folder in it, that has a folder of one of these names."""
    if not path.is_dir():
        return None
    names = list(names)
    candidates = [path, *(path / name for name in class_names(path))]
    found = [folder for folder in candidates if first_folder(folder, names) is not None]
    return found[0] if found and (found[0] == path or len(found) == 1) else None


def first_folder(root: Path, names: Iterable[str]) -> Path | None:
    """The first of these folders that is there."""
    return next((root / name for name in names if (root / name).is_dir()), None)


def class_names(folder: Path) -> list[str]:
    """Names of the folders in it, sorted."""
    with os.scandir(folder) as entries:
        return sorted(entry.name for entry in entries if entry.is_dir() and not entry.name.startswith("."))


def picture_names(folder: Path) -> list[str]:
    """Names of the pictures directly in it."""
    with os.scandir(folder) as entries:
        return [entry.name for entry in entries if _IS_PICTURE.fullmatch(entry.name)]


def read_classes(folder: Path, classes: Sequence[str]) -> Images:
    """The pictures below CLASS/ of one folder, ordered by name.

    Raises:
        ConfigError: folders that are no class or hold no picture, or no folder at all.
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
            if (place.st_dev, place.st_ino) in seen:  # a link to a folder around it
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
    """What is wrong with the folder of a class that is none."""
    close = closest(name, list(classes))
    hint = f"; did you mean {close!r}?" if close else "."
    return f"unknown class {name!r}{hint} Expected: {listed(classes)}"
