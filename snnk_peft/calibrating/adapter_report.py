"""The report of `calibrate_adapters`: one row per adapter, as a table and as plain data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class AdapterSlotReport:
    """Result for one adapter.

    Args:
        path: the module that it is after or beside.
        num_features: rows of W.
        slope_before: how fast the held-out loss falls per unit of change of the adapter's output (root mean square over
            tokens), under the step that the fitted examples say is best for linear features of the rows that were
            there. The square of it is what these rows have to gain, to first order.
        slope_after: the same for rows made from the fitted examples.
        slope_of_all: the same where any linear map of the inputs may be the step.
        taken: whether the new rows are in place: where they were not worth more, the old ones stay.
        ridge: the chosen regularisation, as a fraction of the mean square of an input.
        tokens: how many were read.
    """

    path: str
    num_features: int
    slope_before: float
    slope_after: float
    slope_of_all: float
    taken: bool
    ridge: float
    tokens: int


@dataclass(frozen=True)
class AdapterReport:
    """Result of `calibrate_adapters`; print it for a table.

    Args:
        slots: one entry per adapter, front to back.
        seconds: wall time.
        settings: the arguments that decided it.
    """

    slots: list[AdapterSlotReport]
    seconds: float
    settings: Mapping[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        return {"seconds": self.seconds, "settings": dict(self.settings), "slots": [asdict(s) for s in self.slots]}

    def __str__(self) -> str:
        width = max(len(slot.path) for slot in self.slots)
        lines = [f"{'adapter at':<{width}}  rows  slope (held out) before -> after    of all rows    ridge   tokens"]
        lines += [
            f"{s.path:<{width}}  {s.num_features:>4}  {s.slope_before:>23.2e} -> {s.slope_after:<8.2e}   "
            f"{s.slope_of_all:>8.2e}  {s.ridge:>7.0e}  {s.tokens:>7}{'' if s.taken else '  not taken'}"
            for s in self.slots
        ]
        return "\n".join([*lines, f"{self.seconds:.1f} seconds"])
