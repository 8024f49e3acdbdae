"""Universal random features (SNNK paper, section 3.1): Φ(x)·Ψ(w, b) is an unbiased estimate of f(w·x + b) for any f.

f is written as an affine function plus K cosines and sines on [−radius, radius] (`functional/trigonometric_fit.py`),
and each atom a cos τz + c sin τz is linearised with Gaussian draws g (`tests/trigonometric_atom.py` derives it):

    Φ(x) = [1, x, ..., e^{τ²s²‖x‖²/2} (cos τs g·x, sin τs g·x), ...]
    Ψ(w) = [β + αb, αw, ..., e^{g·w/s − ‖w‖²/2s²} (a cos τb + c sin τb, c cos τb − a sin τb), ...]

The affine part is exact and merges with the next matrix when bundled. Rows of W are distributed over the atoms:
"stratified" in proportion to the standard deviation of each atom, "iid" drawn from that distribution, "block" with one
draw per block of rows. With s² = w_norm/(τ x_norm) the variance of one row of an atom is about (a² + c²) e^{2τ x_norm
w_norm}: fine for small norms (SIREN, normalised inputs), hopeless for a pretrained BERT layer, where it warns. Use
relu, gelu or cos features with a Nyström readout there.

Features: dim + 1 + 2 per row. Cost: the projection and two trigonometric functions per row.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping
from typing import Annotated

import torch

from snnk_peft.components import COMPONENTS
from snnk_peft.components.base import Component, Features
from snnk_peft.errors import ConfigError, NumericalWarning
from snnk_peft.functional.precision import full_precision, wide
from snnk_peft.functional.random_numbers import random_choices
from snnk_peft.functional.trigonometric_fit import ACTIVATIONS, fit_trigonometric
from snnk_peft.options import MOST, Option
from snnk_peft.projections.base import Projection
from snnk_peft.projections.base_drawn import site_generator


@COMPONENTS.register("urf")
class Urf(Component):
    """Linearisation of f(w·x + b)."""

    formula = "[1, x, e^{τ²s²‖x‖²/2} (cos τs ω·x, sin τs ω·x)]"
    kernel_formula = "f(x·y) for any activation f (as fitted)"
    source = "SNNK 3.1"
    cost = "two trigonometric functions per row"

    tau: torch.Tensor
    scale: torch.Tensor
    share: torch.Tensor
    cosines: torch.Tensor
    sines: torch.Tensor

    def __init__(
        self,
        activation: Annotated[
            str | Callable[[torch.Tensor], torch.Tensor],
            Option(
                'f ("relu": native relu features are far better), or an elementwise function of your own (such a '
                "feature map cannot be written to a file).",
                choices=tuple(ACTIVATIONS),
            ),
        ] = "gelu",
        radius: Annotated[
            float, Option("pre-activations are expected in [−radius, radius].", above=0, below=math.inf)
        ] = 6.0,
        atoms: Annotated[int, Option("K, cosines and sines in the fit.", low=1, high=128)] = 8,
        sampling: Annotated[
            str, Option("how rows are shared out among atoms, see above.", choices=("stratified", "iid", "block"))
        ] = "stratified",
        block_size: Annotated[int, Option('rows per block for "block".', low=1, high=MOST)] = 8,
        x_norm: Annotated[float, Option("typical ‖x‖, decides the scale s together with w_norm.", above=0)] = 1.0,
        w_norm: Annotated[float, Option("typical ‖w‖.", above=0)] = 1.0,
        bound: Annotated[
            float,
            Option(
                "M; above 0 features are bounded in the random rows, at a variance that explodes with dim. Needs rows "
                "with the lengths of Gaussian ones.",
                low=0,
            ),
        ] = 0.0,
    ):
        super().__init__(
            **{"activation": activation, "radius": radius, "atoms": atoms, "sampling": sampling},
            **{"block_size": block_size, "x_norm": x_norm, "w_norm": w_norm, "bound": bound},
        )
        self.bound, self.dim = bound, 0
        self.sampling, self.block_size, self.x_norm, self.w_norm = sampling, block_size, x_norm, w_norm
        self.activation = ACTIVATIONS[activation] if isinstance(activation, str) else activation
        self.fit = fit_trigonometric(self.activation, radius, atoms, reach=x_norm * w_norm)
        self._checked = False

    def feature_dim(self, num_features: int, dim: int) -> int:
        """Return two features per row, plus the affine part."""
        return 2 * num_features + dim + 1

    def fewest_rows(self) -> int:
        """Return one row per atom, unless atoms are drawn."""
        return len(self.fit.frequencies) if self.sampling == "stratified" else 1

    def prepare(self, projection: Projection) -> None:
        """Distribute the rows over the atoms."""
        if not projection.uniform:
            raise ConfigError(
                "urf cannot use a projection with unequal feature weights (each row serves another atom); "
                "use e.g. 'orf', 'gaussian' or 'qmc'"
            )
        if self.bound > 0 and not projection.sampled_lengths:
            raise ConfigError(
                f"urf bound is {self.bound} over rows of one length: e^{{−bound·‖ω‖²}} would not average to what the "
                "features are multiplied with; use bound=0 (such rows are bounded), or e.g. 'orf' or 'gaussian'"
            )
        m, self.dim = projection.num_features, projection.dim
        spread = self.fit.amplitudes() * (self.fit.frequencies * self.x_norm * self.w_norm).exp()
        probability = spread / spread.sum()
        if self.sampling == "stratified":
            if m < self.fewest_rows():
                raise ConfigError(
                    f"urf has {self.fewest_rows()} atoms but the projection only {m} rows; use num_features >= "
                    f"{self.fewest_rows()}, fewer atoms, or sampling='iid'"
                )
            counts = _apportion(probability, m)
            atom = torch.repeat_interleave(counts)
            weight = 1 / counts.double()[atom]
        else:
            generator = site_generator(projection.seed, f"{projection.site}:urf")
            size = self.block_size if self.sampling == "block" else 1
            blocks = random_choices(probability, -(-m // size), generator)
            atom = torch.repeat_interleave(blocks, size)[:m]
            weight = 1 / (m * probability[atom])
        tau = self.fit.frequencies[atom]
        rows = {
            "tau": tau,
            "scale": (self.w_norm / (tau * self.x_norm)).sqrt(),
            "share": weight.sqrt(),
            "cosines": self.fit.cosines[atom],
            "sines": self.fit.sines[atom],
        }
        for name, value in rows.items():
            self.register_buffer(name, value.float())
        log_variance = self.predicted_log_variance(self.x_norm, self.w_norm)
        if log_variance > 0:
            self._warn(f"with x_norm={self.x_norm} and w_norm={self.w_norm}", log_variance)

    def predicted_log_variance(self, x_norm: float, w_norm: float) -> float:
        """Return the natural logarithm of a bound on Var[Φ(x)·Ψ(w)] for vectors of these norms and iid rows."""
        exponent = (self.tau * self.scale * x_norm).square() + (w_norm / self.scale).square() / (1 + 8 * self.bound)
        exponent = exponent + self.dim * (math.log1p(4 * self.bound) - math.log1p(8 * self.bound) / 2)
        amplitude = torch.hypot(self.cosines, self.sines) * self.share.square()
        return torch.logsumexp(exponent + 2 * amplitude.log(), 0).item()

    @staticmethod
    def _warn(where: str, log_variance: float) -> None:
        warnings.warn(
            f"urf features {where}: the predicted variance is up to e^{log_variance:.1f}, so the estimate is noise. "
            "Normalise the inputs, use more rows, or use relu, gelu or cos features with a Nyström readout",
            NumericalWarning,
            stacklevel=2,
        )

    def tower(
        self, x: torch.Tensor, projection: Projection, statistics: Mapping[str, torch.Tensor], second: bool
    ) -> Features:
        """Compute the features; psi reads biases b (...) from statistics["bias"], 0 if absent."""
        with full_precision(x):
            affine, exponents, cos, sin = (self._psi if second else self._phi)(wide(x), projection, statistics)
            if self.bound > 0:
                squares = projection.squared_row_norms().to(exponents)
                exponents = exponents + (self.dim / 4 * math.log1p(4 * self.bound) - self.bound * squares)
            # One scale per vector, never below that of the affine part.
            top = exponents.detach().amax(-1, keepdim=True).clamp_min(0)
            top = torch.where(top.isfinite(), top, 0.0)
            weight, rest = torch.exp(exponents - top) * self.share.to(exponents), torch.exp(-top)
            values = torch.cat((*(part * rest for part in affine), weight * cos, weight * sin), -1)
            return Features(values.to(x.dtype), top)

    def _phi(
        self, x: torch.Tensor, projection: Projection, statistics: Mapping[str, torch.Tensor]
    ) -> tuple[tuple[torch.Tensor, torch.Tensor], torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the affine features and, per row, the log-amplitude of its waves and their cosine and sine parts."""
        rate = (self.tau * self.scale).to(x)
        self._check_once(x)
        exponents = rate.square() * (x.square().sum(-1, keepdim=True) / 2)
        angle = projection(x) * (rate * (1 + 4 * self.bound) ** 0.5)
        return (torch.ones_like(x[..., :1]), x), exponents, torch.cos(angle), torch.sin(angle)

    def _psi(
        self, w: torch.Tensor, projection: Projection, statistics: Mapping[str, torch.Tensor]
    ) -> tuple[tuple[torch.Tensor, torch.Tensor], torch.Tensor, torch.Tensor, torch.Tensor]:
        tau, scale, a, c = (value.to(w) for value in (self.tau, self.scale, self.cosines, self.sines))
        bias = statistics.get("bias", torch.zeros((), dtype=w.dtype, device=w.device)).to(w)
        bias = bias.expand(w.shape[:-1]).unsqueeze(-1)
        stretch = (1 + 4 * self.bound) ** 0.5
        exponents = projection(w) * stretch / scale - w.square().sum(-1, keepdim=True) / (2 * scale.square())
        cos, sin = torch.cos(tau * bias), torch.sin(tau * bias)
        affine = (self.fit.constant + self.fit.slope * bias, self.fit.slope * w)
        return affine, exponents, a * cos + c * sin, c * cos - a * sin

    def _check_once(self, x: torch.Tensor) -> None:
        # Reading a value back from a GPU synchronises, so only the first batch is checked.
        if self._checked or torch.compiler.is_compiling() or x.device.type == "meta" or x.numel() == 0:
            return
        self._checked = True
        norm = x.detach().square().sum(-1).max().sqrt().item()
        if norm > 2 * self.x_norm and (log_variance := self.predicted_log_variance(norm, self.w_norm)) > 0:
            self._warn(f"for an input of length {norm:.3g} (x_norm={self.x_norm})", log_variance)

    def kernel(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Return the fitted f(x·y), equal to E[Φ(x)·Ψ(y)] for bias 0; within `fit.sup_error` of f on the interval."""
        return self.fit((x * y).sum(-1))


def _apportion(probability: torch.Tensor, total: int) -> torch.Tensor:
    """Return integers that sum to `total` >= len(probability), nearly proportional, each at least 1."""
    counts = 1 + (probability * (total - len(probability))).floor().long()
    rest = probability * total - counts
    for index in rest.argsort(descending=True)[: total - int(counts.sum())].tolist():
        counts[index] += 1
    return counts
