"""Are the held-out rows of a calibration new? If the same texts stand in both parts, their error says nothing."""

from __future__ import annotations

import warnings
from collections.abc import Iterable

from snnk_peft.calibration.reduce import gathered
from snnk_peft.errors import NumericalWarning
from snnk_peft.repeats import count_repeated


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
                stacklevel=4,
            )
