"""Evenly spread points on a sphere from rows of the discrete Fourier matrix (Lyu 2017).

F_Λ holds the rows k ∈ Λ, |Λ| = h, of the n × n Fourier matrix. Each of its n columns f_j has entries of modulus 1, and

    v_j = [Re f_j, Im f_j] / √h    and    v_{n+j} = [−Im f_j, Re f_j] / √h

are 2n unit vectors in 2h dimensions with Σ v vᵀ = (n/h) I. All inner products are values of one sequence,
<v_i, v_j> = Re c_{j−i} and <v_i, v_{n+j}> = −Im c_{j−i} with c_t = Σ_{k∈Λ} e^{2πikt/n} / h, so the Riesz energy
Σ_{i≠j} ‖v_i − v_j‖^−s takes O(n) to evaluate. Λ is found by coordinate descent on that energy: one index after the
other is exchanged for the best of some candidates.

Shapes: points (2n, 2h). Cost of the search O(sweeps · h · candidates · n).
"""

from __future__ import annotations

import torch

from snnk_peft.functional.random_numbers import random_permutation

RIESZ_POWER = 2.0
RIESZ_CANDIDATES = 32  # exchanges tried per index and sweep; all of them where n is small
RIESZ_SWEEPS = 2
RIESZ_TIE = 1e-6  # relative differences of energies below this mean nothing


def sphere_points(indices: torch.Tensor, n: int) -> torch.Tensor:
    """v_1, ..., v_2n as rows, (2n, 2h) in fp64, for Λ = `indices` (h,)."""
    angle = (torch.arange(n, device="cpu")[:, None] * indices % n).double() * (2 * torch.pi / n)
    real, imaginary = angle.cos(), angle.sin()
    points = torch.cat((torch.cat((real, imaginary), 1), torch.cat((-imaginary, real), 1)))
    return points * len(indices) ** -0.5


def riesz_energy(correlation: torch.Tensor) -> torch.Tensor:
    """Mean of ‖v_i − v_j‖^−s over pairs i ≠ j, from c (..., n) complex; result (...). Coincident points cost 10¹²ˢ."""
    # ‖v − w‖² = 2 − 2<v, w>; c_0 = 1 pairs v_i with itself, and its imaginary part v_i with v_{n+i}.
    inner = torch.cat((correlation.real[..., 1:], -correlation.imag), -1)
    return (2 - 2 * inner).clamp_min(1e-12).pow(-RIESZ_POWER / 2).mean(-1)


def fourier_indices(h: int, n: int, generator: torch.Generator) -> torch.Tensor:
    """Λ: h distinct indices from 1 .. n − 1 with low Riesz energy, (h,); the local optimum found depends on the seed.

    Args:
        h: half the dimension.
        n: half the number of points, > h.
        generator: draws the first Λ and the candidates.
    """
    order = random_permutation(n - 1, generator) + 1
    chosen, free = order[:h].clone(), order[h:].clone()
    if not len(free):
        return chosen
    # Columns k of the Fourier matrix by gathering from one table of roots of unity.
    turns = torch.arange(n, device="cpu")
    roots = torch.polar(torch.ones(n, dtype=torch.float64, device="cpu"), turns.double() * (2 * torch.pi / n))
    total = roots[chosen[:, None] * turns % n].sum(0)
    energy = riesz_energy(total / h)
    for _ in range(RIESZ_SWEEPS):
        for place in range(h):
            tried = random_permutation(len(free), generator)[:RIESZ_CANDIDATES]
            sums = total - roots[chosen[place] * turns % n] + roots[free[tried][:, None] * turns % n]
            found = riesz_energy(sums / h)
            # Symmetric choices have equal energies: the first of them, and none for a gain that is rounding.
            best = int((found <= found.min() * (1 + RIESZ_TIE)).nonzero()[0])
            if found[best] < energy * (1 - RIESZ_TIE):
                energy, total = found[best], sums[best]
                old = chosen[place].clone()
                chosen[place] = free[tried[best]]
                free[tried[best]] = old
    return chosen
