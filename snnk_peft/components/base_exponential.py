"""Components of the exponential kernels: E[φ(x)·ψ(y)] = e^{x·y}, or with kernel="gaussian" e^{−‖x−y‖²/2}.

Some members have a factor (1−4a)^{d/4} e^{a‖ω‖²} on each tower. The product of both has mean 1 over Gaussian rows, but
not over rows of one length (`sorf`, `rom`, norms "sqrt_dim": for a = −0.03 it is 0.9 at d = 32, 0.08 at d = 768), and
a quadrature (`sgq`, `ssr`), exact for polynomials of low degree, is far off (−4.6 at d = 32). There the factor is
integrated analytically: it turns N(0, I) into a narrower Gaussian, under which u = √(1−4a) ω is N(0, I):

    E (1−4a)^{d/2} e^{2a‖ω‖²} g(√(1−4a) ω) = E g(u)

so the rule is applied to g with u as its nodes: the form for a = 0, whatever a is. Over such rows `gerf` and `oprf` are
`posrf` (s = −1: `trigrf`), `saderf` is `posrf` on balanced vectors, `derf` on rotated or balanced ones.

Shapes: x and y (..., dim), the kernel (...). Shared functions are in `functional/exponential.py`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any, NamedTuple

import torch

from snnk_peft.components.base import Component, Features
from snnk_peft.functional.at_hand import at_hand
from snnk_peft.functional.backend import has_kernels
from snnk_peft.functional.exponential import KERNELS, exact_kernel, half_square, log_factor, stabilised
from snnk_peft.functional.log_linear import LogLinear
from snnk_peft.functional.precision import full_precision, wide
from snnk_peft.options import Option
from snnk_peft.projections.base import Projection

KernelName = Annotated[str, Option('"softmax" or "gaussian".', choices=KERNELS)]


class Exponential(Component):
    """Base class of the components that estimate either kernel."""

    kernel_formula = "e^{x·y} or e^{−‖x−y‖²/2}"

    def __init__(self, kernel: KernelName = "softmax", **params: Any):
        super().__init__(**params, kernel=kernel)
        self.kernel_name = kernel

    def kernel(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return exact_kernel(x, y, self.kernel_name)

    @staticmethod
    def tilt(a: torch.Tensor | float, projection: Projection) -> torch.Tensor | float:
        """Return the parameter of e^{a‖ω‖²} to use with a matrix: a, or 0 if its mean over the rows would be wrong."""
        return a if projection.sampled_lengths else a * 0


def rows_and_bias(projection: Projection, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return W (num_features, dim) and the bias added to Wx, (num_features,), with the device and dtype of `like`."""
    if has_kernels(like.device.type):  # so fast that every operation before them counts
        with at_hand(projection):
            rows = projection.materialize().to(like)
            return rows, rows.new_zeros(rows.shape[0]) if projection.bias is None else projection.bias.to(like)
    # The images of unit vectors, not `materialize`: hooks may move tensors to a module when it is called.
    units = torch.eye(projection.dim, dtype=like.dtype, device=like.device)
    if projection.bias is None:
        rows = projection(units).mT
        return rows, rows.new_zeros(rows.shape[0])
    images = projection(torch.cat((units, torch.zeros_like(units[:1]))))
    return (images[:-1] - images[-1:]).mT, images[-1]


def exponential_logarithms(
    projection: Projection,
    kernel: str,
    second: bool,
    like: torch.Tensor,
    *,
    a: torch.Tensor | float = 0.0,
    stretch: torch.Tensor | None = None,
    basis: torch.Tensor | None = None,
    both_signs: bool = False,
) -> LogLinear:
    """Return the logarithms of the features exp(Σ_l a_l ω_l² + ω·(√(1−4a) y) − ‖y‖²/2), y = stretch ∘ x or x · basis.

    They include the factors (1−4a)^{d/4} and m^-½ common to all of them, so features of different kinds may be added
    up.

    Args:
        projection: W.
        kernel: "softmax", or "gaussian" for another factor e^{−‖x‖²/2}.
        second: as in `Component.log_linear`.
        like: likewise.
        a: a number, (..., 1, 1), or one per coordinate (..., 1, d); see `Exponential.tilt`.
        stretch: (..., 1, d) or (d,).
        basis: (..., d, d).
        both_signs: whether each row is used as ω and as −ω.
    """
    rows, bias = rows_and_bias(projection, like)
    more = 0.5 if kernel == "gaussian" else 0.0
    square: float | torch.Tensor = 0.5 + more
    plus, minus = (bias, -bias) if both_signs else (bias, None)
    if projection.sampled_lengths and (isinstance(a, torch.Tensor) or a != 0):
        a = torch.as_tensor(a, dtype=like.dtype, device=like.device)
        common = (1 - 4 * a).log().expand(*a.shape[:-1], projection.dim).sum(-1) / 4
        tilt, rows = (rows.square() * a).sum(-1) + common, rows * (1 - 4 * a).sqrt()
        plus, minus = tilt + plus, None if minus is None else tilt + minus
    if stretch is not None:
        stretch = stretch.to(like)
        rows, square = rows * stretch, stretch.square().reshape(*stretch.shape[:-2], 1, -1) / 2 + more
    if basis is not None:
        basis = basis.to(like)
        rows, square = rows @ basis.mT, basis @ basis.mT / 2 + more * torch.eye(projection.dim).to(like)
    offset = plus
    if minus is not None:
        rows, offset = torch.cat((rows, -rows), -2), torch.cat((plus, minus), -1)
    amplitudes = projection.amplitudes(signed=second, copies=2 if both_signs else 1)
    if not isinstance(amplitudes, torch.Tensor):
        return LogLinear(rows, offset + math.log(amplitudes), square)
    amplitudes = amplitudes.to(like)
    return LogLinear(rows, offset + amplitudes.abs().log(), square, amplitudes.sign() if second else None)


class Coordinates(NamedTuple):
    """Change of coordinates of one tower: u = stretch ∘ x, or x · basis, or x itself if both are None.

    Attributes:
        a: a number, one per example (..., 1, 1), or one per coordinate (..., 1, dim) or (dim,); all below 1/8.
        stretch: (..., 1, dim) or (dim,).
        basis: (..., dim, dim).
    """

    a: torch.Tensor | float
    stretch: torch.Tensor | None = None
    basis: torch.Tensor | None = None


class Tilted(Exponential):
    """Base class of the components with a quadratic term, in coordinates adapted to the data (`coordinates`):

        φ(x) = m^-½ D exp(Σ_l a_l ω_l² + ω·(√(1−4a) ∘ u) − ‖u‖²/2),      D = Π_l (1−4a_l)^¼

    u is x, Ψx with a diagonal Ψ, or x times a matrix, such that the inner product of both towers is x·y: then the
    features are unbiased for e^{x·y} whatever a < 1/8 is, and with kernel="gaussian" and a factor e^{−‖x‖²/2} of the
    original vectors for e^{−‖x−y‖²/2} (Likhosherstov et al. 2022, 2023). Costs `posrf`, the change of coordinates, and
    ‖ω‖² per row.
    """

    # Without statistics, the buffers make this `posrf`, and nothing here changes them. They stay
    # because all files of 0.1.0 have them, perhaps with other values.
    tilted = True

    def coordinates(
        self, statistics: Mapping[str, torch.Tensor], second: bool, like: torch.Tensor, dim: int
    ) -> Coordinates:
        """Return a and the coordinates of one tower; arguments as in `Component.log_linear`."""
        raise TypeError(f"{type(self).__name__} does not define coordinates(); see Tilted")

    def tower(
        self, x: torch.Tensor, projection: Projection, statistics: Mapping[str, torch.Tensor], second: bool
    ) -> Features:
        with full_precision(x):
            u = wide(x)
            a, stretch, basis = self.coordinates(statistics, second, u, projection.dim)
            a = self.tilt(a, projection)
            if stretch is not None:
                u = u * stretch.to(u)
            if basis is not None:
                u = u @ basis.to(u)
            exponents = projection(u * (1 - 4 * a) ** 0.5)
            exponents += quadratic_forms(a, projection, exponents)
            factor = log_factor(u, "softmax", a)
            if self.kernel_name == "gaussian":
                factor = factor - half_square(x)
            return Features(*stabilised(exponents, factor, projection.amplitudes(signed=second), x.dtype))

    def log_linear(
        self, projection: Projection, statistics: Mapping[str, torch.Tensor], second: bool, like: torch.Tensor
    ) -> LogLinear | None:
        chosen = self.coordinates(statistics, second, like, projection.dim)
        return exponential_logarithms(projection, self.kernel_name, second, like, **chosen._asdict())


def quadratic_forms(a: torch.Tensor | float, projection: Projection, like: torch.Tensor) -> torch.Tensor:
    """Compute Σ_l a_l ω_l² for every row: (num_features,), with the leading dimensions of a."""
    if isinstance(a, torch.Tensor) and a.dim() > 0 and a.shape[-1] > 1:
        return a @ projection.materialize().to(like).square().mT
    return a * projection.squared_row_norms().to(like)
