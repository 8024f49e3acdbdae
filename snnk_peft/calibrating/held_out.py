"""Are the held-out rows of a calibration new, and have the rows of a head one label each?

If the same texts stand in both parts, their error says nothing; if one has two labels, no head is right about it.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from itertools import chain
from typing import Any

import torch

from snnk_peft.errors import NumericalWarning
from snnk_peft.repeats import count_repeated, label_note, rows
from snnk_peft.solvers.reduce import gathered


class HeldOutRows:
    """Digests of the rows of all batches."""

    def __init__(self) -> None:
        self.fitted: set[bytes] = set()
        self.held_out: list[bytes] = []

    def add(self, digests: Iterable[bytes], is_held_out: bool) -> None:
        """The rows of one batch, as `rows` tells them, and whether it is held out."""
        if is_held_out:
            self.held_out += digests
        else:
            self.fitted.update(digests)

    def warn_if_repeated(self) -> None:
        """NumericalWarning if most of the held-out rows, of all processes, are also among the fitted ones of all."""
        shares = gathered((self.fitted, self.held_out))
        fitted, held_out = set().union(*(rows for rows, _ in shares)), [row for _, rows in shares for row in rows]
        repeated = count_repeated(held_out, fitted)
        if 2 * repeated > len(held_out):
            warnings.warn(
                f"{repeated} of {len(held_out)} held-out rows are also among those that are fitted: the reported error "
                "is that of known texts and the regularisation is chosen too small. Give every text once",
                NumericalWarning,
                stacklevel=5,
            )


class LabelledRows:
    """Digests of the rows of all batches, with their labels."""

    def __init__(self) -> None:
        self.rows: list[bytes] = []
        self.labels: list[Any] = []

    def add(self, inputs: Mapping[str, Any], labels: torch.Tensor) -> None:
        """The rows of one batch, as `rows` tells them, and their labels (n,), or (n, tokens) of words."""
        found = list(rows(inputs))
        if len(found) == len(labels):
            self.rows += found
            self.labels += [tuple(each) if isinstance(each, list) else each for each in labels.tolist()]

    def reduce(self) -> None:
        """Add the rows of all other processes; every process calls this."""
        shares = gathered((self.rows, self.labels))
        self.rows, self.labels = (list(chain.from_iterable(column)) for column in zip(*shares, strict=True))

    def warn_if_contradicting(self, stacklevel: int = 3) -> None:
        """Warn if rows occur with more than one label (NumericalWarning); `stacklevel` as in `warnings.warn`."""
        note = label_note("batches", self.rows, self.labels)
        if note is not None:
            warnings.warn(note, NumericalWarning, stacklevel=stacklevel)
