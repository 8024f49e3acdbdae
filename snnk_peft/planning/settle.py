"""The choice that uses the budget, measured with all of its parts together."""

from __future__ import annotations

import math
from collections.abc import Sequence

from snnk_peft.errors import ConfigError
from snnk_peft.planning.choices import Choices
from snnk_peft.planning.choose import Point, apart
from snnk_peft.planning.costs import Measure

ATTEMPTS = 4  # to reach the budget by proportional steps
ROOM = 1.1  # timings of single parts predict that of all together only to within this factor
SPENT = {"latency": 0.97, "macs": 0.995, "bytes": 0.995}  # share of the budget that is close enough
STRIDE = 0.01  # share of the budget between two choices, whose seconds could otherwise not be distinguished


def settle(choices: Choices, share: float, measure: Measure) -> tuple[Point, float]:
    """Return the choice whose parts together cost at most the budget, and as close to it as possible, and its cost.

    The joint saving of parts is close to the sum of their own: if the first choice costs too much or too little, the
    next one corrects it in proportion, and later ones bisect.

    Raises:
        ConfigError: no choice meets the budget.
    """
    points = apart(choices.points, STRIDE * share if measure.of == "latency" else 0.0)
    last = len(points) - 1
    dear, fits, nearest = 0, last + 1, 1.0  # no choice is known to fit yet
    fitting: dict[int, float] = {}
    spent = SPENT[measure.of] * share
    aim = (share + spent) / 2 if measure.of == "latency" else share
    near, attempt = first(points, aim), 0
    while fits - dear > 1:
        near = min(max(near, dear + 1), fits - 1)
        measured = measure.remaining(choices.config(points[near]))
        nearest = min(nearest, measured)
        if measured > share:
            dear = near
        else:
            fits, fitting[near] = near, measured
            if measured >= spent:
                break
        attempt += 1
        together = (1 - measured) / (1 - points[near].cost)
        near = first(points, 1 - (1 - aim) / max(together, 0.1)) if attempt < ATTEMPTS else (dear + fits) // 2
    if fits > last:
        raise unreachable(nearest, share, measure.of, "measured in the model")
    return points[fits], fitting[fits]


def first(points: Sequence[Point], cost: float) -> int:
    """Return the index of the first point that costs no more, or else the last."""
    return next((index for index, point in enumerate(points) if point.cost <= cost + 1e-9), len(points) - 1)


def check_reach(most: float, share: float, of: str) -> None:
    """Raise ConfigError if the cheapest candidates of all places, which together save `most`, do not save enough."""
    if most <= 0 or 1 - most > share * (ROOM if of == "latency" else 1):
        raise unreachable(1 - most, share, of, "each measured alone")


def unreachable(nearest: float, share: float, of: str, how: str) -> ConfigError:
    """Return the error for a budget that cannot be met, with the nearest that can."""
    # The budget named here must be reachable when the user passes it.
    nearest = math.ceil(nearest * 1000) / 1000
    met = math.floor(100 / nearest) / 100
    if met > 1:
        told = f"leaves {nearest:.3f}, so the nearest that can be met is '{met:.2f}x'. Give that"
    else:
        told = "saves nothing measurable. Give larger inputs"
    return ConfigError(
        f"budget leaves {share:.3f} of the {of} ({1 / share:.2f}x); the cheapest choice of the candidates, {how}, "
        f"{told}, smaller candidates as parts=[...], or another unit (latency, macs, bytes)"
    )
