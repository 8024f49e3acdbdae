"""Grey CIFAR-10, read pixel by pixel: 1024 tokens, 10 classes ("Image" of LRA; Krizhevsky 2009).

Two layouts, in a folder or in a tar archive: the official binary one (data_batch_{1..5}.bin and test_batch.bin: records
of a class byte and 3 · 1024 bytes of red, green and blue), or images of 32 x 32 pixels, {train,test}/CLASS/*.{png,jpg},
which need Pillow. The official pickle files are not read, because reading them runs what they say.

A token is the grey value (0.299 R + 0.587 G + 0.114 B, rounded) plus 1. There is no official validation split: every
tenth training image, counted per class in the order of the files, is held out.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np

from snnk_peft.errors import ConfigError
from snnk_peft.tasks import TASKS, Sequences, SequenceTask
from snnk_peft.tasks._extras import require
from snnk_peft.tasks._folders import read_files
from snnk_peft.tasks._tsv import MAX_FAULTS
from snnk_peft.tasks.base_sequence import byte_tokens, with_validation

CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
SIDE = 32
PIXELS = SIDE * SIDE
RECORD = 1 + 3 * PIXELS
HELD_OUT_EVERY = 10
_BINARY = r"(?P<batch>data|test)_batch(_[1-5])?\.bin"
_IMAGES = rf"(?P<part>train|test)/(?P<kind>{'|'.join(CLASSES)})/[^/]+\.(png|jpe?g)"


def read_images(path: Path | None, wanted: Mapping[str, int | None]) -> dict[str, Sequences]:
    """The splits of either layout; an archive is unpacked once, in memory."""
    assert path is not None
    examples = ((part, label, byte_tokens(grey.tobytes(), PIXELS)) for part, label, grey in _images(path))
    found = with_validation(examples, HELD_OUT_EVERY)
    if faults := [f"{path} holds no image for the {split} split" for split in wanted if not len(found[split])]:
        raise ConfigError(faults)
    return {split: found[split] for split in wanted}


def _images(path: Path) -> Iterator[tuple[str, int, np.ndarray]]:
    """("train" or "test", class id, grey values (1024,) uint8) of every image."""
    files = read_files(path, f"(?:{_BINARY}|{_IMAGES})", "data_batch_N.bin and no {train,test}/CLASS/*.{png,jpg}")
    faults: list[str] = []
    for match, content in files:
        try:
            if match["kind"] is None:
                part = "train" if match["batch"] == "data" else "test"
                yield from ((part, label, grey) for label, grey in _records(content))
            else:
                yield match["part"], CLASSES.index(match["kind"]), _decoded(content)
        except (ValueError, OSError) as error:
            faults.append(f"{path}: {match[0]}: {error}")
    if faults:
        raise ConfigError(faults[:MAX_FAULTS])


def _records(content: bytes) -> Iterator[tuple[int, np.ndarray]]:
    if not content or len(content) % RECORD:
        raise ValueError(f"{len(content)} bytes; expected a multiple of {RECORD}: the file was cut or is another one")
    for record in np.frombuffer(content, np.uint8).reshape(-1, RECORD):
        if record[0] >= len(CLASSES):
            raise ValueError(f"class {record[0]}; expected 0 to {len(CLASSES) - 1} (CIFAR-100 has another layout)")
        yield int(record[0]), _grey(record[1:].reshape(3, PIXELS))


def _decoded(content: bytes) -> np.ndarray:
    with require("PIL.Image").open(io.BytesIO(content)) as image:
        if image.size != (SIDE, SIDE):
            raise ValueError(f"image of {image.size[0]} x {image.size[1]} pixels; expected {SIDE} x {SIDE}")
        return _grey(np.asarray(image.convert("RGB")).reshape(PIXELS, 3).T)


def _grey(colours: np.ndarray) -> np.ndarray:
    """(3, pixels) uint8 -> (pixels,) uint8."""
    return (np.array([0.299, 0.587, 0.114]) @ colours + 0.5).astype(np.uint8)


LRA_IMAGE = SequenceTask(name="lra_image", read=read_images, vocab_size=257, max_length=PIXELS, label_names=CLASSES)
TASKS.register(LRA_IMAGE.name, LRA_IMAGE)
