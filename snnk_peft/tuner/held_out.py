"""Are the held-out rows of a calibration new? If the same texts stand in both parts, their error says nothing."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from snnk_peft.calibration.reduce import gathered
from snnk_peft.errors import NumericalWarning


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
        repeated = sum(row in fitted for row in held_out)
        if 2 * repeated > len(held_out):
            warnings.warn(
                f"{repeated} of {len(held_out)} held-out rows are also among those that are fitted: the reported error "
                "is that of known texts and the regularisation is chosen too small. Give every text once",
                NumericalWarning,
                stacklevel=4,
            )


def rows(batch: Mapping[str, Any]) -> Iterator[bytes]:
    """A digest of every row of a batch, padding left out."""
    main = next((value for value in batch.values() if isinstance(value, torch.Tensor) and value.ndim >= 2), None)
    if main is None:
        return
    mask = batch.get("attention_mask")
    masked = isinstance(mask, torch.Tensor) and mask.shape == main.shape
    for index, row in enumerate(main.detach()):
        kept = row[mask[index].to(row.device).bool()] if masked else row  # type: ignore[index]
        yield hashlib.sha256(kept.cpu().contiguous().view(torch.uint8).numpy().tobytes()).digest()
