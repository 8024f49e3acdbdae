"""Stand-ins for review data: an archive like vaderSentiment's with sentences made up here, and folders like IMDb's."""

from __future__ import annotations

import hashlib
import io
import itertools
import tarfile
from collections.abc import Mapping
from pathlib import Path

from data import film_reviews as films

PYPROJECT = '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'
# What pip runs to ask for metadata. It leaves a mark, so that a test sees whether it ran.
BACKEND = """
import os, pathlib
def prepare_metadata_for_build_wheel(directory, config_settings=None):
    pathlib.Path(os.environ["BACKEND_RAN"]).touch()
    folder = pathlib.Path(directory, "vaderSentiment-3.3.2.dist-info")
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\\nName: vaderSentiment\\nVersion: 3.3.2\\n")
    return folder.name
"""
GOOD = ("wonderful", "moving", "brilliant", "charming", "superb", "delightful", "touching", "excellent")
BAD = ("awful", "boring", "terrible", "clumsy", "dreadful", "tedious", "stupid", "horrible")
THINGS = ("story", "script", "ending", "cast", "music", "comedy", "drama", "sequel", "thriller", "picture")


def tar(files: Mapping[str, bytes]) -> bytes:
    """A compressed tar archive of these files."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return buffer.getvalue()


def source_distribution(rows: bytes, text: str = films.TEXT, inner: str = films.INNER) -> bytes:
    """An archive that pip can ask for its metadata, with `rows` where the ratings are."""
    root = "vaderSentiment-3.3.2"
    metadata = b"Metadata-Version: 2.1\nName: vaderSentiment\nVersion: 3.3.2\n"
    project = {"PKG-INFO": metadata, "pyproject.toml": PYPROJECT.encode(), "backend.py": BACKEND.encode()}
    return tar({**{f"{root}/{name}": file for name, file in project.items()}, inner: tar({text: rows})})


def write_archive(folder: Path, content: bytes) -> tuple[Path, str]:
    """`content` under the archive's name in `folder`, which is made; returns the path and its SHA-256."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / films.ARCHIVE
    path.write_bytes(content)
    return path, hashlib.sha256(content).hexdigest()


def made_up_rows() -> bytes:
    """640 rated sentences, half of them positive, as the file has them: no header, lines end in CR LF."""
    lines = []
    for words, sign in ((GOOD, 1), (BAD, -1)):
        for word, other, thing in itertools.product(words, words, THINGS):
            if other != word or thing < "m":
                lines.append(f"{sign * (1 + len(lines) % 3)}.25\tA {word} {thing}, and {other} to the last minute.")
    return "\r\n".join(f"{number}\t{line}" for number, line in enumerate(lines, start=1)).encode()


def write_reviews(folder: Path, train: int = 20, test: int = 3) -> Path:
    """aclImdb/ in the official layout, so many reviews of each class."""
    for part, count in (("train", train), ("test", test)):
        for kind in ("neg", "pos"):
            place = folder / "aclImdb" / part / kind
            place.mkdir(parents=True)
            for number in range(count):
                (place / f"{number}_7.txt").write_text(f"{kind} {part} {number}<br /><br />naïve", encoding="utf-8")
    (folder / "aclImdb/train/unsup").mkdir()
    (folder / "aclImdb/train/unsup/0_0.txt").write_text("without a label")
    return folder
