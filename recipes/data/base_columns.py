"""`ColumnsTask`: examples that are rows of numbers with one class each, and `Columns`, a split of them.

Files are comma-separated numbers, plain or packed by gzip, read by numpy alone.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np

from data._folders import lines_of
from snnk_peft.errors import ConfigError
from snnk_peft.tasks._files import check_regular
from snnk_peft.tasks.base import Request, Task


@dataclass(frozen=True)
class Columns:
    """The examples of one split.

    Args:
        values: (examples, columns) fp32.
        labels: (examples,) class ids.
    """

    values: np.ndarray
    labels: np.ndarray

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, name: str) -> np.ndarray:
        """Return the column "label", which every `Split` has."""
        if name != "label":
            raise KeyError(f"{name!r}: expected 'label'")
        return self.labels

    def select(self, indices: list[int]) -> Columns:
        """Return the examples at these indices, in this order."""
        return Columns(self.values[indices], self.labels[indices])


@dataclass(frozen=True)
class ColumnsTask(Task):
    """A data set of rows of numbers; a split is a `Columns`.

    Args:
        name: registry key.
        read: folder -> split -> Columns, for all splits. Raises a ConfigError with every fault found.
        columns: number of columns of an example.
        label_names: class names in the order of the integer ids.
        folder: the official files, for messages.
        source: description of the data set.
        metrics: keys of `snnk_peft.tasks.metrics.METRICS`.
        primary: see `Task`.
        splits: the checkpoint is chosen on the second, if there are three, and scores are those on the last.
    """

    modality: ClassVar[str] = "columns"
    name: str
    read: Callable[[Path], dict[str, Columns]]
    columns: int
    label_names: tuple[str, ...]
    folder: str
    source: str
    metrics: tuple[str, ...] = ("accuracy",)
    primary: tuple[str, ...] | None = None
    splits: tuple[str, ...] = ("train", "test")

    def _read(self, request: Request) -> dict[str, Columns]:
        if request.path is None:
            raise ConfigError(f"task {self.name!r} needs data.dir (data_dir=...), a folder with {self.folder}")
        if not request.path.is_dir():
            raise ConfigError(f"data_dir {request.path} is not a folder; expected one with {self.folder}")
        found = self.read(request.path)
        wanted = list(request.splits or self.splits)
        if faults := [f"{request.path} has no rows for the {split} split" for split in wanted if not len(found[split])]:
            raise ConfigError(faults)
        return {split: found[split] for split in wanted}


def find_file(folder: Path, name: str) -> Path | None:
    """Return the file of this name, or its packed form NAME.gz; None if there is neither."""
    return next((path for path in (folder / name, folder / f"{name}.gz") if path.is_file()), None)


def read_numbers(path: Path, columns: int, *, header: bool = False) -> np.ndarray:
    """Read a file of comma-separated numbers into (rows, columns) fp32.

    Args:
        path: the file; packed if its name ends in .gz.
        columns: number of columns.
        header: the first line names the columns.

    Raises:
        ConfigError: the file is damaged, or a row has another number of columns; names the line.
    """
    try:
        check_regular(path)
        found = np.loadtxt(lines_of(path), np.float32, delimiter=",", skiprows=int(header), ndmin=2, comments=None)
    except ValueError as error:
        # numpy counts rows after the header, from 0 if a cell is not a number, from 1 if columns are missing.
        row = re.search(r"at row (\d+)", str(error))
        line = "" if row is None else f", line {int(row[1]) + int(header) + int('convert' in str(error))}"
        what = str(error).split(" at row ")[0].split("; use")[0]
        raise ConfigError(f"{path}{line}: {what}; expected {columns} numbers, separated by commas") from error
    except (OSError, EOFError, zlib.error) as error:
        raise ConfigError(f"{path}: {error}; fetch it again") from error
    if found.size and found.shape[1] != columns:
        raise ConfigError(f"{path}: {found.shape[1]} numbers in a row; expected {columns}")
    if not np.isfinite(found).all():
        row_number = int(np.flatnonzero(~np.isfinite(found).all(1))[0]) + 1 + int(header)
        raise ConfigError(f"{path}, line {row_number}: a number is NaN or infinite; expected finite numbers")
    return found.reshape(-1, columns)


def class_ids(path: Path, given: np.ndarray, values: Mapping[float, int]) -> np.ndarray:
    """Convert labels, as written in the file, to class ids; a ConfigError names an unknown label."""
    unknown = ~np.isin(given, list(values))
    if unknown.any():
        at = int(unknown.argmax())
        known = ", ".join(f"{value:g}" for value in values)
        raise ConfigError(f"{path}, row {at + 1}: label {given[at]:g} ({int(unknown.sum())} such); expected {known}")
    return np.vectorize(values.__getitem__, otypes=[np.int64])(given) if len(given) else given.astype(np.int64)
