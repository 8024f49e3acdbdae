"""Two particles on a line, bound to the origin and to each other by springs: an exactly solvable quantum system.

    H = −½ ∂₁² − ½ ∂₂² + V,     V(x) = ½ ω² (x₁² + x₂²) + ½ k (x₁ − x₂)²

In R = (x₁ + x₂)/√2 and r = (x₁ − x₂)/√2 these are two oscillators, of ω and Ω = √(ω² + 2k): energies
ω (n + ½) + Ω (m + ½), ground state ψ ∝ e^{−(ω R² + Ω r²)/2}. A network that knows ψ alone learns V by conservation of
energy (Sehanobish et al. 2021): the local energy (Hψ)/ψ is the same everywhere,

    −½ (∇²ψ)/ψ + V(x) = E,        −½ (∇²ψ)/ψ = −½ (∇² ln ψ + ‖∇ ln ψ‖²)

up to a constant, which V(0) = 0 fixes. Units: ħ = m = 1. Shapes: points (n, 2).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from snnk_cli.data import ExampleSet


@dataclass(frozen=True)
class TwoBodies:
    """The quantum system.

    Args:
        frequency: ω > 0.
        spring: k >= 0.
    """

    frequency: float = 1.0
    spring: float = 1.5

    @property
    def inner(self) -> float:
        return math.sqrt(self.frequency**2 + 2 * self.spring)

    def potential(self, x: torch.Tensor) -> torch.Tensor:
        """Compute V, (n,)."""
        return self.frequency**2 * x.square().sum(-1) / 2 + self.spring * (x[..., 0] - x[..., 1]).square() / 2

    def log_psi(self, x: torch.Tensor) -> torch.Tensor:
        """Compute ln ψ of the ground state, (n,), up to a constant."""
        centre, apart = (x[..., 0] + x[..., 1]).square() / 2, (x[..., 0] - x[..., 1]).square() / 2
        return -(self.frequency * centre + self.inner * apart) / 2

    def kinetic(self, x: torch.Tensor) -> torch.Tensor:
        """Compute −½ (∇²ψ)/ψ, (n,), by automatic differentiation of ln ψ."""
        with torch.enable_grad():
            x = x.detach().clone().requires_grad_()
            (slope,) = torch.autograd.grad(self.log_psi(x).sum(), x, create_graph=True)
            bend = sum(torch.autograd.grad(slope[:, i].sum(), x, retain_graph=True)[0][:, i] for i in range(2))
        return (-(bend + slope.square().sum(-1)) / 2).detach()

    def energies(self, count: int) -> list[float]:
        """Return the exact lowest energies."""
        return [self.energy(*state) for state in self.states(count)]

    def energy(self, n: int, m: int) -> float:
        """Return the energy of the state with n quanta in R and m in r."""
        return self.frequency * (n + 0.5) + self.inner * (m + 0.5)

    def states(self, count: int) -> list[tuple[int, int]]:
        """Return (n, m) of the lowest energies, in order."""
        grid = [(n, m) for n in range(count) for m in range(count)]
        return sorted(grid, key=lambda state: self.energy(*state))[:count]

    def wave_function(self, x: torch.Tensor, n: int, m: int) -> torch.Tensor:
        """Compute ψ_nm, (...,) for x (..., 2), with ∫ψ² = 1: Hermite functions of √ω R and √Ω r."""
        first, second = x.unbind(-1)
        centre, apart = (first + second) / 2**0.5, (first - second) / 2**0.5
        along, across = (
            hermite_function(width**0.5 * place, order) * width**0.25
            for width, place, order in ((self.frequency, centre, n), (self.inner, apart, m))
        )
        return along * across


def hermite_function(z: torch.Tensor, order: int) -> torch.Tensor:
    """Compute h_n(z), h_0 = π^−¼ e^{−z²/2},  √(n + 1) h_{n+1} = √2 z h_n − √n h_{n−1}; orthonormal on the line."""
    before, now = torch.zeros_like(z), math.pi**-0.25 * torch.exp(-z.square() / 2)
    for n in range(order):
        before, now = now, (2**0.5 * z * now - n**0.5 * before) / (n + 1) ** 0.5
    return now


def energies_in(
    potential: Callable[[torch.Tensor], torch.Tensor], count: int, reach: float, points: int = 36
) -> list[float]:
    """Compute the lowest energies of two particles in any potential.

    Args:
        potential: (n, 2) -> (n,).
        count: number of energies.
        reach: the basis covers [−reach, reach]².
        points: points per coordinate.
    """
    return [float(value) for value in torch.linalg.eigvalsh(hamiltonian(potential, reach, points)[1])[:count]]


def states_in(
    potential: Callable[[torch.Tensor], torch.Tensor], count: int, reach: float, points: int = 36
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the lowest energies (count,), points (points, points, 2), and wave functions (count, points, points).

    These have ∫ψ² = 1, as the sum over the points times the area of each; their signs are arbitrary. Arguments as in
    `energies_in`.
    """
    at, matrix = hamiltonian(potential, reach, points)
    energies, vectors = torch.linalg.eigh(matrix)
    step = 2 * reach / (points - 1)
    return energies[:count], at.reshape(points, points, 2), vectors.T[:count].reshape(-1, points, points) / step


def hamiltonian(
    potential: Callable[[torch.Tensor], torch.Tensor], reach: float, points: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the points (points², 2), and H (points², points²) in a basis of sinc functions (Colbert & Miller 1992).

    Arguments as in `energies_in`.
    """
    x = torch.linspace(-reach, reach, points, dtype=torch.float64)
    step = float(x[1] - x[0])
    apart = torch.arange(points)[:, None] - torch.arange(points)
    signs = 1.0 - 2.0 * (apart % 2).double()
    kinetic = torch.where(apart == 0, math.pi**2 / 3, 2 / apart.double().square().clamp_min(1)) * signs / (2 * step**2)
    one = torch.eye(points, dtype=torch.float64)
    at = torch.cartesian_prod(x, x)
    return at, torch.kron(kinetic, one) + torch.kron(one, kinetic) + torch.diag(potential(at).double())


class LocalEnergies(ExampleSet):
    """Points in [−reach, reach]² with the kinetic part of the local energy.

    Args:
        system: system with a known ground state.
        count: number of points.
        reach: half side of the square.
        seed: seed of the points.
    """

    def __init__(self, system: TwoBodies, count: int, reach: float, seed: int):
        generator = torch.Generator().manual_seed(seed)
        self.points = (2 * torch.rand(count, 2, generator=generator, dtype=torch.float64) - 1) * reach
        self.kinetic = system.kinetic(self.points)
        self.lengths = [1] * count

    def batch(self, indices: Sequence[int], device: torch.device | str = "cpu") -> dict[str, torch.Tensor]:
        """Return coordinates (batch, 2) and kinetic (batch,), fp32."""
        chosen = list(indices)
        return {
            "coordinates": self.points[chosen].float().to(device),
            "kinetic": self.kinetic[chosen].float().to(device),
        }

    def describe(self) -> str:
        return f"{len(self):,} points"

    def fingerprint(self) -> str:
        return hashlib.sha256(self.points.numpy().tobytes() + self.kinetic.numpy().tobytes()).hexdigest()
