"""The smallest conversion that keeps a share of the answers.

Every conversion gives a pair of budget and quality. The next budget lies between the cheapest that keeps enough and the
most expensive that does not, where the plan's curve predicts it: the loss of quality grows with a power of the
predicted error, the square root for classes, whose distance is quadratic, and the error itself for vectors.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from snnk_peft.converting.pipeline import Result
from snnk_peft.converting.report import main_figure
from snnk_peft.errors import ConfigError
from snnk_peft.planning.result import Plan

STARTS = (0.6, 0.8, 0.9, 0.95)  # shares of the cost that are tried until one can be met
ATTEMPTS = 4
NEAR = 0.04  # budgets closer than this count as equal


def smallest(quality: float, run: Callable[[float], Result]) -> Result:
    """Search for the cheapest conversion that keeps at least `quality`.

    Args:
        quality: share of the answers, cosine or correlation, on the held-out examples.
        run: converts the model for a given share of the cost.

    Raises:
        ConfigError: no budget can be met, or none keeps enough.
    """
    best: Result | None = None
    good, bad = 1.0, 0.0  # budgets: known to keep enough, known not to
    share, tried = 0.0, []
    for attempt in range(ATTEMPTS):
        result = _first(run) if not attempt else _met(run, share)
        if result is None:  # cheaper than anything that can be chosen
            bad = share
        else:
            assert result.plan is not None
            share = result.plan.budget
            kept = result.figures[main_figure(result.figures)]
            tried.append((share, kept))
            if kept >= quality:
                best, good = result, share
            else:
                bad = share
            predicted = _predicted(result.plan, kept, quality, main_figure(result.figures))
        if good - bad < NEAR or (best is not None and bad == 0.0 and share <= predicted):
            break
        low, high = bad + 0.25 * (good - bad), good - 0.25 * (good - bad)
        share = min(max(predicted, low), high)
    if best is None:
        shown = ", ".join(f"{kept:.4f} at {share:.0%} of the cost" for share, kept in tried)
        raise ConfigError(
            f"quality is {quality}, and no conversion kept so much of the answers on the held-out examples ({shown}); "
            "give a lower one, more examples, or longer recovery (recover=)"
        )
    return best


def _first(run: Callable[[float], Result]) -> Result:
    for share in STARTS[:-1]:
        if (result := _met(run, share)) is not None:
            return result
    return run(STARTS[-1])


def _met(run: Callable[[float], Result], share: float) -> Result | None:
    """Run a conversion; return None if no choice of parts is that cheap."""
    try:
        return run(share)
    except ConfigError as error:
        if str(error).startswith("budget leaves"):
            return None
        raise


def _predicted(plan: Plan, kept: float, quality: float, figure: str) -> float:
    """Return the share of the cost at which a plan's curve predicts that `quality` is kept."""
    lost, may_be = max(1 - kept, 1e-4), max(1 - quality, 1e-4)
    limit = plan.predicted["error"] * (may_be / lost) ** (2.0 if figure == "agreement" else 1.0)
    enough = [point["cost"] for point in plan.curve if point["error"] <= limit]
    found = min(enough, default=1.0)
    return found if math.isfinite(found) else 1.0
