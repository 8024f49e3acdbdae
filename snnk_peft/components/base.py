"""What every component function f is: it turns projections ω_i·x into features whose inner product is a kernel.

E[phi(x)·psi(y)] = kernel(x, y), the expectation over the rows of W. The true features are `values * exp(log_scale)`;
elementwise components need no scale and leave it None.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import nn

from snnk_peft.projections.base import Projection


class Features(NamedTuple):
    """Features of a batch of vectors.

    Attributes:
        values: (..., feature_dim).
        log_scale: broadcastable to `values`, or None for 0. The features are values * exp(log_scale).
    """

    values: torch.Tensor
    log_scale: torch.Tensor | None = None

    def dense(self) -> torch.Tensor:
        """The features as one tensor (..., feature_dim)."""
        return self.values if self.log_scale is None else self.values * self.log_scale.exp()


class Component(nn.Module):
    """Base class of the component functions.

    Attributes:
        distribution: what the rows of W must be drawn from for `kernel` to hold.
        params: the member's own keyword arguments, from which it can be built again.
    """

    distribution = "gaussian"
    params: Mapping[str, Any] = MappingProxyType({})

    def feature_dim(self, num_features: int) -> int:
        """Length of the features for `num_features` rows of W."""
        return num_features

    def function(self, z: torch.Tensor) -> torch.Tensor:
        """The elementwise f on z = ω·x, any shape."""
        raise TypeError(f"{type(self).__name__} is not an elementwise component")

    def offsets(self, num_features: int, device: torch.device | str = "cpu") -> torch.Tensor | None:
        """Fixed numbers c_i that the component wants added to the projections ω_i·x, (num_features,), or None."""
        return None

    def activate(self, z: torch.Tensor) -> torch.Tensor:
        """Features of an elementwise component from projections z = x Wᵀ: (..., num_features) -> (..., feature_dim)."""
        offsets = self.offsets(z.shape[-1], z.device)
        return self.function(z if offsets is None else z + offsets.to(z.dtype)) * z.shape[-1] ** -0.5

    def phi(self, x: torch.Tensor, projection: Projection) -> Features:
        """Features of data (queries, layer inputs): x (..., dim) -> (..., feature_dim)."""
        return Features(self.activate(projection(x)))

    def psi(self, y: torch.Tensor, projection: Projection) -> Features:
        """Features of the other tower (keys, weights); the same as `phi` unless a component says otherwise."""
        return self.phi(y, projection)

    def kernel(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """The exact E[phi(x)·psi(y)]: x, y (..., dim) broadcast over leading dimensions, result (...)."""
        raise TypeError(f"{type(self).__name__} has no exact kernel")
