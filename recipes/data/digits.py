"""Handwritten digits of 8 x 8 pixels: 1,797 grey images that come with scikit-learn (UCI, Alpaydin and Kaynak 1998).

No files or network are needed. scikit-learn has no split for them: every third image of each class, in its order, is
a test image, 596 in all, always the same ones. It does not name the writers, so both splits share them, and scores are
those on known writers.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from data import TASKS
from data._images import ArrayPictures
from snnk_peft.errors import ConfigError
from snnk_peft.tasks._files import require
from snnk_peft.tasks.base_image import Images, ImageTask

TEST_EVERY = 3
# Each pixel counts the dark ones among 4 x 4 pixels of the scan.
BRIGHTEST = 16


def read_digits(path: Path | None, wanted: Sequence[str]) -> dict[str, Images]:
    """Return the requested splits; ConfigError if a folder is given, as it would not be read."""
    if path is not None:
        raise ConfigError(f"data.dir is {path}, but the digits come with scikit-learn: leave it out")
    found = require("sklearn.datasets").load_digits()
    pixels = np.rint(found.images * (255 / BRIGHTEST)).astype(np.uint8)
    labels = np.asarray(found.target)
    place = np.empty_like(labels)  # index among the images of its class
    for label in np.unique(labels):
        place[labels == label] = np.arange((labels == label).sum())
    test = place % TEST_EVERY == TEST_EVERY - 1
    splits = {"train": ~test, "test": test}
    pictures = ArrayPictures(pixels, "scikit-learn's digits")
    return {split: Images(pictures, labels[splits[split]], np.flatnonzero(splits[split])) for split in wanted}


class Digits(ImageTask):
    """The task, whose images need no folder."""

    def _fetched(self, wanted: Sequence[str], cache_dir: str | None) -> dict[str, Images]:
        return read_digits(None, wanted)


DIGITS = Digits(
    name="digits",
    read=read_digits,
    label_names=tuple("0123456789"),
    folder="no folder: the digits come with scikit-learn, leave data.dir out",
    source="the handwritten digits of scikit-learn (Alpaydin and Kaynak 1998)",
)
TASKS.register(DIGITS.name, DIGITS)
