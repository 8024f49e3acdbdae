"""Rows without any structure: every entry of W is trained (Spectraformer's "weight matrix learner" at its plainest).

W starts as an independent Gaussian draw, or as block-orthogonal Gaussian rows, whose estimates have less variance.

Cost: as gaussian; num_features · dim parameters, and num_features for a bias.
"""

from __future__ import annotations

from typing import Annotated

import torch

from snnk_peft.functional.random_numbers import block_orthogonal, gaussian_lengths
from snnk_peft.options import Option
from snnk_peft.projections import PROJECTIONS
from snnk_peft.projections.base_learned import Learned


@PROJECTIONS.register("free")
class Free(Learned):
    """W as one parameter."""

    formula = "W itself is trained"
    source = "Spectraformer; ordinary bottleneck adapters"
    cost = "m·d"

    resamplable = False
    takes_rows = True

    def __init__(
        self,
        dim: int,
        num_features: int,
        *,
        init: Annotated[
            str,
            Option(
                '"gaussian" starts with independent standard normal entries, "orf" with rows that are orthogonal '
                "within blocks of `dim` and as long as Gaussian ones. Either way every row is N(0, I).",
                choices=("gaussian", "orf"),
            ),
        ] = "gaussian",
        bias: Annotated[bool, Option("also learn a bias c that is added to Wx, zero at the start.")] = False,
        **kwargs: object,
    ):
        self.init, self.with_bias, self.params = init, bias, {"init": init, "bias": bias}
        super().__init__(dim, num_features, **kwargs)  # type: ignore[arg-type]

    def draw(self, generator: torch.Generator) -> torch.Tensor:
        if self.init == "gaussian":
            return super().draw(generator)
        rows = block_orthogonal(self.num_features, self.dim, generator)
        return rows * gaussian_lengths(self.num_features, self.dim, generator)[:, None]

    @torch.no_grad()
    def absorb(self, factor: float) -> bool:
        self.weight.mul_(factor)
        return True

    @torch.no_grad()
    def take(self, rows: torch.Tensor) -> None:
        self.weight.copy_(rows)

    def draw_buffers(self, generator: torch.Generator) -> dict[str, torch.Tensor]:
        """Return no buffers: the initial random values are learned."""
        return {}

    def initial(self, generator: torch.Generator) -> dict[str, torch.Tensor]:
        """Return W, and a bias of zeros if requested."""
        bias = {"bias": torch.zeros(self.num_features, device="cpu")} if self.with_bias else {}
        return {"weight": self.draw(generator), **bias}

    def rows(self) -> torch.Tensor:
        return self.weight

    def materialize(self) -> torch.Tensor:
        return self.weight
