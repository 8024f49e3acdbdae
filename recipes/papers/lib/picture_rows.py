"""An image as a function of its coordinates: each row of pixels is an example."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from sklearn.datasets import load_sample_image

from snnk_cli.data import ExampleSet
from snnk_peft.errors import ConfigError
from snnk_peft.tasks.base_image import FilePictures, UnreadableImageError, converted


class PictureRows(ExampleSet):
    """Rows of a grey image, values in [−1, 1] at coordinates in [−1, 1]².

    Args:
        values: (height, width).
    """

    def __init__(self, values: torch.Tensor):
        self.values = values
        height, width = values.shape
        self.axes = torch.linspace(-1, 1, height), torch.linspace(-1, 1, width)
        self.lengths = [width] * height

    @property
    def coordinates(self) -> torch.Tensor:
        """Coordinates (height, width, 2): down, right."""
        return torch.stack(torch.meshgrid(*self.axes, indexing="ij"), -1)

    def batch(self, indices: Sequence[int], device: torch.device | str = "cpu") -> dict[str, torch.Tensor]:
        """Return coordinates (rows, width, 2) and values (rows, width, 1)."""
        chosen = list(indices)
        inputs = {"coordinates": self.coordinates[chosen], "values": self.values[chosen].unsqueeze(-1)}
        return {name: tensor.to(device) for name, tensor in inputs.items()}

    def describe(self) -> str:
        return "a picture of {} × {} pixels".format(*self.values.shape)

    def fingerprint(self) -> str:
        return hashlib.sha256(f"{tuple(self.values.shape)}".encode() + self.values.numpy().tobytes()).hexdigest()

    def gradient(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return central differences (height, width, 2), and their own differences, the Laplacian (height, width)."""
        steps = [float(axis[1] - axis[0]) for axis in self.axes]
        first = torch.gradient(self.values, spacing=steps)
        second = [torch.gradient(part, spacing=steps)[axis] for axis, part in enumerate(first)]
        return torch.stack(first, -1), second[0] + second[1]


def read_picture(name: str, file: str | Path | None, size: int) -> PictureRows:
    """Read the central square, in grey at size × size pixels, of a file or of a sample image of scikit-learn.

    Raises:
        ConfigError: there is no such image, or it cannot be read.
    """
    if file is None:
        picture = Image.fromarray(load_sample_image(f"{name}.jpg"))
    else:
        try:
            picture = converted(FilePictures(Path(file).parent, [Path(file).name]).open(0), 3)
        except UnreadableImageError as error:
            raise ConfigError(f"data.file: {file} cannot be read as a picture: {error}") from error
    side = min(picture.size)
    left, top = ((length - side) // 2 for length in picture.size)
    square = picture.convert("L").crop((left, top, left + side, top + side)).resize((size, size))
    return PictureRows(torch.from_numpy(np.asarray(square, dtype=np.float32) / 127.5 - 1))
