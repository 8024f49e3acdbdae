"""Squared errors relative to the variance of a target or, where it has none, to its square.

One number rates a fit over all tokens of a target: 0 is perfect, 1 no better than the mean. A target that
is the same for all tokens (a single one, a constant output) has no variance, but for rounding: its error is then
relative to Σ‖y‖², where 1 is no better than zero.
"""

from __future__ import annotations

import math

CONSTANT = 1e-12  # of Σ‖y‖²: a spread below is that of equal numbers rounded to fp32


def relative_error(error: float, spread: float, square: float) -> float:
    """error Σ‖y − ŷ‖² relative to the spread Σ‖y − ȳ‖² or, of equal targets, to their square Σ‖y‖².

    Of targets that are all zero, 0 if the error is zero too, else infinity. NaN stays NaN.
    """
    if error <= 0:
        return 0.0
    if spread > CONSTANT * square:
        return error / spread
    return error / square if square > 0 else error * math.inf
