"""FeatureMap = component ∘ projection: Φ(x) = f(Wx), the Φ of "a layer is Φ(x)·A".

Shapes: x (..., dim) -> Features of (..., feature_dim). Cost: that of the projection, num_features · dim when dense.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from snnk_peft.components.base import Component, Features
from snnk_peft.errors import ConfigError
from snnk_peft.projections import PROJECTIONS
from snnk_peft.projections.base import Projection, check_finite


class FeatureMap(nn.Module):
    """A component over a projection.

    Args:
        component: the function f.
        projection: the matrix W. The component must fit it, see `Component.fits`.

    Raises:
        ConfigError: the pair does not fit; the message names the valid partners.
    """

    def __init__(self, component: Component, projection: Projection):
        super().__init__()
        if not component.fits(projection):
            raise ConfigError(distribution_fault(type(component), type(projection)))
        component.prepare(projection)
        self.component = component
        self.projection = projection

    @property
    def dim(self) -> int:
        return self.projection.dim

    @property
    def num_features(self) -> int:
        return self.projection.num_features

    @property
    def feature_dim(self) -> int:
        return self.component.feature_dim(self.num_features, self.dim)

    def phi(self, x: torch.Tensor, statistics: Mapping[str, torch.Tensor] | None = None) -> Features:
        """Features of data, x (..., dim)."""
        check_finite("phi", x, self.projection)
        return self.component.phi(x, self.projection, statistics)

    def psi(self, y: torch.Tensor, statistics: Mapping[str, torch.Tensor] | None = None) -> Features:
        """Features of the other tower (keys, weights), y (..., dim)."""
        check_finite("psi", y, self.projection)
        return self.component.psi(y, self.projection, statistics)

    def kernel(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """The exact kernel E[phi(x)·psi(y)]; x and y broadcast, result (...)."""
        return self.component.kernel_over(x, y, self.projection)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """phi(x) as a plain tensor (..., feature_dim)."""
        return self.phi(x).dense()


def distribution_fault(component: type[Component], projection: type[Projection]) -> str:
    """The message for a pair whose distributions differ; it names the valid partners."""
    partners = [name for name in PROJECTIONS if component.fits(PROJECTIONS[name])]
    drawn = "'s rows are no sample" if projection.distribution == "none" else f" draws {projection.distribution!r}"
    return (
        f"component {component.__name__} needs rows drawn from {component.distribution!r}, but projection "
        f"{projection.__name__}{drawn}; valid projections: {', '.join(partners)}"
    )


def advance(model: nn.Module) -> None:
    """Tell every matrix W in `model` that a training step has passed; call it once after each step of the optimizer.

    Matrices made with `redraw_every` redraw when it is time; all others, and all in eval, stay as they are.
    """
    for module in model.modules():
        if isinstance(module, Projection):
            module.advance()
