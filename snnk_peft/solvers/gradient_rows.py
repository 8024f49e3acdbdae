"""Rows of an adapter's W from the gradients of one labelled pass, before anything is trained.

An adapter adds A W x to a module's output y, A = 0. With g = ∂ loss/∂y, G = E g xᵀ and C = E x xᵀ, the first-order
change of the loss for a step in A is Σ A ⊙ (G Wᵀ). Of all steps that change the outputs by as much, E ‖A W x‖² = 1,
A = -G Wᵀ (W C Wᵀ)⁻¹ lowers it most, by the root of

    tr(G Wᵀ (W C Wᵀ)⁻¹ W Gᵀ)        at most tr(G C⁻¹ Gᵀ), for W of full rank.

So the best m rows span the leading right singular vectors V of G C^-½. With few examples, G and C are not known well:
W = Vᵀ (C + λI)^-½ with V from G (C + λI)^-½. Rows look too good on the examples that they are made from; others choose
λ and show what the rows are worth: the slope at which their loss falls under the step A of the former.

Shapes: x (n, dim), g (n, out); G (out, dim), C (dim, dim), W (m, dim), A (out, m). Statistics are in fp64.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from snnk_peft.errors import NumericalError
from snnk_peft.solvers.reduce import summed, summed_number

# As a fraction of the mean square of an input; gradients are noisier than what is fitted in closed form.
RIDGES = (1e-4, 1e-3, 1e-2, 1e-1, 1.0, 10.0)
_RANK = 1e-10  # relative to the largest squared singular value: smaller ones are 0 up to rounding in fp32


class GradientMoments:
    """Sums over tokens of an adapter's inputs and of the loss's gradient at its outputs.

    Attributes:
        examples: numbers of examples read for the fit and for its evaluation.
        tokens: number of tokens read.
    """

    def __init__(self, dim: int, out: int, device: torch.device | str = "cpu"):
        self.gradients = torch.zeros(2, out, dim, dtype=torch.float64, device=device)
        self.second = torch.zeros(dim, dim, dtype=torch.float64, device=device)
        self.total = torch.zeros(dim, dtype=torch.float64, device=device)
        self.examples = [0.0, 0.0]
        self.tokens = 0

    @staticmethod
    def numbers(dim: int, out: int) -> int:
        """Return the number of values that one object holds."""
        return 2 * out * dim + dim * dim + dim

    def add(self, inputs: Tensor, gradients: Tensor, held_out: bool) -> None:
        """Add tokens (n, dim) and gradients (n, out) of the sum of the examples' losses; callers update `examples`."""
        inputs = inputs.double()
        self.gradients[int(held_out)] += gradients.double().T @ inputs
        self.second += inputs.T @ inputs
        self.total += inputs.sum(0)
        self.tokens += len(inputs)

    def reduce(self) -> None:
        """Sum over the processes, each of which has read its own share."""
        self.gradients, self.second, self.total = map(summed, (self.gradients, self.second, self.total))
        self.examples = [summed_number(count) for count in self.examples]
        self.tokens = int(summed_number(self.tokens))

    @property
    def mean(self) -> Tensor:
        return self.total / self.tokens

    @property
    def moment(self) -> Tensor:
        """Return C = E x xᵀ, (dim, dim)."""
        return self.second / self.tokens

    @property
    def fitted(self) -> Tensor:
        """Return G of the fitted examples, (out, dim)."""
        return self.gradients[0] / self.examples[0]

    @property
    def judge(self) -> Tensor:
        """Return G of the held-out examples, (out, dim)."""
        return self.gradients[1] / self.examples[1]

    @property
    def gradient(self) -> Tensor:
        """Return G of all examples, (out, dim)."""
        return self.gradients.sum(0) / sum(self.examples)


@dataclass(frozen=True)
class GradientRows:
    """Rows and their value.

    Args:
        rows: W (m, dim), fp64; W (C + λI) Wᵀ = I and W E x >= 0. Rows are 0 where G has fewer directions than m.
        ridge: the chosen λ, as a fraction of the mean eigenvalue of C.
        slope: slope of the held-out loss, per unit of change of the outputs (root mean square), under the step that is
            best for rows made from the fitted examples, according to these. Positive if the loss falls.
        slope_before: the same for the previous rows.
        slope_of_all: the same if only a ridge restricts the step, with the best of the candidates.
    """

    rows: Tensor
    ridge: float
    slope: float
    slope_before: float
    slope_of_all: float


def gradient_rows(
    moments: GradientMoments, before: Tensor, ridges: Sequence[float] = RIDGES, refit: bool = True
) -> GradientRows:
    """Return the m rows along which the loss falls fastest, as many as there were `before` (m, dim).

    Args:
        moments: of one place.
        before: the previous rows.
        ridges: candidates for λ.
        refit: make the rows from all examples once λ is chosen.

    Raises:
        NumericalError: no gradient arrives, or inputs are zero.
    """
    C, G = moments.moment, moments.fitted
    scale = float(C.diagonal().mean())
    if not scale > 0 or not float(G.norm()) > 0:
        raise NumericalError(
            f"the loss has no gradient here, or its inputs are zero (mean square {scale:.1e}, gradient "
            f"{float(G.norm()):.1e}): nothing can be chosen. Is the adapter's output used by the loss?"
        )
    values, vectors = torch.linalg.eigh(C)
    known = _Eigenbasis(values.clamp_min(0), G @ vectors, moments.judge @ vectors)
    slopes = {ridge: known.slope(known.leading(ridge * scale, len(before))) for ridge in ridges}
    chosen = max(slopes, key=lambda ridge: slopes[ridge])
    whole = max(known.slope_of_all(ridge * scale) for ridge in ridges)
    final = _Eigenbasis(known.values, moments.gradient @ vectors, known.judge) if refit else known
    rows = final.leading(chosen * scale, len(before)) @ vectors.T
    # A singular vector has no sign; units that bend at zero should be on the active side on average.
    rows = torch.where((rows @ moments.mean < 0)[:, None], -rows, rows)
    return GradientRows(rows, chosen, slopes[chosen], known.slope(before.double() @ vectors), whole)


@dataclass(frozen=True)
class _Eigenbasis:
    """G and the judging G in the basis in which C is diagonal."""

    values: Tensor
    gradient: Tensor
    judge: Tensor

    def leading(self, ridge: float, m: int) -> Tensor:
        """The leading m right singular vectors of G (C + λI)^-½, times that root: (m, dim); 0 beyond its rank."""
        root = (self.values + ridge).rsqrt()
        whitened = self.gradient * root
        squares, right = torch.linalg.eigh(whitened.T @ whitened)
        # Vectors of the singular value 0 are arbitrary: the matrix library would choose them.
        has_gradient = squares[-m:] > _RANK * squares[-1]
        return (right[:, -m:] * has_gradient).flip(1).T * root

    def slope(self, rows: Tensor) -> float:
        """Return the slope of the held-out loss under the best step of a readout of W (m, dim)."""
        inner = (rows * self.values) @ rows.T
        step = self.gradient @ rows.T @ torch.linalg.pinv(inner, hermitian=True, rtol=1e-10)
        return _ratio((step * (self.judge @ rows.T)).sum(), ((step @ inner) * step).sum())

    def slope_of_all(self, ridge: float) -> float:
        """Return the same slope where the step may be any matrix, G (C + λI)⁻¹."""
        step = self.gradient / (self.values + ridge)
        return _ratio((step * self.judge).sum(), (step.square() * self.values).sum())


def _ratio(fall: Tensor, square: Tensor) -> float:
    return float(fall) / float(square) ** 0.5 if float(square) > 0 else 0.0
