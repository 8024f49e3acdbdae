"""Low-rank layers: W x + b becomes U (Vᵀ x) + b, for Linears and convolutions.

W is (out, in) as in nn.Linear, U (out, rank), V (in, rank): (out + in)·rank MACs instead of out·in. The kernel
of a convolution, (out, in, kh, kw), is a matrix in one of two ways:

    split       matrix W                   Vᵀ, applied first                U, applied then
    spatial     (out·kw, in·kh)            kh × 1, in to rank channels      1 × kw, rank to out channels
    channel     (out, in·kh·kw)            kh × kw, in to rank channels     1 × 1, rank to out channels

One-dimensional convolutions act on the second of two axes: "spatial" is 1, then k. The first convolution has no bias,
so that padding is the same as in the dense layer; each axis keeps its stride, padding and dilation in the convolution
that acts on it. "Spatial" is the form that "Efficiently learning low-rank networks" takes from Khodak et al. (2021).
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn

from snnk_peft.errors import ConfigError
from snnk_peft.functional.at_hand import at_hand
from snnk_peft.functional.random_numbers import normal_numbers
from snnk_peft.low_rank import factorize
from snnk_peft.low_rank.rearranged import rearranged_factors

LINEAR_INITS = ("spectral", "baseline")  # those that ignore what follows the layer


class LowRank(nn.Module):
    """Base class of low-rank layers, which holds the factors.

    Attributes:
        U: (rows, rank).
        V: (columns, rank).
        bias: (out,) or None.
        frobenius_decay: strength that `FrobeniusDecay` uses for this layer, or None.
    """

    frobenius_decay: float | None = None
    U: nn.Parameter
    V: nn.Parameter
    bias: nn.Parameter | None

    def _make(self, rows: int, columns: int, rank: int, out: int, bias: bool, seed: int | None) -> None:
        if not 1 <= rank <= min(rows, columns):
            raise ConfigError(
                f"rank is {rank}; expected an integer from 1 to {min(rows, columns)}, the full rank of a "
                f"{rows} × {columns} matrix"
            )
        self.U = nn.Parameter(torch.empty(rows, rank))
        self.V = nn.Parameter(torch.empty(columns, rank))
        self.bias = nn.Parameter(torch.empty(out)) if bias else None
        if seed is not None and not self.U.is_meta:
            self.draw(seed)

    @torch.no_grad()
    def draw(self, seed: int = 0) -> None:
        """Draw independent normal factors; entries of U Vᵀ have variance 1/columns, the bias is zero."""
        generator = torch.Generator("cpu").manual_seed(seed)
        self.U.copy_(normal_numbers(*self.U.shape, generator=generator) * self.rank**-0.5)
        self.V.copy_(normal_numbers(*self.V.shape, generator=generator) * len(self.V) ** -0.5)
        if self.bias is not None:
            self.bias.zero_()

    @torch.no_grad()
    def set_factors(self, U: Tensor, V: Tensor, bias: Tensor | None = None) -> None:
        """Copy factors, and a bias if given and the layer has one, from any dtype and device."""
        self.U.copy_(U)
        self.V.copy_(V)
        if bias is not None and self.bias is not None:
            self.bias.copy_(bias)

    @property
    def rank(self) -> int:
        return self.U.shape[1]

    def weight_matrix(self) -> Tensor:
        """Return U Vᵀ, (rows, columns)."""
        return self.U @ self.V.T

    def kernel_from(self, matrix: Tensor) -> Tensor:
        """Convert a matrix (rows, columns) to the dense weight; the inverse of `matrix_of`."""
        return matrix

    def product(self, U: Tensor, V: Tensor) -> Tensor:
        """Return the dense weight of the factors, (out, in·Πkernel)."""
        return self.kernel_from(U @ V.T).flatten(1)

    def macs(self) -> tuple[int, int]:
        """Return the MACs per output vector (pixel) of the two factors, and of the dense layer."""
        raise TypeError(f"{type(self).__name__} does not define macs()")

    def factored(self) -> nn.Module:
        raise TypeError(f"{type(self).__name__} does not define factored()")

    def dense(self) -> nn.Module:
        """Return one plain layer, with the factors multiplied."""
        raise TypeError(f"{type(self).__name__} does not define dense()")

    def fold(self) -> nn.Module:
        """Return the cheaper of the two forms, by MACs."""
        factored, dense = self.macs()
        return self.factored() if factored < dense else self.dense()

    def fill(self, dense: Any, init: str, activation: Any, inputs: Tensor | None, seed: int) -> Any:
        """Fill in the factors of `dense`, on its device and in its dtype, and return this layer; empty on the meta
        device."""
        if self.U.is_meta:
            return self
        with at_hand(dense):
            weight = dense.weight.detach()
            if weight.is_meta:
                return self.to("meta")
            self.to(weight.device, weight.dtype)
            bias = None if dense.bias is None else dense.bias.detach()
            matrix = self.matrix_of(weight)
            asked = "identity" if init in LINEAR_INITS else activation
            behind = None if asked == "identity" else bias  # the best bias of a linear layer is its own
            if len(matrix) == len(weight) or asked == "identity":
                found = factorize(matrix, self.rank, init, activation=asked, bias=behind, inputs=inputs, seed=seed)
                self.set_factors(found.U, found.V, bias if found.bias is None else found.bias)
            elif init == "function":
                first = factorize(matrix, self.rank, "spectral")
                U, V, moved = rearranged_factors(
                    weight.flatten(1), (first.U, first.V), self.product, activation=asked, bias=bias
                )
                self.set_factors(U, V, moved)
            else:
                raise ConfigError(
                    f"init is {init!r} for the activation {activation!r}, which acts on whole outputs, and rows of a "
                    f"kernel split as {matrix.shape[0]} × {matrix.shape[1]} are parts of them; expected "
                    f"split='channel', or init 'function' or {' or '.join(map(repr, LINEAR_INITS))}"
                )
            return self

    def matrix_of(self, weight: Tensor) -> Tensor:
        """Return a dense weight of this layer as the matrix to factorise."""
        return weight


class LowRankLinear(LowRank):
    """Low-rank Linear x -> U (Vᵀ x) + b: (..., in_features) -> (..., out_features), in the dtype of x.

    Args:
        rank: 1 to min(in_features, out_features).
        seed: seed of the random initialisation, with variance 1/in_features of the entries of U Vᵀ; None leaves memory
            uninitialised.

    Attributes:
        U: (out_features, rank).
        V: (in_features, rank).

    Raises:
        ConfigError: rank beyond full rank.

    Example:
        >>> dense = torch.nn.Linear(6, 4)
        >>> thin = LowRankLinear.from_dense(dense, rank=4)
        >>> bool(torch.allclose(thin.weight_matrix(), dense.weight, atol=1e-6))
        True
    """

    def __init__(self, in_features: int, out_features: int, rank: int, bias: bool = True, *, seed: int | None = 0):
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self._make(out_features, in_features, rank, out_features, bias, seed)

    @classmethod
    def from_dense(
        cls,
        linear: nn.Linear,
        rank: int,
        init: str = "spectral",
        *,
        activation: Any = "identity",
        inputs: Tensor | None = None,
        seed: int = 0,
    ) -> LowRankLinear:
        """Create a low-rank layer initialised from a dense one, on its device and in its dtype.

        `init` is a name of `LOW_RANK_INITS`; `activation` is the one after the layer; `inputs` (n, in) are real inputs,
        for init="data".

        Raises:
            ConfigError: rank beyond full rank, unknown init.
        """
        return cast(LowRankLinear, cls.like(linear, rank).fill(linear, init, activation, inputs, seed))

    @classmethod
    def like(cls, linear: nn.Linear, rank: int) -> LowRankLinear:
        """Create a layer of the same sizes with uninitialised factors."""
        return cls(linear.in_features, linear.out_features, rank, linear.bias is not None, seed=None)

    def forward(self, x: Tensor) -> Tensor:
        """(..., in_features) -> (..., out_features)."""
        hidden = nn.functional.linear(x.to(self.U.dtype), self.V.T)
        return nn.functional.linear(hidden, self.U, self.bias).to(x.dtype)

    def macs(self) -> tuple[int, int]:
        return self.U.numel() + self.V.numel(), self.in_features * self.out_features

    @torch.no_grad()
    def factored(self) -> nn.Sequential:
        """Return two Linears: in → rank without bias, rank → out."""
        return nn.Sequential(
            with_tensors(nn.Linear(self.in_features, self.rank, False, "meta"), self.V.T, None),
            with_tensors(nn.Linear(self.rank, self.out_features, self.bias is not None, "meta"), self.U, self.bias),
        )

    @torch.no_grad()
    def dense(self) -> nn.Linear:
        linear = nn.Linear(self.in_features, self.out_features, self.bias is not None, "meta")
        return with_tensors(linear, rounded_product(self.U, self.V), self.bias)

    def extra_repr(self) -> str:
        return f"{self.in_features} → {self.rank} → {self.out_features}, bias={self.bias is not None}"


def rounded_product(U: Tensor, V: Tensor) -> Tensor:
    """Compute U Vᵀ in fp64, rounded once."""
    return (U.double() @ V.double().T).to(U.dtype)


def with_tensors(module: Any, weight: Tensor, bias: Tensor | None) -> Any:
    """Give a plain layer copies of these tensors."""
    module.weight = nn.Parameter(weight.detach().clone(memory_format=torch.contiguous_format))
    if bias is not None:
        module.bias = nn.Parameter(bias.detach().clone())
    return module
