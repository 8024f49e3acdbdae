"""A part of one's own, as CONTRIBUTING describes it: every nn.Linear that matches becomes two smaller ones.

    W x + b      is replaced by   V (U x) + b      with U (rank, in), V (out, rank)

Written as a user would write it: one file, registered under a name, and nothing else anywhere.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
from torch import nn

from snnk_peft import PARTS, Part, Patch, PatchContext
from snnk_peft.layers.slots import Fit, Fitter, Slot
from snnk_peft.options import documented, option


@PARTS.register("two_linears")
@documented
@dataclass
class TwoLinearsPart(Part):
    """Linears become products of two thin ones."""

    targets: str = option("*", "pattern of the paths.")
    rank: int = option(4, "rows of U, >= 1.", low=1, high=1 << 20)

    # Where `plan` and `check_family` try it by themselves. Nowhere: other tests of this process count what they try.
    tried: ClassVar[dict[str, list[int]]] = {}
    size_fields: ClassVar[tuple[str, ...]] = ("rank",)

    @classmethod
    def candidates(cls, model, length):
        return [cls(targets, rank) for targets, ranks in cls.tried.items() for rank in ranks]

    @classmethod
    def probes(cls):
        return {"two_linears": cls(targets, 2) for targets in cls.tried}

    def plan(self, context: PatchContext) -> list[Patch]:
        """Every Linear that matches, in any model."""
        found = context.modules(nn.Linear, self.targets)
        return [Patch(path, partial(TwoLinears, linear, self.rank), replaces=True) for path, linear in found.items()]


class TwoLinears(Slot):
    """V (U x) + b, from the singular vectors of W."""

    replaces = True

    def __init__(self, linear: nn.Linear, rank: int):
        super().__init__()
        self.U = nn.Linear(linear.in_features, rank, bias=False)
        self.V = nn.Linear(rank, linear.out_features)
        if self.U.weight.is_meta:
            return  # sizes alone are wanted
        left, values, right = torch.linalg.svd(linear.weight.detach().float(), full_matrices=False)
        with torch.no_grad():
            self.U.weight.copy_(right[:rank])
            self.V.weight.copy_(left[:, :rank] * values[:rank])
            self.V.bias.copy_(torch.zeros(linear.out_features) if linear.bias is None else linear.bias)

    def forward(self, base, x, *args, **kwargs):
        return self.V(self.U(x))

    def fold(self, place):
        """One Linear again."""
        linear = nn.Linear(self.U.in_features, self.V.out_features)
        linear.weight = nn.Parameter((self.V.weight @ self.U.weight).detach())
        linear.bias = nn.Parameter(self.V.bias.detach().clone())
        place.put(linear)

    def fitter(self, place, options):
        return LeastSquares(self, place.original)


class LeastSquares(Fitter):
    """The best V and b for the present U on the activations."""

    def __init__(self, slot: TwoLinears, original: nn.Module):
        self.slot, self.original = slot, original

    def fit(self, data):
        rows = {held: [x.reshape(-1, x.shape[-1]) for is_held, x in data if is_held == held] for held in (False,)}
        x = torch.cat(rows[False])
        before = self.error(x)
        hidden = torch.cat((self.slot.U(x), torch.ones(len(x), 1)), -1).double()
        solved = torch.linalg.lstsq(hidden, self.original(x).double()).solution.float()
        self.slot.V.weight.copy_(solved[:-1].T)
        self.slot.V.bias.copy_(solved[-1])
        return Fit(self.slot.U.out_features, len(x), 0, None, before, self.error(x))

    def error(self, x: torch.Tensor) -> float:
        wanted = self.original(x)
        return float((self.slot.V(self.slot.U(x)) - wanted).square().sum() / (wanted - wanted.mean(0)).square().sum())
