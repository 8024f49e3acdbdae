"""Budgets as users write them: "2x", or the share of the cost to keep."""

from __future__ import annotations

import math
import re


def share_of(budget: object) -> tuple[float, str | None]:
    """Return the share of the original's cost to keep, in (0, 1), and the fault of the budget, if any."""
    share = math.nan
    if isinstance(budget, str) and (times := re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*[xX×]\s*", budget)):
        share = 1 / float(times[1]) if float(times[1]) else math.nan
    elif isinstance(budget, (int, float)) and not isinstance(budget, bool):
        share = float(budget)
    if 0 < share < 1:
        return share, None
    return share, (
        f"budget is {repr(budget)[:100]}; expected a factor above 1 such as '2x', or the share of the cost that may "
        f"remain, between 0 and 1, such as 0.5{_meant(budget)}"
    )


def _meant(budget: object) -> str:
    """Return a "did you mean" for a number above 1, or an empty string."""
    try:
        factor = float(budget)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return ""
    return f". Did you mean '{factor:g}x'?" if 1 < factor < math.inf else ""
