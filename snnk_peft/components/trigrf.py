"""Trigonometric random features (random kitchen sinks; Spectraformer's TrigRF): cosines and sines of ω·x.

    form="cos_sin":  φ(x) = m^-½ [cos ω·x, sin ω·x]            form="phase":  φ(x) = (2/m)^½ cos(ω·x + b), b ~ U(0, 2π)

The phases b are shared by both towers (✗ cos on one tower and sin on the other, as Spectraformer's Eq. 31 prints it,
has expectation 0). Exact kernel for Gaussian rows: e^{−‖δ‖²/2}, δ = x − y; with kernel="softmax" both towers are
multiplied by e^{‖x‖²/2}, which gives e^{x·y}. Other shift-invariant kernels are scale mixtures of the Gaussian one: row
i is multiplied by a random r_i, drawn once, which is the spectral distribution of the kernel (Rahimi & Recht 2007):

    "laplace" = "matern12": e^{−‖δ‖}, "matern32": (1 + √3‖δ‖) e^{−√3‖δ‖}, "matern52": (1 + √5‖δ‖ + 5‖δ‖²/3) e^{−√5‖δ‖}:
        r² = 2ν/χ²_{2ν} (rows are multivariate t with 2ν degrees of freedom)
    "cauchy": 1/(1 + ‖δ‖²): r² ~ exponential with mean 2

Variance per row of cos_sin: (1 − e^{−‖δ‖²})²/2 for the Gaussian kernel. Cost: the projection, one or two trigonometric
functions per row.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated

import torch
from torch import Tensor

from snnk_peft.components import COMPONENTS
from snnk_peft.components.base import Component, Features
from snnk_peft.functional.exponential import half_square
from snnk_peft.functional.precision import full_precision, wide
from snnk_peft.functional.random_numbers import normal_numbers, uniform_numbers
from snnk_peft.options import Option
from snnk_peft.projections.base import Projection
from snnk_peft.projections.base_drawn import site_generator

_DEGREES = {"laplace": 1, "matern12": 1, "matern32": 3, "matern52": 5}
SHIFT_INVARIANT = ("gaussian", *_DEGREES, "cauchy")


def row_multipliers(kernel: str, num_features: int, generator: torch.Generator) -> Tensor | None:
    """Draw r for every row, (num_features,), or return None if all are 1."""
    if kernel == "cauchy":
        # −2 log U is exponential with mean 2.
        uniform = uniform_numbers(num_features, generator=generator)
        return (-2 * uniform.log()).sqrt().float()
    if kernel not in _DEGREES:
        return None
    degrees = _DEGREES[kernel]
    normal = normal_numbers(num_features, degrees, generator=generator)
    return (degrees / normal.square().sum(-1)).sqrt().float()


def shift_invariant_kernel(x: Tensor, y: Tensor, kernel: str) -> Tensor:
    """Compute the exact kernel; differentiable, also at x = y."""
    square = (x - y).square().sum(-1)
    if kernel == "gaussian":
        return torch.exp(-square / 2)
    if kernel == "cauchy":
        return 1 / (1 + square)
    # The distance has no gradient at 0; it is set to 0 there.
    distance = torch.where(square > 0, torch.where(square > 0, square, 1.0).sqrt(), 0.0)
    r = distance * _DEGREES[kernel] ** 0.5
    polynomial = {1: 1.0, 3: 1 + r, 5: 1 + r + r.square() / 3}[_DEGREES[kernel]]
    return polynomial * torch.exp(-r)


@COMPONENTS.register("trigrf")
class Trigrf(Component):
    """Cosines (and sines) of the projections."""

    formula = "m^-½ e^{‖x‖²/2} [cos ω·x, sin ω·x], or cosines with random phases"
    kernel_formula = "e^{x·y}; Gaussian, Laplace, Matérn, Cauchy"
    source = "Rahimi & Recht 2007; Spectraformer"
    cost = "a cosine and a sine per row"

    periodic = True

    phases: torch.Tensor | None
    multipliers: torch.Tensor | None

    def __init__(
        self,
        form: Annotated[
            str,
            Option(
                '"cos_sin" (two features per row, less variance near x = y) or "phase" (one).',
                choices=("cos_sin", "phase"),
            ),
        ] = "cos_sin",
        kernel: Annotated[
            str, Option('the kernel; "laplace" and "matern12" are the same.', choices=("softmax", *SHIFT_INVARIANT))
        ] = "softmax",
    ):
        super().__init__(form=form, kernel=kernel)
        self.form, self.kernel_name = form, kernel
        self.register_buffer("phases", None)
        self.register_buffer("multipliers", None)

    def feature_dim(self, num_features: int, dim: int) -> int:
        """Return two features per row, or one with phases."""
        return 2 * num_features if self.form == "cos_sin" else num_features

    def prepare(self, projection: Projection) -> None:
        """Draw phases and multipliers from the projection's seed and site."""
        generator = site_generator(projection.seed, f"{projection.site}:trigrf")
        if self.form == "phase":
            self.phases = (2 * math.pi * uniform_numbers(projection.num_features, generator=generator)).float()
        self.multipliers = row_multipliers(self.kernel_name, projection.num_features, generator)

    def tower(
        self, x: torch.Tensor, projection: Projection, statistics: Mapping[str, torch.Tensor], second: bool
    ) -> Features:
        with full_precision(x):
            z = projection(wide(x))
            if self.multipliers is not None:
                z = z * self.multipliers.to(z.dtype)
            amplitudes = projection.amplitudes(signed=second)
            if self.phases is not None:
                values = torch.cos(z + self.phases.to(z.dtype)) * (amplitudes * 2**0.5)
            else:
                values = torch.cat((torch.cos(z) * amplitudes, torch.sin(z) * amplitudes), -1)
            return Features(values.to(x.dtype), half_square(x) if self.kernel_name == "softmax" else None)

    def kernel(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        if self.kernel_name == "softmax":
            return torch.exp((x * y).sum(-1))
        return shift_invariant_kernel(x, y, self.kernel_name)
