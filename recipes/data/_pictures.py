"""Pictures that are kept in memory: as an array, or as encoded bytes."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from snnk_peft.tasks._files import require
from snnk_peft.tasks.base_image import Pictures

if TYPE_CHECKING:
    from PIL.Image import Image


class ArrayPictures(Pictures):
    """Pictures of one size.

    Args:
        pixels: (n, height, width) grey or (n, height, width, 3) RGB, uint8.
        source: the file they are from.
    """

    def __init__(self, pixels: np.ndarray, source: str):
        self._pixels, self._source = pixels, source

    def __len__(self) -> int:
        return len(self._pixels)

    def name(self, index: int) -> str:
        """File and number."""
        return f"{self._source}, image {index}"

    def _opened(self, index: int) -> Image:
        image: Image = require("PIL.Image").fromarray(self._pixels[index])
        return image

    def _content(self, index: int) -> bytes:
        return self._pixels[index].tobytes()

    def _identity(self, index: int) -> bytes:
        return self._content(index)


class EncodedPictures(Pictures):
    """Encoded pictures in memory.

    Args:
        contents: PNG, JPEG or the like.
        names: where each is from.
    """

    def __init__(self, contents: Sequence[bytes], names: Sequence[str]):
        self._contents, self._names = contents, names

    def __len__(self) -> int:
        return len(self._contents)

    def name(self, index: int) -> str:
        """As given."""
        return self._names[index]

    def _opened(self, index: int) -> Image:
        image: Image = require("PIL.Image").open(io.BytesIO(self._contents[index]))
        return image

    def _content(self, index: int) -> bytes:
        return self._contents[index]

    def _identity(self, index: int) -> bytes:
        return self._contents[index]
