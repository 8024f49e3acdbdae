"""The problem that an init solves: the layer f(Wx + b), a rank, and a distribution of inputs, N(0, I) or with
moments that are accumulated over a stream of batches.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from snnk_peft.arguments import in_words, number_faults
from snnk_peft.errors import ConfigError, NumericalError
from snnk_peft.functional.nonlinearity import Nonlinearity, nonlinearity
from snnk_peft.registry import Registry


class InputMoments(NamedTuple):
    """Gaussian model of the inputs, x ~ N(mean, covariance), which is exact for functions linear in x.

    Attributes:
        mean: E x, (in,).
        covariance: E (x − E x)(x − E x)ᵀ, (in, in).
    """

    mean: Tensor
    covariance: Tensor

    @classmethod
    def of(cls, inputs: Tensor) -> InputMoments:
        """Compute the moments of inputs (n, in), in fp64.

        Raises:
            ConfigError: the inputs are not such a tensor.
        """
        if not isinstance(inputs, Tensor) or inputs.ndim != 2 or not len(inputs):
            given = tuple(inputs.shape) if isinstance(inputs, Tensor) else in_words(inputs)
            raise ConfigError(f"inputs is {given}; expected a tensor (n, in), one row for each input of the layer")
        inputs = inputs.double()
        mean = inputs.mean(0)
        centred = inputs - mean
        return cls(mean, centred.T @ centred / len(inputs))

    def root(self, centred: bool) -> tuple[Tensor, Tensor]:
        """Return R (in, k) with RRᵀ = C, and its pseudo-inverse; C is the covariance, or E xxᵀ if not `centred`.

        Directions in which the inputs do not vary (by 1e-12 of the largest variance) are left out.
        """
        matrix = self.covariance if centred else self.covariance + torch.outer(self.mean, self.mean)
        values, vectors = torch.linalg.eigh(matrix)
        # At least one direction, so that constant inputs need no special case.
        kept = (values > 1e-12 * values[-1]) & (values > 0)
        kept[-1] = True
        scale = values[kept].clamp_min(1e-150).sqrt()
        return vectors[:, kept] * scale, (vectors[:, kept] / scale).T


class Solution(NamedTuple):
    """Factors U (out, rank), V (in, rank) and bias (out,) in fp64.

    Attributes:
        risk: E‖f(UVᵀx + bias) − f(Wx + b)‖² over N(0, I), if the init computes it.
        energy: E‖f(Wx + b)‖² over N(0, I), likewise.
    """

    U: Tensor
    V: Tensor
    bias: Tensor | None
    risk: Tensor | None = None
    energy: Tensor | None = None


@dataclass(frozen=True)
class Problem:
    """The layer in fp64, without gradients.

    Attributes:
        weight: W (out, in).
        rank: columns of U and V.
        nonlinearity: f.
        bias: b (out,) or None.
        inputs: (n, in), their moments, or None for N(0, I).
        seed: seed of random draws.
    """

    weight: Tensor
    rank: int
    nonlinearity: Nonlinearity
    bias: Tensor | None = None
    inputs: Tensor | InputMoments | None = None
    seed: int = 0

    @functools.cached_property
    def svd(self) -> tuple[Tensor, Tensor, Tensor]:
        """Singular value decomposition A (out, k), σ (k,), B (in, k) with W = A diag(σ) Bᵀ and k = min(out, in)."""
        left, values, right = torch.linalg.svd(self.weight, full_matrices=False)
        return left, values, right.T

    @functools.cached_property
    def norms(self) -> Tensor:
        return torch.linalg.vector_norm(self.weight, dim=1)

    def with_bias(self, bias: Tensor | None) -> Problem:
        return dataclasses.replace(self, bias=bias)


LOW_RANK_INITS: Registry[Callable[[Problem], Solution]] = Registry("low-rank init", "snnk_peft.low_rank.inits")


def check(
    weight: Tensor,
    rank: object,
    activation: str | Callable[[Tensor], Tensor],
    bias: Tensor | None,
    inputs: Tensor | InputMoments | None,
    seed: int,
    *,
    init: str | None = None,
    factors: tuple[Tensor, Tensor, Tensor | None] | None = None,
) -> Problem:
    """Check the arguments and build the problem.

    Raises:
        ConfigError: all faults at once.
        NumericalError: a NaN or infinity.
    """
    if not isinstance(weight, Tensor) or weight.ndim != 2 or 0 in weight.shape:
        given = tuple(weight.shape) if isinstance(weight, Tensor) else in_words(weight)
        raise ConfigError(f"weight is {given}; expected a matrix (out, in), as nn.Linear stores it")
    out, width = weight.shape
    faults = []
    if isinstance(rank, bool) or not isinstance(rank, int) or not 1 <= rank <= min(out, width):
        faults.append(f"rank is {rank!r}; expected 1 to {min(out, width)}, the full rank of a weight ({out}, {width})")
    if init is not None and (fault := LOW_RANK_INITS.fault(init)) is not None:
        faults.append(fault)
    try:
        f = nonlinearity(activation)
    except ConfigError as error:
        faults += error.faults
    expected: dict[str, tuple[Tensor | None, tuple[int, ...]]] = {"bias": (bias, (out,))}
    if factors is not None and isinstance(rank, int):
        U, V, new_bias = factors
        expected |= {"U": (U, (out, rank)), "V": (V, (width, rank)), "new_bias": (new_bias, (out,))}
    if isinstance(inputs, InputMoments):
        expected |= {"inputs.mean": (inputs.mean, (width,)), "inputs.covariance": (inputs.covariance, (width, width))}
    elif not isinstance(inputs, (Tensor, type(None))):
        faults.append(f"inputs is {in_words(inputs)}; expected a tensor (n, {width}), InputMoments or None")
    elif inputs is not None and (inputs.ndim != 2 or inputs.shape[1] != width or len(inputs) == 0):
        faults.append(f"inputs is {tuple(inputs.shape)}; expected (n, {width}), one row for each input of the layer")
    if init == "data" and inputs is None:
        faults.append("init 'data' needs inputs, (n, in) or InputMoments; 'function' is the same for x ~ N(0, I)")
    faults += number_faults("seed", seed, int, low=0)
    faults += [
        f"{name} is {tuple(given.shape) if isinstance(given, Tensor) else in_words(given)}; expected {shape}"
        for name, (given, shape) in expected.items()
        if given is not None and not (isinstance(given, Tensor) and given.shape == shape)
    ]
    tensors = {"weight": weight} | {name: given for name, (given, _) in expected.items() if isinstance(given, Tensor)}
    if isinstance(inputs, Tensor):
        tensors["inputs"] = inputs
    faults += [
        f"{name} is on the meta device; expected numbers, so load the weights first"
        for name, given in tensors.items()
        if given.is_meta
    ]
    if faults:
        raise ConfigError(faults)
    for name, tensor in tensors.items():
        if not tensor.isfinite().all():
            where = (~tensor.isfinite()).nonzero()[0].tolist()
            raise NumericalError(f"{name} holds NaN or infinite entries, the first at {where}; expected finite numbers")
    wide = weight.detach().double()
    if isinstance(inputs, InputMoments):
        inputs = InputMoments(inputs.mean.detach().to(wide), inputs.covariance.detach().to(wide))
    elif inputs is not None:
        inputs = inputs.detach().to(wide)
    assert isinstance(rank, int)
    return Problem(wide, rank, f, None if bias is None else bias.detach().to(wide), inputs, seed)


def balanced(left: Tensor, values: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    """Return U = A√σ and V = B√σ (Definition 3.1), so that both factors have the same singular values."""
    root = values.sqrt()
    return left * root, right * root


def rebalanced(U: Tensor, V: Tensor) -> tuple[Tensor, Tensor]:
    """Return balanced factors of the same product, by the SVD of a small matrix."""
    q_left, r_left = torch.linalg.qr(U)
    q_right, r_right = torch.linalg.qr(V)
    left, values, right = torch.linalg.svd(r_left @ r_right.T)
    return balanced(q_left @ left, values, q_right @ right.T)


def unit_scale(values: Tensor) -> Tensor:
    """Return the values as divisors, with 1 in place of non-positive ones."""
    return torch.where(values > 0, values, 1.0)


def directions(coordinates: Tensor) -> Tensor:
    """Normalise rows (out, r) to norm 1; a row of zeros, which has no direction, becomes the first unit vector."""
    norm = torch.linalg.vector_norm(coordinates, dim=1, keepdim=True)
    found = coordinates / unit_scale(norm)
    found[:, 0] += (norm == 0).squeeze(1)
    return found
