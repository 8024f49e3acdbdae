"""A smaller Linear in place of a pretrained one, used by narrower attention heads and narrower FFNs."""

from __future__ import annotations

import copy

import torch
from torch import nn

from snnk_peft.families.base import as_linear
from snnk_peft.functional.at_hand import at_hand, wide_on_cpu
from snnk_peft.functional.precision import as_a_linear
from snnk_peft.layers.slots import Slot


class NarrowLinear(Slot):
    """A Linear that holds no reference to the original."""

    replaces = True

    def __init__(self, in_features: int, out_features: int, bias: bool):
        super().__init__()
        # A separate module: accelerate moves the arguments of modules with tensors, here the original.
        self.linear = nn.Linear(in_features, out_features, bias, device="meta")  # which draws no random numbers
        self.linear.weight = nn.Parameter(torch.empty(out_features, in_features))
        if bias:
            self.linear.bias = nn.Parameter(torch.empty(out_features))

    def product(self, x: torch.Tensor) -> torch.Tensor:
        """Apply the Linear; PEFT keeps trained parameters in fp32, also in a half-precision model."""
        return as_a_linear(self.linear(x.to(self.linear.weight.dtype)), x)

    def take(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        """Overwrite weight and bias, from any dtype; a missing bias is zero."""
        with torch.no_grad():
            self.linear.weight.copy_(weight)
            if self.linear.bias is not None:
                self.linear.bias.copy_(torch.zeros_like(self.linear.bias) if bias is None else bias)

    def folded(self) -> nn.Linear:
        return copy.deepcopy(self.linear)


class OneMatrix:
    """Weight and bias of a pretrained Linear, fp64 on the CPU."""

    def __init__(self, linear: nn.Module):
        with at_hand(linear):
            plain = as_linear(linear)
            self.weight = wide_on_cpu(plain.weight).double()  # type: ignore[arg-type]
            self.bias = None if plain.bias is None else wide_on_cpu(plain.bias).double()  # type: ignore[arg-type]

    def by_head(self, heads: int) -> torch.Tensor:
        """Split the rows by head, (heads, d, in)."""
        return self.weight.unflatten(0, (heads, -1))

    def full_bias(self) -> torch.Tensor:
        """Return the bias (out,), zeros if there is none."""
        return self.weight.new_zeros(len(self.weight)) if self.bias is None else self.bias
