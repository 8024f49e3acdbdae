"""A feature map that is not built yet, as plain data: what configs, plans of bundles and calls say about one.

All of them are checked here, in one dialect, and built here.
"""

from __future__ import annotations

import dataclasses
import difflib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from snnk_peft.components import COMPONENTS
from snnk_peft.errors import ConfigError
from snnk_peft.feature_map.base import FeatureMap, distribution_fault
from snnk_peft.projections import PROJECTIONS
from snnk_peft.registry import Registry, did_you_mean

# Fields whose name in files is another one, from the first version on.
STORED_NAMES = {"site": "slot"}
# What a projection is given beside its own parameters.
SHARED_ARGUMENTS = ("dim", "num_features", "seed", "site", "save")


@dataclass(frozen=True)
class FeatureMapSpec:
    """Everything that decides a feature map but the pretrained layer that it may take rows from.

    Args:
        component: the function f, a name of `COMPONENTS`.
        projection: the matrix W, a name of `PROJECTIONS`.
        num_features: rows of W, >= 1.
        component_params: keyword arguments of the component.
        projection_params: keyword arguments of the projection.
        dim: length of the input vectors, >= 1; None while it is not known.
        seed: decides the draw together with `site`, >= 0.
        site: name of the place in the model that the map serves.
        save: whether W is saved with a checkpoint; see `Drawn`.

    Example:
        >>> spec = FeatureMapSpec("relu", "orf", 0, projection_params={"norm": "chi"})
        >>> for fault in spec.faults("adapter"):
        ...     print(fault)
        adapter: projection 'orf' parameter 'norm' is unknown; valid: norms, redraw_every. Did you mean 'norms'?
        adapter.num_features is 0; expected an integer >= 1
    """

    component: str
    projection: str
    num_features: int
    component_params: Mapping[str, Any] = field(default_factory=dict)
    projection_params: Mapping[str, Any] = field(default_factory=dict)
    dim: int | None = None
    seed: int = 0
    site: str = ""
    save: bool = True

    def faults(self, where: str = "") -> list[str]:
        """Messages about everything that is wrong, as far as it shows before the map is built.

        Args:
            where: path of this spec in the config or file; each message starts with it.
        """
        return self._member_faults(where) + self._value_faults(where)

    def _member_faults(self, where: str) -> list[str]:
        """About the two names and their parameters."""
        path, text = (f"{where}.", f"{where}: ") if where else ("", "")
        found = []
        members: tuple[tuple[str, Registry[Any], Any, Any], ...] = (
            ("component", COMPONENTS, self.component, self.component_params),
            ("projection", PROJECTIONS, self.projection, self.projection_params),
        )
        for kind, registry, name, params in members:
            if (unknown := registry.fault(name)) is not None:
                found.append(f"{where}.{kind}: {unknown}" if where else unknown)
            if not isinstance(params, Mapping):
                found.append(f"{path}{kind}_params is {repr(params)[:100]}; expected a dict of arguments")
            elif unknown is None:
                taken = (*SHARED_ARGUMENTS, *registry[name].layer_arguments) if registry is PROJECTIONS else ()
                found += [text + f for f in parameter_faults(f"{kind} {name!r}", registry[name], params, taken)]
        if self.component in COMPONENTS and self.projection in PROJECTIONS:
            found += [text + f for f in pair_faults(self.component, self.projection)]
        return found

    def _value_faults(self, where: str) -> list[str]:
        """About everything else; where there is a path, it leads into a config or file."""
        names = {name: f"{where}.{STORED_NAMES.get(name, name)}" if where else name for name in vars(self)}
        wanted: dict[str, tuple[str, Callable[[Any], bool]]] = {
            "num_features": ("an integer >= 1", lambda value: type(value) is int and value >= 1),
            "dim": ("an integer >= 1", lambda value: value is None or (type(value) is int and value >= 1)),
            "seed": ("an integer >= 0", lambda value: type(value) is int and value >= 0),
            "site": ("the name of a place", lambda value: isinstance(value, str)),
            "save": ("True or False", lambda value: isinstance(value, bool)),
        }
        return [
            f"{names[name]} is {repr(getattr(self, name))[:100]}; expected {what}"
            for name, (what, fits) in wanted.items()
            if not fits(getattr(self, name))
        ]

    @property
    def needs_layer(self) -> bool:
        """Whether the rows are taken from a pretrained layer; False for an unknown projection."""
        return self.projection in PROJECTIONS and PROJECTIONS[self.projection].needs_layer

    @property
    def redrawable(self) -> bool:
        """Whether W follows from the seed, so that `save=False` is possible; True for an unknown projection."""
        return self.projection not in PROJECTIONS or PROJECTIONS[self.projection].redrawable

    def build(
        self, source: nn.Linear | None = None, *, importance: torch.Tensor | None = None, **tensors: Any
    ) -> FeatureMap:
        """The feature map.

        Args:
            source: the pretrained layer that the features stand in for. None where there is none, and for a map whose
                tensors come from a checkpoint.
            importance: (rows of the layer,) how much each of them matters; None where nothing is known.
            **tensors: in the place of `source`: the `layer_arguments` of the projection themselves.

        Raises:
            ConfigError: everything that is wrong, with the component and the projection as well.
        """
        faults = self._member_faults("")
        if not faults:
            faults = self._value_faults("")
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
        """The spec as it is stored in files; `from_dict` reads it."""
        values = (getattr(self, known.name) for known in dataclasses.fields(self))
        plain = (dict(value) if isinstance(value, Mapping) else value for value in values)
        return dict(zip(self.stored_names(), plain, strict=True))

    @classmethod
    def stored_names(cls) -> list[str]:
        """What the fields are called in files."""
        return [STORED_NAMES.get(known.name, known.name) for known in dataclasses.fields(cls)]

    @classmethod
    def from_dict(cls, given: Mapping[str, Any]) -> FeatureMapSpec:
        """A spec from its stored form.

        Args:
            given: what `as_dict` gave, in this version or any before; fields with a default may be left out.

        Raises:
            ConfigError: fields that do not exist, or are missing. Values are checked by `faults`.
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
        """The spec of a map that exists; what the map has learned is not part of it.

        Args:
            feature_map: its component and projection are registered.

        Raises:
            ConfigError: the component has a function among its parameters, which is no plain data.
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
    """What `make` makes; what is wrong with its arguments is added to `faults`."""
    try:
        return make(*args, **kwargs)
    except ConfigError as error:
        faults += error.faults
        return None


def registered_name(registry: Registry[Any], member: nn.Module) -> str:
    """The name under which the class of `member` is registered."""
    return next(name for name in registry.names() if registry[name] is type(member))


def pair_faults(component: str, projection: str) -> list[str]:
    """Messages for two names whose distributions differ."""
    cls, matrix = COMPONENTS[component], PROJECTIONS[projection]
    return [] if cls.fits(matrix) else [distribution_fault(cls, matrix)]


def parameter_faults(kind: str, cls: type, given: Mapping[str, Any], reserved: tuple[str, ...] = ()) -> list[str]:
    """Messages for keyword arguments that `cls` does not take."""
    names = set()
    for base in cls.__mro__:
        if "__init__" in vars(base) and base is not nn.Module and base is not object:
            names |= set(inspect.signature(vars(base)["__init__"]).parameters)
    valid = sorted(names - {"self", "kwargs", *reserved})
    found = []
    for name in given:
        if name not in valid:
            close = difflib.get_close_matches(str(name), valid, n=1, cutoff=0.5)
            hint = f". Did you mean {close[0]!r}?" if close else ""
            found.append(f"{kind} parameter {name!r} is unknown; valid: {', '.join(valid) or 'none'}{hint}")
    return found
