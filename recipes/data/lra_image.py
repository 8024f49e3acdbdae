"""Grey CIFAR-10, read pixel by pixel: 1024 tokens, 10 classes ("Image" of LRA; Krizhevsky 2009).

The files are those of task cifar10: python or binary batches, or images of 32 x 32 pixels in class folders, in a folder
or in a tar archive. Python batches are read without unpickling them.

A token is the grey value (0.299 R + 0.587 G + 0.114 B, rounded) plus 1. There is no official validation split: every
tenth training image, counted per class in the order of the files, is held out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np

from data import TASKS, Sequences, SequenceTask
from data.base_sequence import byte_tokens, with_validation
from data.cifar import CIFAR10, PIXELS, SIDE
from snnk_peft.errors import ConfigError
from snnk_peft.tasks import Images
from snnk_peft.tasks._files import capped
from snnk_peft.tasks.base_image import UnreadableImageError, converted

HELD_OUT_EVERY = 10


def read_images(path: Path | None, wanted: Mapping[str, int | None]) -> dict[str, Sequences]:
    """The splits of any layout; an archive is unpacked once, in memory."""
    assert path is not None
    parts = CIFAR10.read(path, list(dict.fromkeys("test" if split == "test" else "train" for split in wanted)))
    faults: list[str] = []
    found = with_validation(_examples(parts, faults), HELD_OUT_EVERY)
    faults += [f"{path} holds no image for the {split} split" for split in wanted if not len(found[split])]
    if faults:
        raise ConfigError(capped(faults, path))
    return {split: found[split] for split in wanted}


def _examples(parts: Mapping[str, Images], faults: list[str]) -> Iterator[tuple[str, int, np.ndarray]]:
    """("train" or "test", class id, tokens (1024,)) of every image; `faults` gets what is wrong with the others."""
    for part, images in parts.items():
        for index, label in enumerate(images["label"].tolist()):
            try:
                yield part, label, byte_tokens(_grey(images, index).tobytes(), PIXELS)
            except UnreadableImageError as error:
                faults.append(str(error))


def _grey(images: Images, index: int) -> np.ndarray:
    """(1024,) uint8."""
    image = images.picture(index)
    if image.size != (SIDE, SIDE):
        raise UnreadableImageError(
            f"{images.name(index)}: image of {image.size[0]} x {image.size[1]} pixels; expected {SIDE} x {SIDE}"
        )
    colours = np.asarray(converted(image, 3)).reshape(PIXELS, 3).T
    return (np.array([0.299, 0.587, 0.114]) @ colours + 0.5).astype(np.uint8)


LRA_IMAGE = SequenceTask(
    name="lra_image", read=read_images, vocab_size=257, max_length=PIXELS, label_names=CIFAR10.classes
)
TASKS.register(LRA_IMAGE.name, LRA_IMAGE)
