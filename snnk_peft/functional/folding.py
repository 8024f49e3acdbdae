"""Bundling: multiplying matrices that no non-linearity separates (Eq. 13, 14, 23 of "Scalable Neural Network Kernels").

A layer A·Φ(x) + a (Φ a feature map, A its readout) followed by a Linear (W, b) is one Linear on the features:

    W (A Φ(x) + a) + b = (W A) Φ(x) + (W a + b)

A stack Φ_1, A_1, W_1, Φ_2, A_2, W_2, ... folds pair by pair; if Φ_2(u) = f(G u + c), its projection G folds into the
pair as well, since f(G(Ā Φ_1 + ā) + c) = f((G Ā) Φ_1 + (G ā + c)). Products are taken in fp64 and rounded once, so the
folded network differs from the original by the rounding of its own dtype only.

The Jacobian of a bundled layer x -> W̄ s f(G x + c) + b is explicit: J = W̄ diag(s f'(G x + c)) G.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from snnk_peft.errors import ConfigError


class Affine(NamedTuple):
    """The map x -> x Wᵀ + b, callable; what nn.Linear computes.

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


def fold_gate(v: Tensor, A: Tensor, bias_A: Tensor | None = None) -> Affine:
    """Absorb an elementwise gate: v ⊙ (A Φ + bias_A) = (diag(v) A) Φ + v ⊙ bias_A (the adapter's gate, Eq. 22).

    Args:
        v: (l,) gate.
        A: (l, m) readout.
        bias_A: (l,) or None.

    Returns:
        Affine of the same shapes.
    """
    if v.ndim != 1 or len(v) != len(A):
        raise ConfigError(
            f"the gate has shape {tuple(v.shape)}; expected ({len(A)},), one entry per row of the readout"
        )
    dtype = torch.promote_types(v.dtype, A.dtype)
    weight = (v.double().unsqueeze(1) * A.double()).to(dtype)
    return Affine(weight, None if bias_A is None else (v.double() * bias_A.double()).to(dtype))


def fold_stack(stack: Sequence[Affine | Callable[[Tensor], Tensor]]) -> list[Affine | Callable[[Tensor], Tensor]]:
    """Fold every run of adjacent affine maps of a network into one (Eq. 13 repeated).

    Args:
        stack: the network in order of application: `Affine` items, and any other callables (feature maps, activations)
            between them. A pair [Φ, A] is written Φ, Affine(A); give f(G· + c) as Affine(G, c), f to let the affine map
            before it fold into G.

    Returns:
        The equivalent list with no two adjacent Affine items; other callables are kept as they are.

    Raises:
        ConfigError: the stack is empty, or neighbouring shapes do not match.

    Example:
        >>> net = [torch.cos, Affine(torch.ones(3, 4)), Affine(torch.ones(2, 3), torch.ones(2))]
        >>> [f if callable(f) and not isinstance(f, Affine) else tuple(f.weight.shape) for f in fold_stack(net)][1:]
        [(2, 4)]
    """
    if not stack:
        raise ConfigError("the stack is empty; expected at least one affine map or feature map")
    folded: list[Affine | Callable[[Tensor], Tensor]] = []
    for item in stack:
        last = folded[-1] if folded else None
        if isinstance(item, Affine) and isinstance(last, Affine):
            folded[-1] = fold_linear(last.weight, last.bias, item.weight, item.bias)
        else:
            folded.append(item)
    return folded


def nested_readout(
    psis: Sequence[Callable[[Tensor, Tensor], Tensor]], weights: Sequence[Tensor], biases: Sequence[Tensor]
) -> Tensor:
    """W̄ of Eq. 14: the one matrix that a fully bundled network applies to its nested features.

    The network x_{i+1} = f_{i+1}(W_i x_i + b_i), i = 0..L−1, becomes W̄ Φ_L(...Φ_1(x)), with Ā_1 = Ψ_1(W_0, b_0) and
    Ā_{k+1} = Ψ_{k+1}(W_k Ā_k, b_k). (The paper prints b_L in the outermost place; by its Eq. 12 it is b_{L−1}.)
    Equal to the network wherever Φ·Ψ equals f exactly, an estimate otherwise, with errors that compound over depth.

    Args:
        psis: L functions Ψ: (weight (n, k), bias (n,)) -> (n, m); the matching Φ maps R^k to R^m.
        weights: L matrices W_i (d_{i+1}, d_i).
        biases: L vectors (d_{i+1},).

    Returns:
        (d_L, m_L).
    """
    if not psis or not len(psis) == len(weights) == len(biases):
        raise ConfigError(
            f"got {len(psis)} feature maps, {len(weights)} weights and {len(biases)} biases; expected L >= 1 of each"
        )
    readout = psis[0](weights[0], biases[0])
    for psi, weight, bias in zip(psis[1:], weights[1:], biases[1:], strict=True):
        readout = psi(fold_linear(readout, None, weight, None).weight, bias)
    return readout


def bundle_jacobian(
    weight: Tensor,
    projection: Tensor,
    offset: Tensor | None,
    function: Callable[[Tensor], Tensor],
    x: Tensor,
    scale: float | Tensor = 1.0,
) -> Tensor:
    """The Jacobian of a bundled layer x -> W̄ s f(G x + c) + b in closed form, W̄ diag(s f'(G x + c)) G.

    No backward pass: f' is the forward derivative of the scalar function. The Jacobian of a deeper bundle is the
    product of its layers' Jacobians.

    Args:
        weight: W̄ (o, m).
        projection: G (m, d).
        offset: c (m,) or None.
        function: f, elementwise.
        x: (..., d) points at which to differentiate.
        scale: s, a number or (m,).

    Returns:
        (..., o, d).
    """
    preactivation = torch.nn.functional.linear(x, projection, offset)
    slope = torch.func.jvp(function, (preactivation,), (torch.ones_like(preactivation),))[1] * scale
    return (weight * slope.unsqueeze(-2)) @ projection
