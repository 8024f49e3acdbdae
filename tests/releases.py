"""What released versions wrote: the archives in tests/fixtures, each unpacked into a folder until the tests end."""

from __future__ import annotations

import tempfile
import zipfile
from pathlib import Path

_FOLDER = tempfile.TemporaryDirectory(prefix="snnk_releases_")  # removed with this object


def _unpacked(archive: Path) -> Path:
    folder = Path(_FOLDER.name) / archive.stem
    with zipfile.ZipFile(archive) as files:
        files.extractall(folder)
    return folder


RELEASES = [_unpacked(archive) for archive in sorted(Path(__file__).parent.glob("fixtures/release_*.zip"))]
