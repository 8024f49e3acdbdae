"""Images in tar shards in WebDataset's layout: KEY.jpg with KEY.cls or KEY.json next to it, many per file.

Headers are read once; an image is then read at its offset in the shard. This gives the random access needed to shuffle
all images and to resume a run bit for bit, without the second copy on disk that `datasets` would make.
Compressed archives have no random access: unpack them (gunzip).
"""

from __future__ import annotations

import io
import json
import re
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from snnk_peft.errors import ConfigError
from snnk_peft.tasks._files import DAMAGED, LARGEST, MAX_FAULTS, Bounded, check_regular, require
from snnk_peft.tasks.base_image import Images, Pictures

if TYPE_CHECKING:
    from PIL.Image import Image

_PICTURES = ("jpg", "jpeg", "png", "webp")
_LABELS = ("cls", "json")
_LONGEST_LABEL = 1 << 20  # bytes


class ShardPictures(Pictures):
    """Images that are members of tar files.

    Args:
        root: the folder of the shards.
        shards: their paths relative to it.
        places: (n, 3), the shard index, offset and size in bytes of each image.
    """

    def __init__(self, root: Path, shards: Sequence[str], places: np.ndarray):
        self._root, self._shards, self._places = root, shards, places

    def __len__(self) -> int:
        return len(self._places)

    def name(self, index: int) -> str:
        """Return the shard and the position in it."""
        shard, offset, _ = self._places[index].tolist()
        return f"{self._root / self._shards[shard]}, the picture at byte {offset}"

    def _opened(self, index: int) -> Image:
        image: Image = require("PIL.Image").open(io.BytesIO(self._content(index)))
        return image

    def _content(self, index: int) -> bytes:
        shard, offset, size = self._places[index].tolist()
        with (self._root / self._shards[shard]).open("rb") as stream:
            stream.seek(offset)
            return stream.read(size)

    def _identity(self, index: int) -> bytes:
        shard, offset, size = self._places[index].tolist()
        return f"{self._shards[shard]}\n{offset}\n{size}".encode()


def find_shards(root: Path, parts: Mapping[str, Sequence[str]]) -> dict[str, list[str]]:
    """Find the shards of each split under `root`, sorted; a shard's path names its split, e.g. imagenet-train-0000.tar.

    Raises:
        ConfigError: shards that name no split or several, or that are all compressed.
    """
    shards: dict[str, list[str]] = {split: [] for split in parts}
    files = sorted(file.relative_to(root).as_posix() for file in root.rglob("*.tar"))
    packed = [] if files else sorted(str(file) for kind in ("gz", "xz", "bz2") for file in root.rglob(f"*.tar.{kind}"))
    faults = [f"{file} is compressed, so it has no random access; unpack it to .tar first" for file in packed]
    for file in files:
        words = set(re.split(r"[^a-z]+", file.lower()))
        splits = [split for split, names in parts.items() if words & set(names)]
        if len(splits) == 1:
            shards[splits[0]].append(file)
        else:
            names = ", ".join(name for group in parts.values() for name in group)
            faults.append(f"{root / file}: its name says {' and '.join(splits) or 'no split'}; expected one of {names}")
    if faults:
        raise ConfigError(faults[:MAX_FAULTS])
    return shards if files else {}


def read_shards(root: Path, shards: Sequence[str]) -> Images:
    """Read all images of the shards, in the order of the shards and their members.

    Raises:
        ConfigError: damaged shards, images without a label, labels without an image, or labels that are not class ids.
    """
    places: list[tuple[int, int, int]] = []
    labels: list[int] = []
    faults: list[str] = []
    for number, name in enumerate(shards):
        pictures: dict[str, tuple[int, int, int]] = {}
        ids: dict[str, int] = {}
        try:
            check_regular(root / name)
            with (
                Bounded((root / name).open("rb"), None) as content,
                tarfile.open(fileobj=content, mode="r:") as archive,
            ):
                for member in archive:
                    key, kind = _parts(member.name)
                    if not member.isfile() or kind not in (*_PICTURES, *_LABELS):
                        continue
                    if member.issparse() or member.size > (LARGEST if kind in _PICTURES else _LONGEST_LABEL):
                        raise ValueError(f"{member.name} claims {member.size:,} bytes")
                    if kind in _PICTURES:
                        if key in pictures:
                            raise ValueError(f"two pictures {key}; expected one per key")
                        pictures[key] = (number, member.offset_data, member.size)
                    elif kind == "cls" or key not in ids:  # .cls takes precedence
                        stream = archive.extractfile(member)
                        ids[key] = _label(member.name, b"" if stream is None else stream.read())
        except DAMAGED as error:
            faults.append(f"{root / name}: {error}; expected an uncompressed tar of KEY.jpg and KEY.cls")
            continue
        faults += [f"{root / name}: {key} has no label; expected {key}.cls beside it" for key in pictures.keys() - ids]
        faults += [f"{root / name}: {key} has a label but no picture" for key in ids.keys() - pictures]
        places += pictures.values()
        labels += [ids.get(key, 0) for key in pictures]
    if faults:
        raise ConfigError(sorted(faults)[:MAX_FAULTS])
    return Images(
        ShardPictures(root, shards, np.array(places, dtype=np.int64).reshape(-1, 3)), np.array(labels, dtype=np.int64)
    )


def _parts(name: str) -> tuple[str, str]:
    """Split a name at the first dot of its last part into key and extension."""
    folder, _, last = name.rpartition("/")
    key, _, kind = last.partition(".")
    return f"{folder}/{key}", kind.lower()


def _label(name: str, content: bytes) -> int:
    try:
        if name.endswith(".cls"):
            return int(content)
        label = json.loads(content)["label"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"{name} holds {content[:40]!r}; expected a class id (.json: under 'label')") from error
    if type(label) is not int:
        raise ValueError(f"{name}: label is {label!r}; expected a class id")
    return label
