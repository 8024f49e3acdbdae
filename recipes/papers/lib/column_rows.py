"""Batching of rows of numbers; images are flattened to rows of pixels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from data import Columns

from snnk_cli.data import ExampleSet, check_not_empty, digest
from snnk_peft.errors import ConfigError
from snnk_peft.tasks import Images
from snnk_peft.tasks._files import capped
from snnk_peft.tasks.base_image import UnreadableImageError, converted


class ColumnRows(ExampleSet):
    """A split of a `ColumnsTask`.

    Args:
        rows: the examples.
        shift: subtracted from every column.
        scale: divisor of every column.
    """

    def __init__(self, rows: Columns, shift: np.ndarray, scale: np.ndarray):
        check_not_empty(rows)
        self.values = torch.from_numpy(((rows.values - shift) / scale).astype(np.float32))
        self.labels = torch.from_numpy(rows.labels.astype(np.int64))
        self.lengths = [1] * len(rows)

    def batch(self, indices: Sequence[int], device: torch.device | str = "cpu") -> dict[str, torch.Tensor]:
        """Return values (batch, columns) and labels (batch,)."""
        chosen = list(indices)
        return {"values": self.values[chosen].to(device), "labels": self.labels[chosen].to(device)}

    def describe(self) -> str:
        return f"{len(self):,} rows of {self.values.shape[1]} numbers"

    def fingerprint(self) -> str:
        bits = self.values.numpy().view(np.int32)
        return digest(self.labels.numpy().tobytes(), [("", list(bits))], np.int32)


def standard(rows: Columns) -> tuple[np.ndarray, np.ndarray]:
    """Return mean and standard deviation of every column; 1 where a column is constant."""
    mean, spread = rows.values.mean(0, dtype=np.float64), rows.values.std(0, dtype=np.float64)
    return mean, np.where(spread > 1e-6 * np.maximum(1, np.abs(mean)), spread, 1.0)


def columns_of(rows: Any) -> Columns:
    """Convert a split of images to rows of their grey pixels, 0 to 1; rows of numbers are returned unchanged."""
    if not isinstance(rows, Images):
        return rows  # type: ignore[no-any-return]
    pixels, faults = [], []
    for index in range(len(rows)):
        try:
            pixels.append(np.asarray(converted(rows.picture(index), 1), dtype=np.float32).ravel() / 255)
        except UnreadableImageError as error:
            faults.append(str(error))
    if faults:
        raise ConfigError(capped(faults, f"{len(faults)} of {len(rows)} pictures cannot be read"))
    return Columns(np.stack(pixels), rows.labels)
