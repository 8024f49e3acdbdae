"""Bundling: multiplying matrices that no non-linearity separates (Eq. 13, 14, 23 of "Scalable Neural Network Kernels").

A layer A·Φ(x) + a (Φ a feature map, A its readout) followed by a Linear (W, b) is one Linear on the features:

    W (A Φ(x) + a) + b = (W A) Φ(x) + (W a + b)

A stack Φ_1, A_1, W_1, Φ_2, A_2, W_2, ... folds pair by pair; if Φ_2(u) = f(G u + c), its projection G folds into the
pair as well, since f(G(Ā Φ_1 + ā) + c) = f((G Ā) Φ_1 + (G ā + c)). Products are taken in fp64 and rounded once, so the
folded network differs from the original by the rounding of its own dtype only.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from snnk_peft.errors import ConfigError


class Affine(NamedTuple):
    """The affine map x -> x Wᵀ + b, as computed by nn.Linear.

    Attributes:
        weight: (out, in).
        bias: (out,) or None.
    """

    weight: Tensor
    bias: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        """Map (..., in) to (..., out)."""
        return torch.nn.functional.linear(x, self.weight, self.bias)


def fold_linear(A: Tensor, bias_A: Tensor | None, W2: Tensor, b2: Tensor | None) -> Affine:
    """One affine map equal to (A, bias_A) followed by (W2, b2).

    Args:
        A: (l, m) readout of a feature map with m features.
        bias_A: (l,) or None.
        W2: (o, l) weight of the Linear that follows, with nothing but the identity (or dropout in eval) between.
        b2: (o,) or None.

    Returns:
        Affine with weight W2 A (o, m) and bias W2 bias_A + b2 (o,), None if both biases are None. Computed in fp64 and
        rounded to the wider of the two weights' dtypes. Smaller than the pair unless l < o m/(o + m).

    Raises:
        ConfigError: A's rows do not match W2's columns.
    """
    if A.ndim != 2 or W2.ndim != 2 or A.shape[0] != W2.shape[1]:
        raise ConfigError(
            f"cannot fold a readout of shape {tuple(A.shape)} into a weight of shape {tuple(W2.shape)}; "
            "expected (l, m) and (o, l) with the same l"
        )
    dtype = torch.promote_types(A.dtype, W2.dtype)
    wide = W2.double()
    bias = None if bias_A is None else wide @ bias_A.double()
    if b2 is not None:
        bias = b2.double() if bias is None else bias + b2.double()
    return Affine((wide @ A.double()).to(dtype), None if bias is None else bias.to(dtype))
