"""Pictures to batches: decoded, changed at random for training, resized and normalised by the model's image processor.

With `data.workers`, batches are made ahead of time in processes of their own; which pixels come out does not depend on
their number. A picture that cannot be read is named; while there are no more than `data.max_unreadable` of them,
training takes the next readable one instead and evaluation leaves it out of the count.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from lib.augmentation import Augmentation
from lib.data import ExampleSet, check_not_empty
from snnk_peft.errors import ConfigError
from snnk_peft.tasks import Images
from snnk_peft.tasks._files import capped
from snnk_peft.tasks.base import IGNORED
from snnk_peft.tasks.base_image import UnreadableImageError, converted

_LOOKED_AT = 20_000  # pictures of a set that are decoded to name all unreadable ones: a minute or two


class ImageExamples(ExampleSet):
    """Pictures with a class each.

    Args:
        rows: the examples.
        processor: an image processor of transformers (Pillow backend).
        channels: 1 (grey) or 3 (RGB), what the model reads.
        classes: number of classes.
        augmentation: of a training set, None for one that is only evaluated.
        workers: processes that make batches; 0 makes them in this one.
        max_unreadable: more unreadable pictures than that are an error.
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
        # Pictures of a batch have one size: their order needs no lengths.
        self.lengths = [1] * len(rows)

    def describe(self) -> str:
        """Number and size."""
        height, width = input_size(self._processor)
        return f"{len(self):,} pictures at {height} x {width} pixels"

    def batch(self, indices: Sequence[int], device: torch.device | str = "cpu") -> dict[str, torch.Tensor]:
        """Model inputs as for evaluation: pixel_values (batch, channels, height, width), labels (batch,)."""
        return next(self.batches([indices], device))

    def batches(
        self, wanted: Sequence[Sequence[int]], device: torch.device | str = "cpu", epoch: int | None = None
    ) -> Iterator[dict[str, torch.Tensor]]:
        """See `ExampleSet.batches`; with mixing, labels (batch,) give way to soft_labels (batch, classes)."""
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
        """A batch on the CPU, and the messages about pictures that could not be read, by example."""
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
        """A digest of labels and pictures."""
        return self._rows.fingerprint()

    def _plain(self, indices: Sequence[int], faults: dict[int, str]) -> dict[str, torch.Tensor]:
        images, labels = [], self._rows.labels[list(indices)].copy()
        for place, index in enumerate(indices):
            image = self._read(index, faults)
            labels[place] = labels[place] if image is not None else IGNORED
            images.append(image)
        blank = next((image for image in images if image is not None), None)
        if blank is None:
            # A batch without a readable picture still has the shape of one.
            shape = len(indices), self._channels, *input_size(self._processor)
            return {"pixel_values": torch.zeros(shape), "labels": torch.from_numpy(labels)}
        pixels = self._pixels([blank if image is None else image for image in images])
        return {"pixel_values": torch.from_numpy(pixels), "labels": torch.from_numpy(labels)}

    def _changed(
        self, index: int, augmentation: Augmentation, rng: np.random.Generator, faults: dict[int, str]
    ) -> tuple[np.ndarray, int]:
        """Pixels and label of an example of a training set, or of the next one that can be read."""
        for step in range(len(self)):
            found = (index + step) % len(self)
            image = self._read(found, faults)
            if image is not None:
                done = augmentation.settings.crop_scale is not None
                pixels = self._pixels([augmentation.picture(image, rng)], resized=done)
                return pixels[0], int(self._rows.labels[found])
        raise ConfigError(f"none of {len(self)} pictures can be read; the first: {next(iter(faults.values()))}")

    def _read(self, index: int, faults: dict[int, str]) -> Any:
        try:
            return converted(self._rows.picture(index), self._channels)
        except UnreadableImageError as error:
            faults[index] = str(error)
            return None

    def _pixels(self, images: list[Any], resized: bool = False) -> np.ndarray:
        """(batch, channels, height, width) float32."""
        options = {"do_resize": False, "do_center_crop": False} if resized else {}
        # Grey pictures have no axis of channels, which processors expect.
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
            for index in range(looked_at):  # all at once, so that one round of mending is enough
                if index not in found:
                    self._read(index, found)
            of = "" if looked_at == len(self) else f" (the first {looked_at:,} of {len(self):,} were looked at)"
            listed = capped([found[index] for index in sorted(found)], "unreadable")
            raise ConfigError(
                [
                    f"{len(found)} pictures cannot be read{of}; expected at most {self._limit} "
                    "(data.max_unreadable): mend or remove them",
                    *listed,
                ]
            )


class _Batches(Dataset[Any]):
    """Batches by number, for a loader."""

    def __init__(self, examples: ImageExamples, wanted: Sequence[Sequence[int]], epoch: int | None):
        self._examples, self._wanted, self._epoch = examples, wanted, epoch

    def __len__(self) -> int:
        return len(self._wanted)

    def __getitem__(self, number: int) -> tuple[dict[str, torch.Tensor], dict[int, str]]:
        return self._examples.make(self._wanted[number], self._epoch)


def input_size(processor: Any) -> tuple[int, int]:
    """(height, width) of what an image processor returns."""
    sizes = [processor.crop_size] if getattr(processor, "do_center_crop", False) else []
    for size in (*sizes, processor.size):
        if size is not None and "height" in size:
            return int(size["height"]), int(size["width"])
    edge = processor.size.get("shortest_edge")
    raise ConfigError(
        f"the image processor resizes to {dict(processor.size)} without cropping, so pictures of a batch differ in "
        f"size; expected height and width: set size to {{height: {edge}, width: {edge}}} in its "
        "preprocessor_config.json"
    )


def channels_of(processor: Any) -> int:
    """1 (grey) or 3 (RGB), as many as the processor has means."""
    means = getattr(processor, "image_mean", None) or (0.0, 0.0, 0.0)
    channels = 3 if isinstance(means, (int, float)) else len(means)
    if channels not in (1, 3):
        raise ConfigError(f"the image processor has {channels} means (image_mean); expected 1 (grey) or 3 (RGB)")
    return channels
