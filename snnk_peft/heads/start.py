"""Initialisation of a task head: ridge regression on some examples, used only if it beats chance.

With centred vectors φ̃ = U √e Vᵀ, centred targets y, shares s = e / (e + λ) and z = Uᵀ y,

    ‖y − Hy‖² = ‖y‖² − Σ (2s − s²) z²,      tr H = 1 + Σ s,      R² = 1 − ‖y − Hy‖² / ‖y‖² / (1 − tr H / n)²

so that one eigendecomposition of the smaller Gram matrix (examples or columns) serves all λ and all permutations of the
targets. λ maximises R² among those with (1 − tr H / n)⁻² <= RATIO: with a head that memorised its examples, adapters
would learn from residuals that new examples do not have.

The head is used if R² > 0 and R² exceeds that of each of 199 permutations of the targets. If vectors and targets are
independent, all orders are equally likely, and this happens in at most one of 200 cases.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from snnk_peft.heads.fitted import HEAD_RIDGES

RATIO = 1.3  # maximum ratio of the cross-validated error to that on the fitted examples
PERMUTATIONS = 199
LEAST = 0.01  # least standard deviation of a column, relative to all: a dead one would grow huge during training


class Start(NamedTuple):
    """A head y = A (φ − mean) · scale + b.

    Attributes:
        weight: A (outputs, width); zero if the fitted head is not used.
        bias: b (outputs,), the mean target.
        mean: mean of the vectors, (width,).
        scale: 1 / standard deviation of the vectors, (width,), bounded.
        ridge: λ as a fraction of the mean diagonal of the standardised Gram matrix.
        relative_error: ‖y − Hy‖² / ‖y‖² on the examples; 1 if the fitted head is not used.
        explained: R², cross-validated.
        by_chance: the largest R² of permuted targets.
        taken: whether the fitted head is used.
    """

    weight: Tensor
    bias: Tensor
    mean: Tensor
    scale: Tensor
    ridge: float
    relative_error: float
    explained: float
    by_chance: float
    taken: bool


def starting_head(vectors: Tensor, targets: Tensor, *, ridges: Sequence[float] = HEAD_RIDGES, seed: int = 0) -> Start:
    """Fit the initial head in fp64.

    Args:
        vectors: (n, width), at least two examples; finite.
        targets: (n, outputs); one-hot for classes.
        ridges: candidates above 0, as fractions of the mean diagonal of the standardised Gram matrix; the largest is
            always considered.
        seed: seed of the permutations.
    """
    vectors, targets = vectors.double(), targets.double()
    mean, bias, count = vectors.mean(0), targets.mean(0), len(vectors)
    spread = vectors.std(0, correction=0)
    least = LEAST * float(spread.square().mean().sqrt())
    scale = 1 / spread.clamp_min(least) if least > 0 else torch.ones_like(spread)
    vectors, targets = (vectors - mean) * scale, targets - bias
    basis, values = _left_vectors(vectors)
    generator = torch.Generator().manual_seed(seed)
    orders = [torch.arange(count), *(torch.randperm(count, generator=generator) for _ in range(PERMUTATIONS))]
    permuted = targets[torch.stack(orders, 1).to(targets.device)]  # (n, 1 + 199, outputs)
    rotated = (basis.T @ permuted.flatten(1)).unflatten(1, permuted.shape[1:])
    energy, total = rotated.square().sum(-1).T, targets.square().sum()  # (1 + 199, r)
    mean_diagonal = float(values.sum()) / len(mean)
    best: list[tuple[float, Tensor, float]] = []
    for ridge in sorted(ridges, reverse=True):
        shares = values / (values + ridge * mean_diagonal)
        left = 1 - (1 + float(shares.sum())) / count
        if best and (left <= 0 or left**-2 > RATIO):
            break  # smaller ridges leave less
        error = (total - energy @ (2 * shares - shares.square())).clamp_min(0) / total / max(left, 1e-12) ** 2
        best.append((ridge, 1 - torch.where(error.isfinite(), error, torch.inf), left))
    ridge, explained, left = max(best, key=lambda each: float(each[1][0]))
    by_chance = float(torch.stack([each[1] for each in best])[:, 1:].amax())
    taken = float(explained[0]) > max(0.0, by_chance)
    # A = zᵀ (e + λ)⁻¹ Uᵀ φ̃
    weight = torch.zeros(len(bias), len(mean), dtype=torch.float64, device=vectors.device)
    if taken:
        weight = (vectors.T @ (basis @ (rotated[:, 0] / (values + ridge * mean_diagonal)[:, None]))).T
    error = (1 - float(explained[0])) * left**2 if taken else 1.0
    return Start(weight, bias, mean, scale, ridge, error, float(explained[0]), by_chance, taken)


def _left_vectors(vectors: Tensor) -> tuple[Tensor, Tensor]:
    """Return U (n, r) and e (r,) of the directions above rounding error."""
    by_rows = len(vectors) <= vectors.shape[1]
    values, found = torch.linalg.eigh(vectors @ vectors.T if by_rows else vectors.T @ vectors)
    kept = values > max(vectors.shape) * torch.finfo(values.dtype).eps * values[-1].clamp_min(1e-300)
    values, found = values[kept], found[:, kept]
    return (found if by_rows else vectors @ found * values.rsqrt()), values
