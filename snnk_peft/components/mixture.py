"""A query as a mixture of centres: φ(q) = softmax(Wq + b), ψ(k) = exp(W'k + b'), each with its own rows.

Attention to a key is then Σ_r φ_r(q) ψ_r(k): a query is described by its similarity to each of m centroids c_r, and
their weights, exp(c_r·k) up to a balancing factor, are kept as sums over the keys. No kernel is estimated: rows are
computed from the queries and keys of a layer (`centroids`, fitted by `calibrate`) or learned (`free`, with a bias). As
a map of a single vector it is softmax features.

Cost: the projection and one exponential per row. There is no −‖x‖²/2: keys of different length are distinguished by b'.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from snnk_peft.components import COMPONENTS
from snnk_peft.components.base import Component, Features
from snnk_peft.components.base_exponential import rows_and_bias
from snnk_peft.functional.log_linear import LogLinear
from snnk_peft.functional.precision import full_precision, wide
from snnk_peft.projections.base import Projection


@COMPONENTS.register("mixture")
class Mixture(Component):
    """Softmax over the rows for queries, exponentials for keys. Unequal weights of the rows are ignored."""

    formula = "φ softmax(Wq + b), ψ exp(W'k + b')"
    kernel_formula = "none; rows come from the layer's queries and keys"
    source = "this package (conversion of attention)"
    cost = "one exponential per row"

    positive = True

    @classmethod
    def fits(cls, projection: Projection | type[Projection]) -> bool:
        """Accept rows from any distribution."""
        return projection.distribution in ("gaussian", "none")

    def tower(
        self, x: torch.Tensor, projection: Projection, statistics: Mapping[str, torch.Tensor], second: bool
    ) -> Features:
        """Compute a softmax for phi, exponentials for psi; arguments as in `Component.tower`."""
        with full_precision(x):
            z = projection(wide(x))
            if not second:
                return Features(z.softmax(-1).to(x.dtype))
            top = z.detach().amax(-1, keepdim=True)
            return Features((z - top).exp().to(x.dtype), top)

    def log_linear(
        self, projection: Projection, statistics: Mapping[str, torch.Tensor], second: bool, like: torch.Tensor
    ) -> LogLinear:
        return LogLinear(*rows_and_bias(projection, like), 0.0, divided=not second)
