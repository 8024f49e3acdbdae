"""Component functions f, which turn projections ω_i·x into features whose inner product is a kernel.

E[phi(x)·psi(y)] = kernel(x, y), the expectation over the rows of W. The true features are `values * exp(log_scale)`;
elementwise components need no scale and leave it None.

Some components adapt to the data. They compute `statistics` of the two sets of vectors, per example (and head), which
are passed to both towers. Without statistics (a layer has no second set of vectors), the component's buffers are used.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import nn

from snnk_peft.errors import ConfigError
from snnk_peft.functional.log_linear import LogLinear
from snnk_peft.functional.precision import full_precision, wide
from snnk_peft.options import argument_faults, documented
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
        """Return the features as one tensor (..., feature_dim), in the dtype of the values."""
        return self.values if self.log_scale is None else (self.values * self.log_scale.exp()).to(self.values.dtype)


class Component(nn.Module):
    """Base class of the component functions.

    A subclass declares its arguments as options, `Annotated[int, Option("help", low=1)]`, and passes them to this
    constructor, which checks and stores them.

    Args:
        **params: the member's own keyword arguments.

    Raises:
        ConfigError: all faults of the arguments.

    Attributes:
        distribution: distribution of the rows of W for which `kernel` holds; see `fits`.
        positive: whether features (of uniformly weighted rows) are non-negative, so that attention weights are, too.
        adapts: whether `statistics` are used.
        exact: whether inner products of features equal the kernel for any W, instead of estimating it.
        tilted: whether features have a factor e^{a‖ω‖²}; see `Exponential.tilt`.
        formula: φ(x) in a line, for tables.
        kernel_formula: the kernel in a line.
        source: paper and equation.
        periodic: whether features are cosines and sines, whose argument half precision would shift by a good part of a
            period: it is then computed in at least fp32, also under autocast.
        cost: cost of the features in addition to the projection.
        in_kernels: the name of f in kernels for a device (functional/device_kernels/triton_adapter), or "".
        params: the subclass's keyword arguments, from which the component can be rebuilt.
    """

    formula = kernel_formula = source = cost = in_kernels = ""
    distribution = "gaussian"
    positive = False
    adapts = exact = tilted = periodic = False
    params: Mapping[str, Any] = MappingProxyType({})

    def __init__(self, **params: Any):
        super().__init__()
        if faults := argument_faults(type(self).__name__.lower(), type(self), params, kind="component"):
            raise ConfigError(faults)
        self.params = params

    def __init_subclass__(cls, **kwargs: Any):
        # A subclass with its own tower does not inherit the logarithms.
        super().__init_subclass__(**kwargs)
        if "tower" in vars(cls) and "log_linear" not in vars(cls):
            cls.log_linear = Component.log_linear  # type: ignore[method-assign]
        # Nor does one with its own function inherit the derivative.
        if "function" in vars(cls) and "gradient" not in vars(cls):
            cls.gradient = Component.gradient  # type: ignore[method-assign]
        if "function" in vars(cls) and "in_kernels" not in vars(cls):
            cls.in_kernels = ""
        documented(cls)

    def feature_dim(self, num_features: int, dim: int) -> int:
        """Return the length of the features for `num_features` rows of W of length `dim`."""
        return num_features

    def fewest_rows(self) -> int:
        """Return the smallest num_features that this component supports."""
        return 1

    def prepare(self, projection: Projection) -> None:
        """Draw any other random parameters, when a FeatureMap pairs this component with its matrix.

        Raises:
            ConfigError: the component does not support this matrix.
        """

    @classmethod
    def elementwise(cls) -> bool:
        """Return whether each feature is a function of one projection, as closed forms for layers (Nyström) require."""
        return cls.function is not Component.function

    @classmethod
    def has_kernel(cls) -> bool:
        """Return whether the features estimate a known kernel; otherwise they are just a map, usually a learned one."""
        return cls.kernel is not Component.kernel or cls.kernel_over is not Component.kernel_over

    @classmethod
    def fits(cls, projection: Projection | type[Projection]) -> bool:
        """Return whether the rows of a matrix have the distribution that the features need.

        Random features need their distribution. Elementwise features also make sense for rows that are not a sample
        ("none"), but then estimate no kernel.
        """
        return projection.distribution == cls.distribution or (projection.distribution == "none" and cls.elementwise())

    def function(self, z: torch.Tensor) -> torch.Tensor:
        """Apply the elementwise f to z = ω·x of any shape."""
        raise TypeError(f"{type(self).__name__} is not an elementwise component")

    def gradient(self, z: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
        """Return grad · f′(z) if the derivative of `function` is implemented, which makes training adapters cheaper."""
        raise TypeError(f"{type(self).__name__} does not define gradient()")

    def offsets(self, num_features: int, device: torch.device | str = "cpu") -> torch.Tensor | None:
        """Return the fixed offsets c_i added to the projections ω_i·x, (num_features,), or None."""
        return None

    def activate(self, z: torch.Tensor, amplitudes: torch.Tensor | float | None = None) -> torch.Tensor:
        """Compute the features of an elementwise component from z = x Wᵀ: (..., num_features) -> (..., feature_dim).

        `amplitudes` are those of `Projection.amplitudes`; None for num_features^-½.
        """
        offsets = self.offsets(z.shape[-1], z.device)
        values = self.function(z if offsets is None else z + offsets.to(z.dtype))
        return scaled(values, z.shape[-1] ** -0.5 if amplitudes is None else amplitudes)

    def tower(
        self, x: torch.Tensor, projection: Projection, statistics: Mapping[str, torch.Tensor], second: bool
    ) -> Features:
        """Compute the features of one tower, x (..., dim) -> (..., feature_dim); overridden if not elementwise.

        With `statistics` (empty for the stored ones) x is (..., length, dim). `second` is psi, which carries the signs
        of the feature weights.
        """
        amplitudes = projection.amplitudes(signed=second)
        if not self.periodic:
            return Features(self.activate(projection(x), amplitudes))
        with full_precision(x):
            return Features(self.activate(projection(wide(x)), amplitudes).to(x.dtype))

    def log_linear(
        self, projection: Projection, statistics: Mapping[str, torch.Tensor], second: bool, like: torch.Tensor
    ) -> LogLinear | None:
        """Return the logarithms of one tower's features if they are exponentials, otherwise None.

        Attention uses them instead of `tower`, with which they must agree. `like` has the device and the dtype of the
        result, at least fp32.
        """
        return None

    def phi(
        self, x: torch.Tensor, projection: Projection, statistics: Mapping[str, torch.Tensor] | None = None
    ) -> Features:
        """Compute features of data (queries, layer inputs): x (..., dim) -> (..., feature_dim)."""
        return self.tower(x, projection, statistics or {}, second=False)

    def psi(
        self, y: torch.Tensor, projection: Projection, statistics: Mapping[str, torch.Tensor] | None = None
    ) -> Features:
        """Compute features of the other tower (keys, weights): y (..., dim) -> (..., feature_dim)."""
        return self.tower(y, projection, statistics or {}, second=True)

    def statistics(
        self, x: torch.Tensor, y: torch.Tensor, x_mask: torch.Tensor | None = None, y_mask: torch.Tensor | None = None
    ) -> dict[str, torch.Tensor]:
        """Compute what both towers share, from x (..., n, dim) and y (..., l, dim) where the masks (..., n), (..., l)
        are True.

        Empty unless the component adapts to the data.
        """
        return {}

    def kernel(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Compute the exact E[phi(x)·psi(y)]: x, y (..., dim) broadcast over leading dimensions, result (...)."""
        if self.has_kernel():
            raise TypeError(
                f"the kernel of {type(self).__name__} depends on the matrix; ask a FeatureMap for it, or `kernel_over`"
            )
        raise TypeError(f"{type(self).__name__} has no exact kernel")

    def kernel_over(self, x: torch.Tensor, y: torch.Tensor, projection: Projection) -> torch.Tensor:
        """Compute `kernel` for a matrix; a subclass whose kernel depends on the matrix defines this one instead."""
        return self.kernel(x, y)


def scaled(values: torch.Tensor, amplitudes: torch.Tensor | float) -> torch.Tensor:
    """Multiply values (..., m) by amplitudes, in the dtype of values."""
    return values * (amplitudes.to(values.dtype) if isinstance(amplitudes, torch.Tensor) else amplitudes)
