"""f(z) ≈ β + αz + Σ_k a_k cos ω_k z + c_k sin ω_k z on [−R, R]: discrete atoms with an exact affine part.

GELU, ReLU, tanh and SiLU have no integrable Fourier transform, so the SNNK paper's Eq. 6 has no densities to sample
from. On an interval they have this series: ω_k = πk/T with T = 1.5 R (the period is wider than the interval, so
nothing has to match at its ends), fitted by least squares. Affine part and slow waves are nearly dependent, so the
plain least squares fit has large coefficients that cancel (tanh: 60 where 0.6 does), and a random feature pays for each
of them with variance. So a ridge in proportion to the variance factor is added: the one with the least total standard
deviation among those whose largest error is within half of the best.

Shapes: z any; coefficients (K,).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from snnk_peft.errors import ConfigError

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": torch.nn.functional.gelu,
    "tanh": torch.tanh,
    "silu": torch.nn.functional.silu,
    "relu": torch.relu,
    "sin": torch.sin,
    "cos": torch.cos,
}
_POINTS = 2001
_RIDGES = tuple(10.0 ** (-exponent / 2) for exponent in range(26, 7, -1))


class TrigonometricFit(NamedTuple):
    """The coefficients, fp64 on the CPU.

    Attributes:
        constant: β.
        slope: α.
        frequencies: ω_k (K,).
        cosines: a_k (K,).
        sines: c_k (K,).
        sup_error: the largest |f − fit| on the interval.
    """

    constant: float
    slope: float
    frequencies: Tensor
    cosines: Tensor
    sines: Tensor
    sup_error: float

    def __call__(self, z: Tensor) -> Tensor:
        angle = z.unsqueeze(-1) * self.frequencies.to(z)
        waves = torch.cos(angle) @ self.cosines.to(z) + torch.sin(angle) @ self.sines.to(z)
        return self.constant + self.slope * z + waves

    def amplitudes(self) -> Tensor:
        """Return √(a_k² + c_k²), (K,)."""
        return torch.hypot(self.cosines, self.sines)


def fit_trigonometric(
    function: Callable[[Tensor], Tensor], radius: float, atoms: int, *, reach: float = 0.0
) -> TrigonometricFit:
    """Fit `function` on [−radius, radius]; the fit of a function in ACTIVATIONS is computed once per process.

    Args:
        function: elementwise, called with an fp64 tensor.
        radius: R > 0; outside the interval the fit means nothing.
        atoms: K >= 1. More atoms fit better and, with high frequencies, cost variance as random features.
        reach: the typical ‖x‖‖w‖; the standard deviation of an atom as a random feature grows as e^{ω_k reach}.

    Raises:
        ConfigError: bad sizes, or a function that is not finite on the interval.
    """
    faults = []
    if isinstance(radius, bool) or not isinstance(radius, (int, float)) or not 0 < radius < math.inf:
        faults.append(f"radius is {radius!r}; expected a number above 0")
    if isinstance(atoms, bool) or not isinstance(atoms, int) or atoms < 1:
        faults.append(f"atoms is {atoms!r}; expected an integer >= 1")
    if faults:
        raise ConfigError(faults)
    # Only these are known not to change; a user's function may have weights that are trained.
    known = any(function is member for member in ACTIVATIONS.values())
    return (_fit_once if known else _fit)(function, radius, atoms, reach)


def _fit(function: Callable[[Tensor], Tensor], radius: float, atoms: int, reach: float) -> TrigonometricFit:
    z = torch.linspace(-radius, radius, _POINTS, dtype=torch.float64, device="cpu")
    target = function(z)
    if target.shape != z.shape or not target.isfinite().all():
        raise ConfigError(
            f"the activation maps {_POINTS} numbers in [-{radius}, {radius}] to shape {tuple(target.shape)} with "
            f"{int((~target.isfinite()).sum())} values that are not finite; expected a finite elementwise function"
        )
    fits = [_ridge_fit(z, target.double(), radius, atoms, reach, ridge) for ridge in _RIDGES]
    limit = 1.5 * min(fit.sup_error for fit in fits) + 1e-12
    growth = (fits[0].frequencies * reach).exp()
    return min(
        (fit for fit in fits if fit.sup_error <= limit), key=lambda fit: (fit.amplitudes() * growth).sum().item()
    )


@functools.lru_cache(maxsize=256)
@torch.inference_mode(False)  # so that a fit first made without gradients can be used with them
def _fit_once(function: Callable[[Tensor], Tensor], radius: float, atoms: int, reach: float) -> TrigonometricFit:
    return _fit(function, radius, atoms, reach)


def _ridge_fit(z: Tensor, target: Tensor, radius: float, atoms: int, reach: float, ridge: float) -> TrigonometricFit:
    frequencies = math.pi / (1.5 * radius) * torch.arange(1, atoms + 1, dtype=torch.float64, device="cpu")
    angle = z[:, None] * frequencies
    design = torch.cat((torch.ones_like(z)[:, None], z[:, None], torch.cos(angle), torch.sin(angle)), 1)
    # Penalty rows: 0 for the affine part, which is exact and costs no variance.
    factor = (ridge * len(z) * (2 * frequencies * reach).exp()).sqrt().repeat(2)
    penalty = torch.diag(torch.cat((torch.zeros(2, dtype=torch.float64, device="cpu"), factor)))
    padded = torch.nn.functional.pad(target, (0, len(penalty)))
    solution = torch.linalg.lstsq(torch.cat((design, penalty)), padded).solution
    error = (design @ solution - target).abs().max().item()
    cosines, sines = solution[2 : 2 + atoms], solution[2 + atoms :]
    return TrigonometricFit(solution[0].item(), solution[1].item(), frequencies, cosines, sines, error)
