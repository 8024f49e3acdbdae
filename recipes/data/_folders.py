"""Files of a data set that comes as a folder or as a tar archive of it, in the same order either way."""

from __future__ import annotations

import re
import tarfile
from collections.abc import Iterator
from pathlib import Path

from data._unpacking import unpacked
from snnk_peft.errors import ConfigError
from snnk_peft.tasks._files import DAMAGED, LARGEST, NotRegularError, check_regular, read_bytes

_ARCHIVE = re.compile(r"\.(tar|tgz|tar\.(gz|xz|bz2))$")


def read_files(path: Path, pattern: str, what: str) -> list[tuple[re.Match[str], bytes]]:
    """The files below `path` whose names match, ordered by name, with their contents.

    Args:
        path: a folder, a tar archive, or a folder that holds exactly one archive and no matching file.
        pattern: a regular expression that the end of a file's path, with "/" between its parts, must match.
        what: what is looked for, in words, for messages.

    Raises:
        ConfigError: no file matches, or the archive is damaged.
    """
    # A path starts anywhere above the folders that the pattern names.
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
    """The archive that `path` is, or the only one in that folder; None if there is none or more."""
    if not path.is_dir():
        return path if _ARCHIVE.search(path.name) else None
    archives = [entry for entry in sorted(path.iterdir()) if _ARCHIVE.search(entry.name)]
    return archives[0] if len(archives) == 1 else None


def _of_folder(path: Path, wanted: re.Pattern[str]) -> Iterator[tuple[re.Match[str], bytes]]:
    for file in path.rglob("*"):
        # Relative to the parent: the given folder may itself be one that the pattern names.
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
                    total += member.size  # which a header may claim without end, of a sparse file too
                    if total > LARGEST:
                        raise ValueError(
                            f"{member.name} of {member.size:,} bytes makes the files more than {LARGEST:,}"
                        )
                    yield match, stream.read()
            while content.read(1 << 20):
                pass  # the checksum of the whole stands at its end
    except DAMAGED as error:
        raise ConfigError(f"{path}: not a readable tar archive ({error}); fetch it again") from error


def _ordered(found: list[tuple[re.Match[str], bytes]], path: Path, what: str) -> list[tuple[re.Match[str], bytes]]:
    if not found:
        raise ConfigError(f"{path} holds no {what}")
    return sorted(found, key=lambda item: item[0][0])
