"""Block-orthogonal rows (orthogonal random features, Yu et al. 2016; Spectraformer's "ORF").

W stacks independent blocks D·Q: Q is Haar-distributed orthogonal (dim, dim), D holds row norms. With χ_dim norms every
row is marginally N(0, I), so estimates stay unbiased while rows of a block no longer overlap, which lowers the
variance. num_features > dim stacks ⌈num_features / dim⌉ blocks and truncates the last.

Cost: as gaussian; drawing takes one QR factorisation per block, in fp64.
"""

from __future__ import annotations

from typing import Annotated

import torch

from snnk_peft.functional.random_directions import block_orthogonal, gaussian_lengths
from snnk_peft.options import Option
from snnk_peft.projections import PROJECTIONS
from snnk_peft.projections.base import Projection


@PROJECTIONS.register("orf")
class Orf(Projection):
    """Block-orthogonal W.

    Args:
        **kwargs: as in `Projection`.
    """

    formula = "⌈m/d⌉ Haar blocks times χ_d lengths (or √d)"
    source = "Yu et al. 2016; Spectraformer"
    cost = "m·d"

    def __init__(
        self,
        dim: int,
        num_features: int,
        *,
        norms: Annotated[
            str,
            Option(
                '"chi" draws each row\'s norm from χ_dim, as a Gaussian row has it: unbiased. "sqrt_dim" gives every '
                "row the norm √dim: lower variance, with a bias that vanishes as dim grows.",
                choices=("chi", "sqrt_dim"),
            ),
        ] = "chi",
        **kwargs: object,
    ):
        self.norms, self.params = norms, {"norms": norms}
        super().__init__(dim, num_features, **kwargs)  # type: ignore[arg-type]
        self.unbiased = self.sampled_lengths = norms == "chi"

    def draw(self, generator: torch.Generator) -> torch.Tensor:
        """(num_features, dim) in fp64; rows of a block are orthogonal to rounding."""
        rows = block_orthogonal(self.num_features, self.dim, generator)
        if self.norms == "sqrt_dim":
            return rows * self.dim**0.5
        return rows * gaussian_lengths(self.num_features, self.dim, generator)[:, None]
