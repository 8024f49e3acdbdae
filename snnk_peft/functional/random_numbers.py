"""Random numbers that are the same on every machine, whatever its CPU, number of threads and version of torch.

torch.randn is another function on another CPU: its vectorised forms round differently (entries differ by 2e-5), and
its stream may change between versions. Here only whole numbers are drawn, and all else is a function of them:

    generator --8 whole numbers--> key of a Philox counter generator --> 64-bit words k --> u = (k/2¹² + ½) / 2⁵²
    normal: Φ⁻¹(u),   sign: the top bit of k,   permutation: the order of the words,   others: quantiles of u

The words are exact everywhere (numpy guarantees the stream of Philox); functions of them are right to the last bits of
fp64, which almost never show in fp32.

Shapes: as asked for; fp64 on the CPU unless stated. A generator of None is torch's global one.
"""

from __future__ import annotations

import math

import numpy as np
import torch


def random_words(count: int, generator: torch.Generator | None) -> np.ndarray:
    """`count` independent uniform 64-bit words (uint64); the generator moves on by the same amount for any count."""
    parts = torch.randint(2**16, (8,), generator=generator, device="cpu").tolist()
    key = sum(part << (16 * place) for place, part in enumerate(parts))
    return np.random.Philox(key=key).random_raw(count)


def uniform_numbers(*shape: int, generator: torch.Generator | None) -> torch.Tensor:
    """Independent uniform numbers in the open interval (0, 1)."""
    # 52 bits and a half: exact in fp64, never 0 or 1, and symmetric about ½.
    steps = (random_words(math.prod(shape), generator) >> np.uint64(12)).astype(np.float64)
    return torch.from_numpy((steps + 0.5) * 2.0**-52).reshape(shape)


def normal_numbers(*shape: int, generator: torch.Generator | None) -> torch.Tensor:
    """Independent standard normal numbers."""
    return torch.special.ndtri(uniform_numbers(*shape, generator=generator))


def random_signs(*shape: int, generator: torch.Generator | None) -> torch.Tensor:
    """Independent ±1 with equal probability (Rademacher), fp32."""
    bits = (random_words(math.prod(shape), generator) >> np.uint64(63)).astype(np.float32)
    return torch.from_numpy(2 * bits - 1).reshape(shape)


def random_permutation(count: int, generator: torch.Generator | None) -> torch.Tensor:
    """The numbers 0 .. count − 1 in random order, int64."""
    return torch.from_numpy(np.argsort(random_words(count, generator), kind="stable"))


def random_choices(probability: torch.Tensor, count: int, generator: torch.Generator | None) -> torch.Tensor:
    """`count` independent indices, each i with probability[i] (of a vector that sums to 1), int64."""
    upper = probability.to("cpu", torch.float64).cumsum(0)
    found = torch.searchsorted(upper, uniform_numbers(count, generator=generator), right=True)
    return found.clamp_max(len(probability) - 1)
