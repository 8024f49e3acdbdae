"""Random changes of training pictures: crop and resize, shift, flip, mixup, cutmix.

What happens to an example is a pure function of (seed, epoch, index), whatever the batch, the process or the worker it
is made in: so a resumed run, or one on another number of workers, sees the same pixels.

mixup (Zhang et al. 2018): λ x + (1 − λ) x′ with labels λ y + (1 − λ) y′, λ ~ Beta(α, α), x′ another example of the set;
cutmix (Yun et al. 2019): x with a rectangle of x′ that covers 1 − λ of it. Of both, one is drawn per example.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from PIL import Image

from lib.settings import AugmentSection

_LOG_RATIOS = math.log(3 / 4), math.log(4 / 3)
_TRIES = 10


class Augmentation:
    """What is done to the pictures of a training set.

    Args:
        settings: which changes.
        size: (height, width) that cropped pictures get.
        resample: how pictures are scaled, as in Pillow.
        seed: of the run.
    """

    def __init__(self, settings: AugmentSection, size: tuple[int, int], resample: int, seed: int):
        self.settings, self.size, self.resample, self.seed = settings, size, resample, seed

    def generator(self, epoch: int, index: int) -> np.random.Generator:
        """Of one example in one epoch."""
        return np.random.default_rng((self.seed, epoch, index))

    def picture(self, image: Image.Image, rng: np.random.Generator) -> Image.Image:
        """A picture of (height, width) `size` if it is cropped, otherwise of its own size."""
        settings = self.settings
        if settings.crop_scale is not None:
            box = crop_box(image.size, settings.crop_scale, rng)
            image = image.resize(self.size[::-1], Image.Resampling(self.resample), box=box)
        if settings.shift:
            left, top = (int(value) for value in rng.integers(-settings.shift, settings.shift + 1, 2))
            image = image.transform(image.size, Image.Transform.AFFINE, (1, 0, left, 0, 1, top))
        if rng.random() < settings.flip:
            image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        return image

    @property
    def mixes(self) -> bool:
        """Whether examples are mixed with others."""
        return self.settings.mixup > 0 or self.settings.cutmix > 0

    def mixed(
        self, pixels: np.ndarray, rng: np.random.Generator, count: int, other: Callable[[int], tuple[np.ndarray, Any]]
    ) -> tuple[np.ndarray, Any, float]:
        """Pixels with a part of another example, that example's label, and the share λ that is the first one's.

        Args:
            pixels: (channels, height, width) float32, normalised.
            rng: of the first example.
            count: number of examples.
            other: example number -> its pixels and label.
        """
        settings = self.settings
        # One is drawn where both are on; the share of a mixed pair follows its Beta distribution.
        cut = settings.cutmix > 0 and (settings.mixup == 0 or rng.random() < 0.5)
        alpha = settings.cutmix if cut else settings.mixup
        share = float(rng.beta(alpha, alpha))
        second, label = other(int(rng.integers(count)))
        if not cut:
            return (share * pixels + (1 - share) * second).astype(np.float32), label, share
        rows, columns = cut_slices(pixels.shape[1:], share, rng)
        result = pixels.copy()
        result[:, rows, columns] = second[:, rows, columns]
        covered = (rows.stop - rows.start) * (columns.stop - columns.start)
        return result, label, 1 - covered / math.prod(pixels.shape[1:])


def crop_box(size: tuple[int, int], smallest: float, rng: np.random.Generator) -> tuple[int, int, int, int]:
    """A random rectangle of `smallest` to all of the area and of ratio 3/4 to 4/3: (left, top, right, bottom).

    After ten draws that do not fit: the largest one in the middle whose ratio is in that range (Szegedy et al. 2015).
    """
    width, height = size
    for _ in range(_TRIES):
        area = width * height * rng.uniform(smallest, 1.0)
        ratio = math.exp(rng.uniform(*_LOG_RATIOS))
        w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < w <= width and 0 < h <= height:
            left, top = int(rng.integers(width - w + 1)), int(rng.integers(height - h + 1))
            return left, top, left + w, top + h
    w, h = min(width, round(height * 4 / 3)), min(height, round(width * 4 / 3))
    left, top = (width - w) // 2, (height - h) // 2
    return left, top, left + w, top + h


def cut_slices(shape: tuple[int, ...], share: float, rng: np.random.Generator) -> tuple[slice, slice]:
    """Rows and columns of a rectangle that covers 1 − share of (height, width), cut off at the border."""
    side = math.sqrt(1 - share)
    found = []
    for length in shape:
        half, middle = round(length * side) // 2, int(rng.integers(length))
        found.append(slice(max(0, middle - half), min(length, middle + half)))
    return found[0], found[1]
