"""What `calibrate` reports: per slot, how well the stand-in fits on held-out tokens before and after, and the cost."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class SlotReport:
    """What calibration did to one slot.

    Args:
        path: the replaced module.
        num_features: rows of W, or whatever number tells the size of the part.
        tokens: tokens (or examples, for a pooler) fitted while choosing the regularisation.
        held_out_tokens: tokens that chose it and that the errors are measured on; fitted as well after `refit`.
        ridge: the chosen regularisation, as a fraction of the mean feature variance; None where there is none.
        error_before: squared error of the slot as it was, relative to the target's variance, on held-out tokens.
        error_after: the same after fitting. 1 means no better than the mean.
        seconds: wall time, forward passes included.
    """

    path: str
    num_features: int
    tokens: int
    held_out_tokens: int
    ridge: float | None
    error_before: float
    error_after: float
    seconds: float


@dataclass(frozen=True)
class CalibrationReport:
    """What `calibrate` did, slot by slot, front to back."""

    slots: list[SlotReport] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        """Wall time in total."""
        return sum(slot.seconds for slot in self.slots)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for a metrics.json."""
        return {"seconds": self.seconds, "slots": [asdict(slot) for slot in self.slots]}

    def __str__(self) -> str:
        width = max([len(slot.path) for slot in self.slots], default=4)
        lines = [f"{'slot':<{width}}  features   tokens  error before -> after (held out)   ridge  seconds"]
        lines += [
            f"{s.path:<{width}}  {s.num_features:>8}  {s.tokens:>7}  {s.error_before:>12.4f} -> {s.error_after:<15.4f}"
            f"  {'-' if s.ridge is None else f'{s.ridge:.0e}':>7}  {s.seconds:>7.1f}"
            for s in self.slots
        ]
        return "\n".join(lines)
