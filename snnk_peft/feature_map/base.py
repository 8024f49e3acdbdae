"""FeatureMap = component ∘ projection: Φ(x) = f(Wx), the Φ in "a layer is Φ(x)·A", and its specification.

Shapes: x (..., dim) -> Features of (..., feature_dim). Cost: that of the projection, num_features · dim when dense.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass
from typing import Any

import torch
from torch import nn

from snnk_peft.components import COMPONENTS
from snnk_peft.components.base import Component, Features
from snnk_peft.errors import ConfigError
from snnk_peft.options import MOST, MOST_SEED, argument_faults, documented, option, options_of, value_faults
from snnk_peft.projections import PROJECTIONS
from snnk_peft.projections.base import Projection, check_finite
from snnk_peft.registry import Registry, did_you_mean


class FeatureMap(nn.Module):
    """A component over a projection.

    Args:
        component: the function f.
        projection: the matrix W. The component must be compatible with it, see `Component.fits`.

    Raises:
        ConfigError: the pair is incompatible; the message names the valid partners.
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
        """Compute features of data, x (..., dim)."""
        check_finite("phi", x, self.projection)
        return self.component.phi(x, self.projection, statistics)

    def psi(self, y: torch.Tensor, statistics: Mapping[str, torch.Tensor] | None = None) -> Features:
        """Compute features of the other tower (keys, weights), y (..., dim)."""
        check_finite("psi", y, self.projection)
        return self.component.psi(y, self.projection, statistics)

    def kernel(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Compute the exact kernel E[phi(x)·psi(y)]; x and y broadcast, result (...)."""
        return self.component.kernel_over(x, y, self.projection)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute phi(x) as a plain tensor (..., feature_dim)."""
        return self.phi(x).dense()


def distribution_fault(component: type[Component], projection: type[Projection]) -> str:
    """Return the message for a pair whose distributions differ; it names the valid partners."""
    partners = [name for name in PROJECTIONS if component.fits(PROJECTIONS[name])]
    drawn = "'s rows are no sample" if projection.distribution == "none" else f" draws {projection.distribution!r}"
    return (
        f"component {component.__name__} needs rows drawn from {component.distribution!r}, but projection "
        f"{projection.__name__}{drawn}; valid projections: {', '.join(partners)}"
    )


def advance(model: nn.Module) -> None:
    """Notify every matrix W in `model` of a training step; call this once after each optimizer step.

    Matrices with `redraw_every` redraw when it is time; all others, and all in eval mode, stay as they are.
    """
    for module in model.modules():
        if isinstance(module, Projection):
            module.advance()


# Fields with a different name in files since the first version.
STORED_NAMES = {"site": "slot"}
# Arguments of a projection in addition to its own parameters.
SHARED_ARGUMENTS = ("dim", "num_features", "seed", "site", "save")


@documented
@dataclass(frozen=True)
class FeatureMapSpec:
    """Full specification of a feature map, except for the pretrained layer that it may take rows from.

    Example:
        >>> spec = FeatureMapSpec("relu", "orf", 0, projection_params={"norm": "chi"})
        >>> for fault in spec.faults("adapter"):
        ...     print(fault)
        adapter: projection 'orf' parameter 'norm' is unknown; valid: norms, redraw_every. Did you mean 'norms'?
        adapter.num_features is 0; expected an integer >= 1 and <= 268435456
    """

    component: str = option(MISSING, "the function f, a name of `COMPONENTS`.", checked=False)
    projection: str = option(MISSING, "the matrix W, a name of `PROJECTIONS`.", checked=False)
    num_features: int = option(MISSING, "rows of W.", low=1, high=MOST)
    component_params: Mapping[str, Any] = option(dict, "keyword arguments of the component.")
    projection_params: Mapping[str, Any] = option(dict, "keyword arguments of the projection.")
    dim: int | None = option(None, "length of the input vectors; None while it is not known.", low=1, high=MOST)
    seed: int = option(0, "decides the draw together with `site`.", low=0, high=MOST_SEED)
    site: str = option("", "name of the place in the model that the map serves.")
    save: bool = option(True, "whether W is saved with a checkpoint; see `Drawn`.")

    def faults(self, where: str = "") -> list[str]:
        """List all faults that can be found before the map is built; each message starts with `where`."""
        return self._member_faults(where) + self._value_faults(where)

    def _member_faults(self, where: str) -> list[str]:
        text = f"{where}: " if where else ""
        found = []
        members: tuple[tuple[str, Registry[Any], Any, Any], ...] = (
            ("component", COMPONENTS, self.component, self.component_params),
            ("projection", PROJECTIONS, self.projection, self.projection_params),
        )
        for kind, registry, name, params in members:
            if (unknown := registry.fault(name)) is not None:
                found.append(f"{where}.{kind}: {unknown}" if where else unknown)
            if unknown is None and isinstance(params, Mapping):
                taken = (*SHARED_ARGUMENTS, *registry[name].layer_arguments) if registry is PROJECTIONS else ()
                found += [text + f for f in argument_faults(name, registry[name], params, kind, taken)]
        if self.component in COMPONENTS and self.projection in PROJECTIONS:
            found += [text + f for f in pair_faults(self.component, self.projection)]
        return found

    def _value_faults(self, where: str) -> list[str]:
        """List the faults of the values; a `where` that is not empty is a path in a config or file."""
        options, path = options_of(FeatureMapSpec), f"{where}." if where else ""
        named = {name: STORED_NAMES.get(name, name) if where else name for name in options}
        values = {called: getattr(self, name) for name, called in named.items()}
        return value_faults(path, {called: options[name] for name, called in named.items()}, values)

    @property
    def needs_layer(self) -> bool:
        """Return whether the rows come from a pretrained layer; False for an unknown projection."""
        return self.projection in PROJECTIONS and PROJECTIONS[self.projection].needs_layer

    @property
    def redrawable(self) -> bool:
        """Return whether W is determined by the seed, as `save=False` requires; True for an unknown projection."""
        return self.projection not in PROJECTIONS or PROJECTIONS[self.projection].redrawable

    def build(
        self, source: nn.Linear | None = None, *, importance: torch.Tensor | None = None, **tensors: Any
    ) -> FeatureMap:
        """Build the feature map.

        Args:
            source: the pretrained layer that the features replace. None if there is none, and for a map whose tensors
                come from a checkpoint.
            importance: weight of each row of the layer, (rows,); None if unknown.
            **tensors: the `layer_arguments` of the projection, instead of `source`.

        Raises:
            ConfigError: all faults, including those of the component and the projection.
        """
        faults = self.faults()
        if source is None and self.dim is None:
            faults.append("dim is None; expected an integer >= 1, the length of the input vectors")
        if not faults:
            component = _made(faults, COMPONENTS[self.component], **self.component_params)
            matrix = PROJECTIONS[self.projection]
            shared = {"seed": self.seed, "site": self.site, "save": self.save, **self.projection_params, **tensors}
            if source is None:
                projection = _made(faults, matrix, self.dim, self.num_features, **shared)
            else:
                if self.dim not in (None, source.in_features):
                    faults.append(f"dim is {self.dim}; expected {source.in_features}, the inputs of the layer")
                shared["importance"] = importance
                projection = _made(faults, matrix.from_layer, source, self.num_features, **shared)
        if faults:
            raise ConfigError(dict.fromkeys(faults))
        return FeatureMap(component, projection)

    def as_dict(self) -> dict[str, Any]:
        """Return the spec as stored in files; `from_dict` reads it."""
        values = (getattr(self, known.name) for known in dataclasses.fields(self))
        plain = (dict(value) if isinstance(value, Mapping) else value for value in values)
        return dict(zip(self.stored_names(), plain, strict=True))

    @classmethod
    def stored_names(cls) -> list[str]:
        """Return the names of the fields in files."""
        return [STORED_NAMES.get(known.name, known.name) for known in dataclasses.fields(cls)]

    @classmethod
    def from_dict(cls, given: Mapping[str, Any]) -> FeatureMapSpec:
        """Build a spec from the data of `as_dict`, of this or any earlier version; fields with a default are optional.

        Raises:
            ConfigError: unknown or missing fields. Values are checked by `faults`.
        """
        known = dict(zip(cls.stored_names(), dataclasses.fields(cls), strict=True))
        needed = [name for name, f in known.items() if f.default is f.default_factory is dataclasses.MISSING]
        faults = [f"a feature map lacks {name!r}" for name in needed if name not in given]
        faults += [did_you_mean("field of a feature map", name, list(known)) for name in given if name not in known]
        if faults:
            raise ConfigError(faults)
        return cls(**{known[name].name: value for name, value in given.items()})

    @classmethod
    def of(cls, feature_map: FeatureMap) -> FeatureMapSpec:
        """Return the spec of an existing map, without its learned parameters.

        Raises:
            ConfigError: the component has a function among its arguments, which is not plain data.
        """
        component, projection = feature_map.component, feature_map.projection
        if functions := [name for name, value in component.params.items() if callable(value)]:
            raise ConfigError(
                f"{type(component).__name__} was given a function of your own as {', '.join(functions)}, which no file "
                "can hold; use one of the named ones, or register a component (one file, see CONTRIBUTING.md)"
            )
        return cls(
            component=registered_name(COMPONENTS, component),
            projection=registered_name(PROJECTIONS, projection),
            num_features=projection.num_features,
            component_params=dict(component.params),
            projection_params=dict(projection.params),
            dim=projection.dim,
            seed=projection.seed,
            site=projection.site,
            save=projection.save,
        )


def _made(faults: list[str], make: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call `make`, adding the faults of its arguments to `faults`."""
    try:
        return make(*args, **kwargs)
    except ConfigError as error:
        faults += error.faults
        return None


def registered_name(registry: Registry[Any], member: nn.Module) -> str:
    """Return the name under which the class of `member` is registered."""
    return next(name for name in registry.names() if registry[name] is type(member))


def pair_faults(component: str, projection: str) -> list[str]:
    """List the faults of two names whose distributions differ."""
    cls, matrix = COMPONENTS[component], PROJECTIONS[projection]
    return [] if cls.fits(matrix) else [distribution_fault(cls, matrix)]
