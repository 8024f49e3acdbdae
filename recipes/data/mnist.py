"""MNIST: 60,000 + 10,000 grey images of digits, 28 x 28 pixels (LeCun, Cortes and Burges 1998).

The official files are idx: a magic number (two zero bytes, 8 for unsigned bytes, the number of dimensions), each
dimension as four bytes, big-endian, then the values.
"""

from __future__ import annotations

import math
import re
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from data import TASKS
from data._folders import gunzipped, read_files
from data._images import ArrayPictures, HubImageTask, HubSource
from snnk_peft.errors import ConfigError
from snnk_peft.tasks._files import MAX_FAULTS
from snnk_peft.tasks.base_image import Images, label_fault

CLASSES = tuple("0123456789")
PREFIX = {"train": "train", "test": "t10k"}
_FILES = r"(?P<part>train|t10k)-(?P<kind>images|labels)[.-]idx[13]-ubyte(?P<packed>\.gz)?"
_WORDS = "{train,t10k}-{images-idx3,labels-idx1}-ubyte(.gz)"


def read_idx(content: bytes, dimensions: int) -> np.ndarray:
    """Read a uint8 array with this number of dimensions; a ValueError says what is wrong with the bytes."""
    start = 4 + 4 * dimensions
    if len(content) < start or content[:4] != bytes((0, 0, 8, dimensions)):
        raise ValueError(
            f"begins with {content[:4].hex(' ')}; expected 00 00 08 {dimensions:02x}: not an idx file of this kind"
        )
    shape = [int.from_bytes(content[at : at + 4], "big") for at in range(4, start, 4)]
    if len(content) - start != math.prod(shape):
        raise ValueError(
            f"{len(content) - start} values; expected {' x '.join(map(str, shape))}: the file was truncated"
        )
    return np.frombuffer(content, np.uint8, offset=start).reshape(shape)


def read_mnist(path: Path, wanted: Sequence[str]) -> dict[str, Images]:
    """Return the requested splits of a folder or tar archive; unpacked files take precedence over packed ones."""
    files: dict[tuple[str, str], tuple[re.Match[str], bytes]] = {}
    for match, content in read_files(path, _FILES, _WORDS):  # ordered by name: the packed one comes second
        files.setdefault((match["part"], match["kind"]), (match, content))
    found, faults = {}, []
    for split in wanted:
        arrays: dict[str, np.ndarray] = {}
        for kind, dimensions in (("images", 3), ("labels", 1)):
            if (file := files.get((PREFIX[split], kind))) is None:
                faults.append(f"{path} has no {PREFIX[split]}-{kind}-idx{dimensions}-ubyte ({split} split)")
                continue
            match, content = file
            try:
                arrays[kind] = read_idx(gunzipped(content) if match["packed"] else content, dimensions)
            except (ValueError, OSError, EOFError, zlib.error) as error:
                faults.append(f"{path}: {match[0]}: {error}; fetch it again")
        if len(arrays) < 2:
            continue
        images, labels = arrays["images"], arrays["labels"]
        if len(images) != len(labels):
            faults.append(f"{path}: {len(images)} {split} images and {len(labels)} labels; expected one label each")
            continue
        if (fault := label_fault(labels, len(CLASSES), f"{path} ({split})")) is not None:
            faults.append(fault)
        found[split] = Images(ArrayPictures(images, f"{path} ({split})"), labels)
    if faults:
        raise ConfigError(faults[:MAX_FAULTS])
    return found


MNIST = HubImageTask(
    name="mnist",
    read=read_mnist,
    label_names=CLASSES,
    folder=_WORDS,
    source="MNIST (LeCun, Cortes and Burges 1998)",
    hub=HubSource("ylecun/mnist"),
)
TASKS.register(MNIST.name, MNIST)
