"""Pictures of a split, wherever they are kept.

A picture is decoded when it is asked for, in the process that asks (a loader's worker), so a split may be larger than
memory. Pillow (the `recipes` extra) decodes.
"""

from __future__ import annotations

import hashlib
import io
import struct
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from snnk_peft.tasks._extras import require
from snnk_peft.tasks._regular import read_bytes

if TYPE_CHECKING:
    from PIL.Image import Image

# What Pillow raises for damaged files of its many formats.
DAMAGED = (OSError, SyntaxError, ValueError, EOFError, IndexError, KeyError, TypeError, OverflowError, struct.error)
# Modes with eight bits per channel, which convert to grey or RGB without loss of meaning.
_MODES = ("1", "L", "LA", "P", "PA", "RGB", "RGBA", "RGBX", "CMYK", "YCbCr")
LARGEST = 1 << 30
"""Bytes of an encoded picture; what claims more is damaged."""
_ORIENTATION = 0x0112  # the EXIF tag by which a camera says how it was held


class UnreadableImageError(ValueError):
    """A picture that cannot be decoded, or whose mode has no eight-bit meaning; says which, and why."""


class Pictures(ABC):
    """Pictures by number."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def name(self, index: int) -> str:
        """Where picture `index` is, for messages."""

    @abstractmethod
    def _opened(self, index: int) -> Image: ...

    @abstractmethod
    def _content(self, index: int) -> bytes:
        """The picture as it is kept, encoded or as pixels."""

    @abstractmethod
    def _identity(self, index: int) -> bytes:
        """What two runs must agree in; of large sets not the pixels, which would take minutes to read."""

    def open(self, index: int) -> Image:
        """Picture `index`, decoded whole and upright, as `datasets.Image` and transformers' pipelines have it.

        Raises:
            UnreadableImageError: a damaged picture, or one with more than eight bits per channel.
        """
        bomb = require("PIL.Image").DecompressionBombError
        try:
            image = self._opened(index)
            image.load()
            if image.getexif().get(_ORIENTATION) is not None:
                image = require("PIL.ImageOps").exif_transpose(image)
        except (*DAMAGED, bomb) as error:
            raise UnreadableImageError(f"{self.name(index)}: cannot be decoded ({error})") from error
        if image.mode not in _MODES:
            raise UnreadableImageError(
                f"{self.name(index)}: mode {image.mode!r}; expected eight bits per channel ({', '.join(_MODES)}): "
                "convert it"
            )
        return image

    def digest(self, index: int) -> bytes | None:
        """SHA-256 of picture `index` as it is kept; None if it cannot be read."""
        try:
            return hashlib.sha256(self._content(index)).digest()
        except DAMAGED:
            return None

    def fingerprint(self, indices: Sequence[int]) -> bytes:
        """A digest of the chosen pictures, in this order."""
        found = hashlib.sha256()
        for index in indices:
            content = self._identity(index)
            found.update(len(content).to_bytes(8, "little"))
            found.update(content)
        return found.digest()


class FilePictures(Pictures):
    """Files of pictures.

    Args:
        root: the folder that they are in.
        files: their paths below it, with "/" between the parts.
    """

    def __init__(self, root: Path, files: Sequence[str]):
        self._root, self._files = root, files

    def __len__(self) -> int:
        return len(self._files)

    def name(self, index: int) -> str:
        """The path."""
        return str(self._root / self._files[index])

    def _opened(self, index: int) -> Image:
        # Read whole: an image that is opened by name keeps its file open.
        image: Image = require("PIL.Image").open(io.BytesIO(self._content(index)))
        return image

    def _content(self, index: int) -> bytes:
        return read_bytes(self._root / self._files[index], LARGEST)

    def _identity(self, index: int) -> bytes:
        try:
            size = (self._root / self._files[index]).stat().st_size
        except OSError:  # a link to nothing, named with the other unreadable pictures
            size = -1
        return f"{self._files[index]}\n{size}".encode()


def converted(image: Any, channels: int) -> Image:
    """A picture in grey (1 channel) or RGB (3)."""
    mode = {1: "L", 3: "RGB"}[channels]
    # A palette with transparency is converted by way of RGBA; Pillow warns otherwise.
    if image.mode == "P" and "transparency" in image.info:
        image = image.convert("RGBA")
    result: Image = image if image.mode == mode else image.convert(mode)
    return result
