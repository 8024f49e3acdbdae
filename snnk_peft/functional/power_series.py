"""Maclaurin coefficients a_n of common functions, Σ_n a_n z^n, and where their series converge."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from torch import Tensor

from snnk_peft.errors import ConfigError

_DEFAULT_DEGREE = 4
LARGEST_DEGREE = 40


def _tanh(n: int) -> float:
    """Coefficients of tanh from tanh' = 1 − tanh², exact to rounding."""
    a = [0.0, 1.0]
    for k in range(2, n + 1):
        # k a_k = −Σ_{i+j=k−1} a_i a_j
        a.append(-sum(a[i] * a[k - 1 - i] for i in range(k)) / k)
    return a[n]


SERIES: dict[str, tuple[Callable[[int], float], float]] = {
    "exp": (lambda n: 1 / math.factorial(n), math.inf),
    "sin": (lambda n: (0, 1, 0, -1)[n % 4] / math.factorial(n), math.inf),
    "cos": (lambda n: (1, 0, -1, 0)[n % 4] / math.factorial(n), math.inf),
    "sinh": (lambda n: (n % 2) / math.factorial(n), math.inf),
    "cosh": (lambda n: (1 - n % 2) / math.factorial(n), math.inf),
    "tanh": (_tanh, math.pi / 2),
    "inverse": (lambda n: 1.0, 1.0),
}


def series_coefficients(series: str | Sequence[float], degree: int | None) -> list[float]:
    """a_0 ... a_degree.

    Raises:
        ConfigError: numbers that are not finite, or fewer than the degree needs.
    """
    if isinstance(series, str):
        return [float(SERIES[series][0](n)) for n in range((_DEFAULT_DEGREE if degree is None else degree) + 1)]
    if not series or not all(math.isfinite(a) for a in series):
        raise ConfigError(f"taylor series is {series!r}; expected at least one finite number")
    if degree is not None and degree >= len(series):
        raise ConfigError(f"taylor degree is {degree} but only {len(series)} coefficients are given")
    return [float(a) for a in series[: None if degree is None else degree + 1]]


def convergence_radius(series: str | Sequence[float]) -> float:
    """Where the whole series converges; infinite for polynomials."""
    return SERIES[series][1] if isinstance(series, str) else math.inf


def evaluate(coefficients: Sequence[float], z: Tensor) -> Tensor:
    """Σ_n a_n z^n by Horner's rule, the shape of z."""
    total = z * 0
    for a in reversed(coefficients):
        total = total * z + a
    return total
