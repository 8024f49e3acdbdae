"""Conversion of a task head's inputs: tensors, arrays, lists and table columns become tensors, or an error.

Class labels may be names, booleans or integral floats (into which pandas converts integers if some are missing).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from snnk_peft.errors import ConfigError
from snnk_peft.registry import did_you_mean

SHOWN = 5  # unknown names in a message


def as_tensor(what: str, given: Any, names: Sequence[str] = ()) -> Tensor:
    """Convert to a tensor of booleans, integers or floats, with at least one dimension.

    Accepts a tensor, an array, a list, a column or columns of a table; class `names` become their indices.

    Raises:
        ConfigError: missing values, unknown names, or non-numeric values.
    """
    if isinstance(given, Tensor):
        found = given.detach()
    else:
        try:
            array = np.asarray(given)
        except ValueError as error:
            raise ConfigError(f"{what} are rows of different lengths ({error}); expected as many in each") from error
        found = torch.from_numpy(_numbers(what, array, names))
    if found.is_complex() or found.ndim == 0:
        raise ConfigError(f"{what} are {given!r}; expected one entry, or one row of numbers, per example")
    return found


def _numbers(what: str, array: Any, names: Sequence[str]) -> Any:
    kind = array.dtype.kind
    if kind in "US" or kind == "O":
        missing = np.array([each is None or _is_nan(each) for each in array.flat], dtype=bool)
        if missing.any():
            row = int(missing.argmax()) // max(1, array.size // max(1, len(array))) if array.ndim else 0
            raise ConfigError(
                f"{int(missing.sum())} of {missing.size} {what} are missing, the first in row {row}; expected a value "
                "for every example. Leave these examples out"
            )
        if all(isinstance(each, str) for each in array.flat):
            return _indices(what, array, names)
        try:
            array = array.astype(np.float64)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"{what} hold entries that are no numbers ({error}); expected numbers only") from error
        kind = "f"
    if kind not in "biuf":
        raise ConfigError(f"{what} are {array.dtype}; expected numbers")
    return array.astype({"b": np.bool_, "f": np.float64}.get(kind, np.int64))


def _is_nan(value: Any) -> bool:
    """Return True for NaN, NaT and pandas' missing values, none of which equals itself."""
    try:
        return not bool(value == value)
    except (TypeError, ValueError):
        return True


def _indices(what: str, array: Any, names: Sequence[str]) -> Any:
    place = {name: index for index, name in enumerate(names)}
    unknown = sorted({str(each) for each in array.flat} - place.keys())
    if unknown and not names:
        shown = ", ".join(map(repr, unknown[:SHOWN]))
        raise ConfigError(f"{what} are texts such as {shown}; expected numbers: class indices, from 0")
    if unknown:
        raise ConfigError(did_you_mean(f"class in {what}", each, list(names)) for each in unknown[:SHOWN])
    return np.vectorize(place.__getitem__, otypes=[np.int64])(array)


def require_finite(what: str, found: Tensor) -> None:
    """Raise ConfigError if rows hold NaN or infinity, with their number and the first of them."""
    wrong = ~torch.isfinite(found).reshape(len(found), -1).all(1)
    if wrong.any():
        raise ConfigError(
            f"{int(wrong.sum())} of {len(found)} {what} hold NaN or infinity, the first in row "
            f"{int(wrong.int().argmax())}; expected finite numbers. Leave these examples out, or correct their source"
        )


def as_vectors(given: Any, width: int) -> Tensor:
    """Convert vectors to a finite floating-point tensor, (examples, width).

    Raises:
        ConfigError: wrong shape, NaN or infinity, or non-numeric values.
    """
    found = as_tensor("vectors", given)
    if found.shape[1:] != (width,):
        raise ConfigError(f"vectors {tuple(found.shape)} do not fit; expected (examples, {width})")
    found = found if found.is_floating_point() else found.double()
    require_finite("vectors", found)
    return found


def class_indices(what: str, labels: Tensor, classes: int) -> Tensor:
    """Convert labels, (n,) or (n, 1) integers, booleans or integral floats, to class indices (n,), int64.

    Raises:
        ConfigError: anything else, or an index that is not that of a class.
    """
    shape = tuple(labels.shape)
    labels = labels.squeeze(1) if labels.ndim == 2 and shape[1] == 1 else labels
    if labels.ndim != 1:
        raise ConfigError(f"{what} are {shape} {labels.dtype}; expected integer class indices (n,), one per example")
    if labels.is_floating_point():
        require_finite(what, labels)
        if not is_whole(labels):
            some = float(labels[labels != labels.round()][0])
            raise ConfigError(f"{what} are {labels.dtype} such as {some:g}; expected integer class indices (n,)")
    labels = labels.long()
    wrong = (labels < 0) | (labels >= classes)
    if wrong.any():
        first = int(wrong.int().argmax())
        raise ConfigError(
            f"{what} run from {int(labels.min())} to {int(labels.max())}; expected 0 to {classes - 1}, one of "
            f"{classes} classes ({int(wrong.sum())} of {len(labels)} are none, the first in row {first})"
        )
    return labels


def is_whole(found: Tensor) -> bool:
    """Return whether all values are integral."""
    return bool((found == found.round()).all())


def fit_notes(count: int, shares: Tensor | None, names: Sequence[str], varies: bool) -> list[str]:
    """List the reasons to distrust a fitted head; empty if there are none.

    They depend on the number of examples, the shares of the classes (None without classes), and whether the vectors
    differ; `names` of the classes, if known, are used in the messages.
    """
    found = []
    if not varies:
        found.append(
            f"all {count} vectors are the same, so the head predicts the mean of the targets for every input; expected "
            "examples that differ"
        )
    absent = [] if shares is None else (shares <= 0).nonzero().flatten().tolist()
    if absent and shares is not None:
        told = ", ".join(repr(names[index]) if index < len(names) else str(index) for index in absent[:SHOWN])
        more = f" and {len(absent) - SHOWN} more" if len(absent) > SHOWN else ""
        only = "; all are of one class, which the head always predicts" if len(absent) == len(shares) - 1 else ""
        found.append(
            f"none of {count} examples is of class {told}{more}{only}; expected examples of all {len(shares)} classes"
        )
    return found
