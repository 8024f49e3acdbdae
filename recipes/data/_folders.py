"""Files of a data set that comes as a folder or as a tar archive of one, in the same order either way.

Packed files are read within bounds, however far they expand. Images with known classes are in folders named by class.
"""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import re
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from data._images import EncodedPictures
from snnk_peft.errors import ConfigError
from snnk_peft.tasks import Images
from snnk_peft.tasks._files import DAMAGED, LARGEST, MAX_FAULTS, Bounded, NotRegularError, check_regular, read_bytes
from snnk_peft.tasks._image_folders import PICTURE, first_folder, read_classes, root_with, unknown_class

LONGEST_LINE = 1 << 20
"""Characters of a line of numbers."""
MOST_PACKED = 20
"""Bytes that one packed byte of numbers may become; those of the tasks become about five."""
_SLACK = 1 << 24
_MAGIC: dict[bytes, Any] = {b"\x1f\x8b": gzip.open, b"BZh": bz2.open, b"\xfd7zXZ\x00": lzma.open}
_ARCHIVE = re.compile(r"\.(tar|tgz|tar\.(gz|xz|bz2))$")


def read_files(path: Path, pattern: str, what: str) -> list[tuple[re.Match[str], bytes]]:
    """Return the files below `path` whose names match, ordered by name, with their contents.

    Args:
        path: a folder, a tar archive, or a folder that contains exactly one archive and no matching file.
        pattern: a regular expression that the end of a file's path, with "/" between its parts, must match.
        what: description of the wanted files, for messages.

    Raises:
        ConfigError: no file matches, or the archive is damaged.
    """
    # A path starts anywhere above the folders named in the pattern.
    wanted = re.compile(rf"(?:^|.*/){pattern}")
    if path.is_dir():
        found = list(_of_folder(path, wanted))
        if found or (archive := archive_in(path)) is None:
            return _ordered(found, path, what)
        path = archive
    if not _ARCHIVE.search(path.name):
        raise ConfigError(f"{path} is neither a folder nor a tar archive; expected {what}")
    return _ordered(list(_of_archive(path, wanted)), path, what)


def archive_in(path: Path) -> Path | None:
    """Return the archive that `path` is, or the only one in that folder; None if there is not exactly one."""
    if not path.is_dir():
        return path if _ARCHIVE.search(path.name) else None
    archives = [entry for entry in sorted(path.iterdir()) if _ARCHIVE.search(entry.name)]
    return archives[0] if len(archives) == 1 else None


def _of_folder(path: Path, wanted: re.Pattern[str]) -> Iterator[tuple[re.Match[str], bytes]]:
    for file in path.rglob("*"):
        # Relative to the parent, because the given folder may itself be one named in the pattern.
        match = wanted.fullmatch(file.relative_to(path.parent).as_posix())
        if match and file.is_file():
            try:
                yield match, read_bytes(file, LARGEST)
            except NotRegularError as error:
                raise ConfigError(f"{file} holds {error.strerror}") from error


def _of_archive(path: Path, wanted: re.Pattern[str]) -> Iterator[tuple[re.Match[str], bytes]]:
    try:
        check_regular(path)
        with unpacked(path) as content, tarfile.open(fileobj=content, mode="r:") as archive:
            total = 0
            for member in archive:
                match = wanted.fullmatch(member.name)
                stream = archive.extractfile(member) if match and member.isfile() else None
                if match and stream is not None:
                    total += member.size  # a header may claim any size, even for a sparse file
                    if total > LARGEST:
                        raise ValueError(f"{member.name} of {member.size:,} bytes takes the files beyond {LARGEST:,}")
                    yield match, stream.read()
            while content.read(1 << 20):
                pass  # the checksum of the archive is at its end
    except DAMAGED as error:
        raise ConfigError(f"{path}: not a readable tar archive ({error}); fetch it again") from error


def _ordered(found: list[tuple[re.Match[str], bytes]], path: Path, what: str) -> list[tuple[re.Match[str], bytes]]:
    if not found:
        raise ConfigError(f"{path} holds no {what}")
    return sorted(found, key=lambda item: item[0][0])


def unpacked(path: Path) -> Bounded:
    """Open the content of a file; if packed, unpack it, up to 2 * `LARGEST` bytes."""
    with path.open("rb") as stream:
        start = stream.read(6)
    opener = next((opener for magic, opener in _MAGIC.items() if start.startswith(magic)), None)
    return Bounded(path.open("rb"), None) if opener is None else Bounded(opener(path, "rb"), 2 * LARGEST)


def gunzipped(content: bytes) -> bytes:
    """Unpack gzip content; ValueError for more than `LARGEST` bytes."""
    found, parts = 0, []
    with gzip.GzipFile(fileobj=io.BytesIO(content)) as stream:
        while part := stream.read(1 << 20):
            parts.append(part)
            found += len(part)
            if found > LARGEST:
                raise ValueError(f"unpacks to more than {LARGEST:,} bytes")
    return b"".join(parts)


def lines_of(path: Path) -> Iterator[str]:
    """Yield the lines of a text file, plain or packed by gzip (NAME.gz).

    Raises:
        ValueError: a line of more than `LONGEST_LINE` characters, or more than `MOST_PACKED` times the packed bytes.
    """
    packed = path.suffix == ".gz"
    end = path.stat().st_size * MOST_PACKED + _SLACK if packed else None
    read = 0
    with gzip.open(path, "rt", encoding="utf-8") if packed else path.open(encoding="utf-8") as stream:
        while line := stream.readline(LONGEST_LINE + 1):
            read += len(line)
            if len(line) > LONGEST_LINE:
                raise ValueError(f"a line of more than {LONGEST_LINE:,} characters")
            if end is not None and read > end:
                raise ValueError(f"unpacks to more than {MOST_PACKED} times its size")
            yield line


def read_class_folders(
    path: Path, classes: Sequence[str], parts: Mapping[str, Sequence[str]], wanted: Sequence[str]
) -> dict[str, Images] | None:
    """Return the requested splits, ordered by file name; None if there is no folder of any split.

    Args:
        path: a folder, or one that contains only that folder.
        classes: names of the class folders, in the order of the ids.
        parts: split -> possible names of its folder, e.g. {"test": ("test", "val")}.
        wanted: names of the splits.

    Raises:
        ConfigError: a class folder has an unknown name, or contains no images.
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
    """Return the pattern of the images in an archive of class folders, for `read_files`."""
    names = "|".join(re.escape(name) for split in wanted for name in parts[split])
    return rf"(?P<part>{names})/(?P<kind>[^/.][^/]*)/(?:[^/]+/)*[^/.][^/]*{PICTURE}"


def of_archive(
    path: Path,
    files: Sequence[tuple[re.Match[str], bytes]],
    classes: Sequence[str],
    parts: Mapping[str, Sequence[str]],
    wanted: Sequence[str],
) -> dict[str, Images]:
    """Return the splits as `read_class_folders` does, from files found with the pattern `archived`, in memory."""
    if unknown := sorted({match["kind"] for match, _ in files} - set(classes)):
        raise ConfigError([f"{path}: {unknown_class(name, classes)}" for name in unknown[:MAX_FAULTS]])
    found = {}
    for split in wanted:
        chosen = [(match, content) for match, content in files if match["part"] in parts[split]]
        pictures = EncodedPictures([content for _, content in chosen], [f"{path}: {match[0]}" for match, _ in chosen])
        labels = [classes.index(match["kind"]) for match, _ in chosen]
        found[split] = Images(pictures, np.array(labels, dtype=np.int64))
    return found
