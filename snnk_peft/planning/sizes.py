"""Sizes between measured ones: interpolation of their savings and errors.

A kind is a part up to its size. Savings are interpolated linearly between measured sizes, errors linearly in the
logarithms of error and size. Errors must not grow with the size: measured ones that do are noise, and are replaced by
their mean.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from snnk_peft.parts import Part

MOST = 32  # sizes of a kind
WIDEST = 16  # units between two sizes, unless there would be too many


class Measured(NamedTuple):
    """Measurements of one size of a kind in one place.

    Attributes:
        size: the size, such as the rows of W.
        saved: saved share of the original's cost.
        error: of the output.
        fit_error: error at the replaced module, NaN if nothing is fitted.
    """

    size: float
    saved: float
    error: float
    fit_error: float = math.nan


def size_of(part: Part) -> tuple[str, float] | None:
    """Return the option that gives a part's size, and its value; None if there is no numeric one."""
    for name in part.size_fields:
        value = getattr(part, name)
        if type(value) in (int, float):
            return name, value
        if value is not None:
            return None
    return None


def kind_of(part: Part) -> tuple[Any, ...]:
    """Return a key that is equal for parts that differ only in size."""
    options = dataclasses.asdict(part)
    found = size_of(part)
    if found is not None:
        options[found[0]] = None
    return type(part).__name__, repr(options)


def resized(part: Part, size: float) -> Part:
    """Return the same part with another size."""
    found = size_of(part)
    if found is None or found[1] == size:
        return part
    changes: dict[str, Any] = {found[0]: type(found[1])(size)}
    return dataclasses.replace(part, **changes)


def grid(sizes: Sequence[float]) -> list[float]:
    """Return the measured sizes and the multiples of 16, or of a smaller power of two for small sizes, between them."""
    low, high = min(sizes), max(sizes)
    if any(type(size) is not int for size in sizes):
        return sorted({*sizes, *(round(float(each), 3) for each in np.linspace(low, high, MOST)[1:-1])})
    step = 1
    while step * 4 <= low and step < WIDEST:
        step *= 2
    while (high - low) / step > MOST:
        step *= 2
    return sorted({*sizes, *range(int(-(-low // step) * step), int(high), step)})


def between(measured: Sequence[Measured]) -> list[Measured]:
    """Return all sizes of `grid`, in ascending order, with interpolated measurements."""
    known = sorted((each for each in measured if math.isfinite(each.error)), key=lambda each: each.size)
    if len(known) < 2:
        return known
    sizes = [each.size for each in known]
    places = np.log(sizes)
    wanted = grid(sizes)
    tiny = 1e-12
    errors = rising([math.log(max(each.error, tiny)) for each in reversed(known)])[::-1]
    error = np.exp(np.interp(np.log(wanted), places, errors))
    saved = np.interp(wanted, sizes, [each.saved for each in known])
    fits = np.exp(np.interp(np.log(wanted), places, [math.log(max(each.fit_error, tiny)) for each in known]))
    return [Measured(*each) for each in zip(wanted, saved.tolist(), error.tolist(), fits.tolist(), strict=True)]


def rising(values: Sequence[float]) -> list[float]:
    """Return the closest non-decreasing sequence in least squares: decreasing neighbours are replaced by their mean."""
    blocks: list[list[float]] = []  # sum, count
    for value in values:
        blocks.append([value, 1])
        while len(blocks) > 1 and blocks[-2][0] * blocks[-1][1] > blocks[-1][0] * blocks[-2][1]:
            total, count = blocks.pop()
            blocks[-1] = [blocks[-1][0] + total, blocks[-1][1] + count]
    return [total / count for total, count in blocks for _ in range(int(count))]
