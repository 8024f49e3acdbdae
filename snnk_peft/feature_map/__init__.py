"""FeatureMap = component ∘ projection: Φ(x) = f(Wx), the Φ of "a layer is Φ(x)·A".

Shapes: x (..., dim) -> Features of (..., feature_dim). Cost: that of the projection, num_features · dim when dense.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from snnk_peft.components import COMPONENTS
from snnk_peft.components.base import Component, Features
from snnk_peft.errors import ConfigError, NumericalError
from snnk_peft.projections import PROJECTIONS
from snnk_peft.projections.base import Projection

# Looking at every input costs time, and on a GPU waits for it: only with SNNK_DEBUG=1 in the environment.
DEBUG = os.environ.get("SNNK_DEBUG", "") not in ("", "0")


def check_finite(tower: str, x: torch.Tensor, projection: Projection) -> None:
    """Refuse infinities and NaNs, in debug mode.

    Args:
        tower: "phi" or "psi", for the message.
        x: what the features are of.
        projection: whose site the message names.

    Raises:
        NumericalError: some entries are not finite.
    """
    if not DEBUG:
        return
    bad = ~torch.isfinite(x)
    if bool(bad.any()):
        first = tuple(bad.nonzero()[0].tolist())
        raise NumericalError(
            f"input of {tower} at site {projection.site!r}, shape {tuple(x.shape)} {x.dtype}: {int(bad.sum())} entries "
            f"are not finite, the first at {first}; expected finite numbers. Look at what computes this input (a loss "
            "that diverged, fp16 that overflowed, a mask filled with -inf)"
        )


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
        """Length of the input vectors."""
        return self.projection.dim

    @property
    def num_features(self) -> int:
        """Rows of W."""
        return self.projection.num_features

    @property
    def feature_dim(self) -> int:
        """Length of the features."""
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
        return self.component.kernel(x, y)

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


def pair_faults(component: str, projection: str) -> list[str]:
    """Messages for two names whose distributions differ."""
    cls, matrix = COMPONENTS[component], PROJECTIONS[projection]
    return [] if cls.fits(matrix) else [distribution_fault(cls, matrix)]


def advance(model: nn.Module) -> None:
    """Tell every matrix W in `model` that a training step has passed; call it once after each step of the optimizer.

    Matrices made with `redraw_every` draw anew when it is time; all others, and all in eval, stay as they are.

    Args:
        model: anything that contains feature maps.
    """
    for module in model.modules():
        if isinstance(module, Projection):
            module.advance()


def parameter_faults(kind: str, cls: type, given: Mapping[str, Any], reserved: tuple[str, ...] = ()) -> list[str]:
    """Messages for keyword arguments that `cls` does not take."""
    names = set()
    for base in cls.__mro__:
        if "__init__" in vars(base) and base is not nn.Module and base is not object:
            names |= set(inspect.signature(vars(base)["__init__"]).parameters)
    valid = sorted(names - {"self", "kwargs", *reserved})
    return [
        f"{kind} parameter {name!r} is unknown; valid: {', '.join(valid) or 'none'}"
        for name in given
        if name not in valid
    ]


def build_feature_map(
    component: str,
    projection: str,
    dim: int,
    num_features: int,
    *,
    seed: int = 0,
    component_params: Mapping[str, Any] | None = None,
    projection_params: Mapping[str, Any] | None = None,
) -> FeatureMap:
    """One point of the component × projection space.

    Args:
        component: a name of `COMPONENTS`, e.g. "relu".
        projection: a name of `PROJECTIONS`, e.g. "orf".
        dim: length of the input vectors, >= 1.
        num_features: rows of W, >= 1; cost grows linearly, the standard error falls as 1/√num_features.
        seed: decides the draw of W (together with `projection_params["site"]`, if given).
        component_params: keyword arguments of the component, e.g. {"order": 2} for "arccos".
        projection_params: keyword arguments of the projection, e.g. {"norms": "sqrt_dim"} for "orf".

    Raises:
        ConfigError: every fault at once: unknown names (with a suggestion), unknown parameters, bad sizes.

    Example:
        >>> import torch
        >>> feature_map = build_feature_map("relu", "orf", dim=8, num_features=64)
        >>> feature_map.phi(torch.randn(2, 5, 8)).dense().shape
        torch.Size([2, 5, 64])
    """
    faults = [f for f in (COMPONENTS.fault(component), PROJECTIONS.fault(projection)) if f]
    component_params, projection_params = dict(component_params or {}), dict(projection_params or {})
    if component in COMPONENTS:
        faults += parameter_faults(f"component {component!r}", COMPONENTS[component], component_params)
    if projection in PROJECTIONS:
        reserved = ("dim", "num_features", "seed")
        faults += parameter_faults(f"projection {projection!r}", PROJECTIONS[projection], projection_params, reserved)
    if faults:
        raise ConfigError(faults)
    matrix = PROJECTIONS[projection](dim, num_features, seed=seed, **projection_params)
    return FeatureMap(COMPONENTS[component](**component_params), matrix)
