"""Random Maclaurin features (Kar & Karnick 2012; SNNK paper, App. L) of any power series f(x·y) = Σ_n a_n (x·y)^n.

A feature of degree n is a product of n independent random projections, Π_j ω_j·x with E[ωωᵀ] = I, because
E[Π_j (ω_j·x)(ω_j·y)] = (x·y)^n. The estimate is Σ_n a_n times the mean over the features of degree n. Every degree up
to `degree` gets features (✗ a degree measure that leaves out degree 1, or drops the signs of a_n, estimates another
function); the sign of a_n goes on one tower. Degree 0 is one constant feature, without randomness.

Exact kernel: the series truncated after `degree`. The variance grows as ‖x‖^{2n}‖y‖^{2n}: meant for vectors of length
about 1. A series with a finite radius of convergence (tanh: π/2, 1/(1−z): 1) is meaningless beyond it.

Rows: a feature of degree n uses n of them; num_features >= degree (degree + 1)/2. Cost: the projection.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated

import torch
from torch import Tensor

from snnk_peft.components import COMPONENTS
from snnk_peft.components.base import Component, Features
from snnk_peft.errors import ConfigError, NumericalWarning
from snnk_peft.options import Option
from snnk_peft.projections.base import Projection

_DEFAULT_DEGREE = 4
LARGEST_DEGREE = 40


def _tanh(n: int) -> float:
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
    """Return the coefficients a_0 ... a_degree.

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
    """Return the radius of convergence of the whole series; infinite for polynomials."""
    return SERIES[series][1] if isinstance(series, str) else math.inf


def evaluate(coefficients: Sequence[float], z: Tensor) -> Tensor:
    """Evaluate Σ_n a_n z^n by Horner's rule, in the shape of z."""
    total = z * 0
    for a in reversed(coefficients):
        total = total * z + a
    return total


@COMPONENTS.register("taylor")
class Taylor(Component):
    """Features that are products of random projections."""

    formula = "products of n projections, for every power n"
    kernel_formula = "Σ_n a_n (x·y)^n, truncated"
    source = "Kar & Karnick 2012; SNNK App. L"
    cost = "one product per row"

    distribution = "rademacher"

    def __init__(
        self,
        series: Annotated[
            str | Sequence[float],
            Option(
                'name of a function ("inverse" is 1/(1−z)), or the coefficients a_0, a_1, ...',
                choices=tuple(SERIES),
            ),
        ] = "exp",
        degree: Annotated[
            int | None,
            Option(
                "the last power kept, None for 4 (for given coefficients: at most their count minus 1, which is what "
                "None means).",
                low=0,
                high=LARGEST_DEGREE,
            ),
        ] = None,
    ):
        super().__init__(series=list(series) if isinstance(series, tuple) else series, degree=degree)
        self.coefficients = series_coefficients(series, degree)
        self.radius = convergence_radius(series)
        self._checked = False
        self._shares: dict[int, list[int]] = {}

    def _features_per_degree(self, rows: int) -> list[int]:
        """Return the number of features of degree 0, 1, 2, ... for this many rows; cached."""
        if rows not in self._shares:
            self._shares[rows] = self._share_out(rows)
        return self._shares[rows]

    def _share_out(self, rows: int) -> list[int]:
        """Assign one feature to each degree, then each further one to the degree with the largest remaining share."""
        wanted = [n for n, a in enumerate(self.coefficients) if n > 0 and a != 0]
        counts = [0] * len(self.coefficients)
        left = rows
        for n in wanted:
            counts[n], left = 1, left - n
        while True:
            # Variance |a_n|/r_n of a degree relative to the n rows that one more feature costs.
            fitting = [n for n in wanted if n <= left]
            if not fitting:
                return counts
            best = max(fitting, key=lambda n: abs(self.coefficients[n]) / (counts[n] * n))
            counts[best], left = counts[best] + 1, left - best

    def feature_dim(self, num_features: int, dim: int) -> int:
        """Return the number of features of all degrees, the constant included."""
        return 1 + sum(self._features_per_degree(num_features))

    def fewest_rows(self) -> int:
        """Return the number of rows for one feature per degree."""
        return max(1, sum(n for n, a in enumerate(self.coefficients) if a != 0))

    def prepare(self, projection: Projection) -> None:
        needed = self.fewest_rows()
        if projection.num_features < needed:
            raise ConfigError(
                f"taylor of degree {len(self.coefficients) - 1} needs at least {needed} rows, one feature per degree; "
                f"got num_features={projection.num_features}. Use more, or a lower degree"
            )

    def tower(
        self, x: torch.Tensor, projection: Projection, statistics: Mapping[str, torch.Tensor], second: bool
    ) -> Features:
        self._check_once(x)
        z = projection(x)
        parts = [torch.full_like(x[..., :1], self._factor(0, 1, second))]
        start = 0
        for n, count in enumerate(self._features_per_degree(projection.num_features)):
            if count == 0:
                continue
            group = z[..., start : start + n * count].unflatten(-1, (count, n))
            parts.append(group.prod(-1) * self._factor(n, count, second))
            start += n * count
        return Features(torch.cat(parts, -1))

    def _factor(self, degree: int, count: int, second: bool) -> float:
        a = self.coefficients[degree]
        return math.copysign(1.0, a if second else 1.0) * math.sqrt(abs(a) / count)

    def _check_once(self, x: torch.Tensor) -> None:
        if self._checked or torch.compiler.is_compiling() or x.device.type == "meta" or math.isinf(self.radius):
            return
        self._checked = True
        norm = x.detach().float().square().sum(-1).max().sqrt().item() if x.numel() else 0.0
        if norm**2 >= self.radius:
            warnings.warn(
                f"taylor: a vector has length {norm:.3g}; the series of {self.params['series']!r} converges for "
                f"|x·y| < {self.radius:.4g} only. Scale the vectors to lengths below {self.radius**0.5:.3g}, or use "
                "urf, whose fit holds on an interval",
                NumericalWarning,
                stacklevel=2,
            )

    def kernel(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Evaluate the truncated series at x·y.

        Raises:
            ConfigError: |x·y| reaches the radius of convergence.
        """
        z = (x * y).sum(-1)
        if not math.isinf(self.radius) and (z.detach().abs() >= self.radius).any():
            raise ConfigError(
                f"x·y reaches {z.detach().abs().max().item():.4g}; the series of {self.params['series']!r} converges "
                f"for |x·y| < {self.radius:.4g} only (available series: {', '.join(SERIES)})"
            )
        return evaluate(self.coefficients, z)
