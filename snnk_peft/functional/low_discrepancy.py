"""Low-discrepancy points in the open unit cube: m points that fill [0, 1]^d more evenly than independent ones.

Halton: coordinate j of point i is i written in the j-th prime as base, digits mirrored at the point. Sobol: the same in
base 2 for all coordinates, digits mixed by binary matrices (torch's engine, 30 bits).

Scrambled, every single point is uniform in the cube while the evenness stays: for Halton each digit place of each
coordinate gets its own random permutation (Owen 2017), for Sobol random matrices and a digital shift (Matoušek 1998).
Unscrambled, the sequence starts after its first point 0, which has no normal quantile.

Shapes: (count, dim), fp64, on the CPU. Cost O(count · dim · digits).
"""

from __future__ import annotations

import math

import torch

from snnk_peft.functional.random_numbers import random_permutation, random_words, uniform_numbers

UNIT_BITS = 30  # resolution of the Sobol engine; Halton digits have the same
MAX_SOBOL_DIM = 21201


def sobol(count: int, dim: int, generator: torch.Generator | None = None) -> torch.Tensor:
    """Return the first `count` < 2³⁰ points of Sobol's sequence, scrambled if a generator is given; dim up to
    MAX_SOBOL_DIM."""
    if generator is None:
        return torch.quasirandom.SobolEngine(dim).fast_forward(1).draw(count, dtype=torch.float64)
    seed = int(random_words(1, generator)[0]) >> 2
    engine = torch.quasirandom.SobolEngine(dim, scramble=True, seed=seed)
    points = engine.draw(count, dtype=torch.float64)
    # torch rounds the first point, which is the shift of the scrambling, to the default dtype.
    points[0] = engine.shift.double() / 2**UNIT_BITS
    # Points are lower ends of cells of width 2⁻³⁰; their middles are never 0, and make the mean exactly ½.
    return points + 2.0 ** -(UNIT_BITS + 1)


def halton(count: int, dim: int, generator: torch.Generator | None = None) -> torch.Tensor:
    """Return the first `count` < 2³⁰ points of Halton's sequence, scrambled if a generator is given."""
    first = 1 if generator is None else 0
    index = torch.arange(first, first + count, device="cpu")
    columns = [_radical_inverse(index, base, generator) for base in first_primes(dim)]
    points = torch.stack(columns, 1)
    if generator is None:
        return points
    # A uniform place within the last digit's cell makes each coordinate exactly uniform; rounding must not make it 1.
    return points.clamp(2.0**-54, 1 - 2.0**-53)


def _radical_inverse(index: torch.Tensor, base: int, generator: torch.Generator | None) -> torch.Tensor:
    """Mirror the digits of `index` in `base`: numbers in [0, 1)."""
    value, unit = torch.zeros(index.shape, dtype=torch.float64, device="cpu"), 1.0
    for _ in range(math.ceil(UNIT_BITS / math.log2(base))):
        digit, index, unit = index % base, index // base, unit / base
        if generator is not None:  # leading zeros are digits too: unpermuted, first points stay near 0
            digit = random_permutation(base, generator)[digit]
        value += digit.double() * unit
    if generator is not None:
        value += unit * uniform_numbers(len(index), generator=generator)
    return value


def first_primes(count: int) -> list[int]:
    """Return 2, 3, 5, ..."""
    # p_n < n (ln n + ln ln n) for n >= 6
    limit = 15 if count < 6 else int(count * (math.log(count) + math.log(math.log(count)))) + 1
    prime = bytearray([1]) * (limit + 1)
    for number in range(2, math.isqrt(limit) + 1):
        if prime[number]:
            prime[number * number :: number] = bytes(len(range(number * number, limit + 1, number)))
    return [number for number in range(2, limit + 1) if prime[number]][:count]


def normal_points(sequence: str, count: int, dim: int, generator: torch.Generator | None = None) -> torch.Tensor:
    """Return Φ⁻¹ of "sobol" or "halton" points, per coordinate: (count, dim), standard normal if scrambled."""
    points = {"sobol": sobol, "halton": halton}[sequence](count, dim, generator)
    return torch.special.ndtri(points)
