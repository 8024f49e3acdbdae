"""Batching of images: decoded, augmented for training, resized and normalised by the model's image processor.

With `data.workers`, batches are prepared ahead of time in worker processes; the pixels do not depend on their number.
An image that cannot be read is named; as long as there are no more than `data.max_unreadable` of them, training takes
the next readable one instead and evaluation leaves it out.

Augmentation is a pure function of (seed, epoch, index), whatever the batch, process or worker: a resumed run, or one
with another number of workers, sees the same pixels.

mixup (Zhang et al. 2018): λ x + (1 − λ) x′ with labels λ y + (1 − λ) y′, λ ~ Beta(α, α), x′ another example of the set;
cutmix (Yun et al. 2019): x with a rectangle of x′ that covers 1 − λ of it. With both on, one is drawn per example.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset

from snnk_cli.data import ExampleSet, check_not_empty
from snnk_cli.settings import AugmentSection
from snnk_peft.errors import ConfigError
from snnk_peft.tasks import Images
from snnk_peft.tasks._files import capped
from snnk_peft.tasks.base import IGNORED
from snnk_peft.tasks.base_image import UnreadableImageError, converted

_LOG_RATIOS = math.log(3 / 4), math.log(4 / 3)
_TRIES = 10
_LOOKED_AT = 20_000  # images decoded to name all unreadable ones of a set, which takes a minute or two


class ImageExamples(ExampleSet):
    """Images with one class each.

    Args:
        rows: the examples.
        processor: an image processor of transformers (Pillow backend).
        channels: input channels of the model, 1 (grey) or 3 (RGB).
        classes: number of classes.
        augmentation: augmentation of a training set; None for evaluation.
        workers: worker processes that prepare batches; 0 prepares them in this one.
        max_unreadable: maximum number of unreadable images; more are an error.
    """

    def __init__(
        self,
        rows: Images,
        processor: Any,
        channels: int,
        classes: int,
        augmentation: Augmentation | None = None,
        workers: int = 0,
        max_unreadable: int = 0,
    ):
        check_not_empty(rows)
        self._rows, self._processor, self._channels, self._classes = rows, processor, channels, classes
        self._augmentation, self._workers, self._limit = augmentation, workers, max_unreadable
        self.labels = torch.from_numpy(np.asarray(rows.labels))
        self.unreadable: dict[int, str] = {}
        # All images have one size, so there is nothing to group by length.
        self.lengths = [1] * len(rows)

    def describe(self) -> str:
        """Describe the number and size of the images."""
        height, width = input_size(self._processor)
        return f"{len(self):,} images at {height} x {width} pixels"

    def batch(self, indices: Sequence[int], device: torch.device | str = "cpu") -> dict[str, torch.Tensor]:
        """Return model inputs for evaluation: pixel_values (batch, channels, height, width), labels (batch,)."""
        return next(self.batches([indices], device))

    def batches(
        self, wanted: Sequence[Sequence[int]], device: torch.device | str = "cpu", epoch: int | None = None
    ) -> Iterator[dict[str, torch.Tensor]]:
        """Yield batches as `ExampleSet.batches`; with mixing, soft_labels (batch, classes) replace labels (batch,)."""
        made: Any = _Batches(self, wanted, epoch)
        if self._workers and len(wanted) > 1:
            made = DataLoader(
                made,
                batch_size=None,
                num_workers=min(self._workers, len(wanted)),
                pin_memory=torch.device(device).type == "cuda",
            )
        else:
            made = map(made.__getitem__, range(len(wanted)))
        for inputs, faults in made:
            self._note(faults)
            yield {name: values.to(device, non_blocking=True) for name, values in inputs.items()}

    def make(self, indices: Sequence[int], epoch: int | None) -> tuple[dict[str, torch.Tensor], dict[int, str]]:
        """Return a batch on the CPU, and the messages about unreadable images by example."""
        faults: dict[int, str] = {}
        if epoch is None:
            return self._plain(indices, faults), faults
        if (augmentation := self._augmentation) is None:
            raise ValueError("an epoch of examples without augmentation; expected one made for training")
        rows, soft = [], torch.zeros(len(indices), self._classes)
        for place, index in enumerate(indices):
            rng = augmentation.generator(epoch, index)
            pixels, label = self._changed(index, augmentation, rng, faults)
            share = 1.0
            if augmentation.mixes:

                def other(number: int) -> tuple[np.ndarray, int]:
                    return self._changed(number, augmentation, augmentation.generator(epoch, number), faults)

                pixels, second, share = augmentation.mixed(pixels, rng, len(self), other)
                soft[place, second] += 1 - share
            soft[place, label] += share
            rows.append(pixels)
        inputs = {"pixel_values": torch.from_numpy(np.stack(rows))}
        if augmentation.mixes:
            return {**inputs, "soft_labels": soft}, faults
        return {**inputs, "labels": soft.argmax(1)}, faults

    def fingerprint(self) -> str:
        """Return a digest of labels and images."""
        return self._rows.fingerprint()

    def _plain(self, indices: Sequence[int], faults: dict[int, str]) -> dict[str, torch.Tensor]:
        images, labels = [], self._rows.labels[list(indices)].copy()
        for place, index in enumerate(indices):
            image = self._read(index, faults)
            labels[place] = labels[place] if image is not None else IGNORED
            images.append(image)
        blank = next((image for image in images if image is not None), None)
        if blank is None:
            # A batch without readable images still has the shape of a batch.
            shape = len(indices), self._channels, *input_size(self._processor)
            return {"pixel_values": torch.zeros(shape), "labels": torch.from_numpy(labels)}
        pixels = self._pixels([blank if image is None else image for image in images])
        return {"pixel_values": torch.from_numpy(pixels), "labels": torch.from_numpy(labels)}

    def _changed(
        self, index: int, augmentation: Augmentation, rng: np.random.Generator, faults: dict[int, str]
    ) -> tuple[np.ndarray, int]:
        """Return augmented pixels and label of a training example, or of the next readable one."""
        for step in range(len(self)):
            found = (index + step) % len(self)
            image = self._read(found, faults)
            if image is not None:
                done = augmentation.settings.crop_scale is not None
                pixels = self._pixels([augmentation.picture(image, rng)], resized=done)
                return pixels[0], int(self._rows.labels[found])
        raise ConfigError(f"none of {len(self)} images can be read; the first: {next(iter(faults.values()))}")

    def _read(self, index: int, faults: dict[int, str]) -> Any:
        try:
            return converted(self._rows.picture(index), self._channels)
        except UnreadableImageError as error:
            faults[index] = str(error)
            return None

    def _pixels(self, images: list[Any], resized: bool = False) -> np.ndarray:
        """Preprocess images to (batch, channels, height, width) float32."""
        options = {"do_resize": False, "do_center_crop": False} if resized else {}
        # Grey images lack the channel axis that processors expect.
        arrays = [np.asarray(image) if self._channels == 3 else np.asarray(image)[..., None] for image in images]
        done = self._processor(arrays, return_tensors="np", input_data_format="channels_last", **options)
        pixels: np.ndarray = done["pixel_values"]
        return pixels.astype(np.float32, copy=False)

    def _note(self, faults: dict[int, str]) -> None:
        for index, message in faults.items():
            if index not in self.unreadable:
                self.unreadable[index] = message
                print(f"note: left out: {message}")
        if len(self.unreadable) > self._limit:
            found, looked_at = dict(self.unreadable), min(len(self), _LOOKED_AT)
            for index in range(looked_at):  # all at once, so that one round of fixes is enough
                if index not in found:
                    self._read(index, found)
            of = "" if looked_at == len(self) else f" (the first {looked_at:,} of {len(self):,} were checked)"
            listed = capped([found[index] for index in sorted(found)], "unreadable")
            raise ConfigError(
                [
                    f"{len(found)} images cannot be read{of}; expected at most {self._limit} "
                    "(data.max_unreadable): repair or remove them",
                    *listed,
                ]
            )


class _Batches(Dataset[Any]):
    """Batches by number, for a DataLoader."""

    def __init__(self, examples: ImageExamples, wanted: Sequence[Sequence[int]], epoch: int | None):
        self._examples, self._wanted, self._epoch = examples, wanted, epoch

    def __len__(self) -> int:
        return len(self._wanted)

    def __getitem__(self, number: int) -> tuple[dict[str, torch.Tensor], dict[int, str]]:
        return self._examples.make(self._wanted[number], self._epoch)


def input_size(processor: Any) -> tuple[int, int]:
    """Return (height, width) of the output of an image processor."""
    sizes = [processor.crop_size] if getattr(processor, "do_center_crop", False) else []
    for size in (*sizes, processor.size):
        if size is not None and "height" in size:
            return int(size["height"]), int(size["width"])
    edge = processor.size.get("shortest_edge")
    raise ConfigError(
        f"the image processor resizes to {dict(processor.size)} without cropping, so images of a batch differ in "
        f"size; expected height and width: set size to {{height: {edge}, width: {edge}}} in its "
        "preprocessor_config.json"
    )


def channels_of(processor: Any) -> int:
    """Return the number of channels, 1 (grey) or 3 (RGB), from the processor's means."""
    means = getattr(processor, "image_mean", None) or (0.0, 0.0, 0.0)
    channels = 3 if isinstance(means, (int, float)) else len(means)
    if channels not in (1, 3):
        raise ConfigError(f"the image processor has {channels} means (image_mean); expected 1 (grey) or 3 (RGB)")
    return channels


class Augmentation:
    """Random augmentation of the images of a training set.

    Args:
        settings: the augmentations to apply.
        size: (height, width) of cropped images.
        resample: resampling filter of Pillow.
        seed: seed of the run.
    """

    def __init__(self, settings: AugmentSection, size: tuple[int, int], resample: int, seed: int):
        self.settings, self.size, self.resample, self.seed = settings, size, resample, seed

    def generator(self, epoch: int, index: int) -> np.random.Generator:
        """Return the generator of one example in one epoch."""
        return np.random.default_rng((self.seed, epoch, index))

    def picture(self, image: Image.Image, rng: np.random.Generator) -> Image.Image:
        """Augment one image; a cropped one gets (height, width) `size`, others keep their own."""
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
        """True if examples are mixed (mixup or cutmix)."""
        return self.settings.mixup > 0 or self.settings.cutmix > 0

    def mixed(
        self, pixels: np.ndarray, rng: np.random.Generator, count: int, other: Callable[[int], tuple[np.ndarray, Any]]
    ) -> tuple[np.ndarray, Any, float]:
        """Mix in another example; return the pixels, that example's label, and the share λ of the first one.

        Args:
            pixels: (channels, height, width) float32, normalised.
            rng: generator of the first example.
            count: number of examples.
            other: example number -> its pixels and label.
        """
        settings = self.settings
        # With both on, one is drawn, and the share follows its Beta distribution.
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
    """Draw a rectangle of `smallest` to all of the area and aspect ratio 3/4 to 4/3: (left, top, right, bottom).

    After ten draws that do not fit, use the largest central one with a ratio in that range (Szegedy et al. 2015).
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
    """Draw the rows and columns of a rectangle that covers 1 − share of (height, width), clipped at the border."""
    side = math.sqrt(1 - share)
    found = []
    for length in shape:
        half, middle = round(length * side) // 2, int(rng.integers(length))
        found.append(slice(max(0, middle - half), min(length, middle + half)))
    return found[0], found[1]
