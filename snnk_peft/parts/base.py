"""Base class of parts: their options, their plans, and the context in which a plan is made.

`faults` finds all errors in a part's options, independently of the model; `plan` finds everything that does not fit a
given model, and changes nothing.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn

from snnk_peft.errors import ConfigError, UnsupportedError
from snnk_peft.families import family_of
from snnk_peft.families.base import ModelFamily, as_linear, module_at, plain_modules
from snnk_peft.feature_map import FeatureMap, FeatureMapSpec
from snnk_peft.functional.at_hand import at_hand, offloaded, wide_on_cpu
from snnk_peft.layers.feature_stage import FeatureStage
from snnk_peft.layers.slots import Slot
from snnk_peft.options import option, option_faults
from snnk_peft.projections import PROJECTIONS
from snnk_peft.projections.base_drawn import site_generator
from snnk_peft.registry import NamedOptions


@dataclass
class Part(NamedOptions):
    """A kind of change to a model: options, and a plan.

    Attributes:
        holds_head: whether it replaces a module inside the task head, which can then not be saved in full.
        size_fields: options that may give its size, of which the first that is not None counts; all options if empty.
        disables_exactly: whether `disable_adapter` gives the original's output back bit by bit.
        calls_only: whether it only calls the model's Linears without reading their weights, so that these may be
            quantized.
    """

    holds_head: ClassVar[bool] = False
    size_fields: ClassVar[tuple[str, ...]] = ()
    disables_exactly: ClassVar[bool] = True
    calls_only: ClassVar[bool] = False

    def faults(self, part: str) -> list[str]:
        """List all faults of this part, each message starting with the field's path."""
        return option_faults(f"{part}.", self)

    def plan(self, context: PatchContext) -> list[Patch]:
        """Return the changes that this part asks for, without changing anything.

        Raises:
            ConfigError: sizes or layers that do not fit the model; lists all of them.
            UnsupportedError: the model has no such module.
        """
        raise TypeError(f"{type(self).__name__} does not define plan()")

    def check_model(self, model: nn.Module) -> None:
        """Raise UnsupportedError if the model, of a known family or not, does not support the part."""

    def undrawn(self) -> Part:
        """Return a part of the same sizes whose initial values need neither pretrained weights nor a second draw."""
        return self

    def not_drawn(self) -> str | None:
        """Return the reason why matrices cannot be redrawn from a seed ("projection is 'landmark'"), or None."""
        return None

    @classmethod
    def candidates(cls, model: nn.Module, length: int) -> list[Part]:
        """Return the parts that `plan` tries if the caller names none, one for each size.

        Args:
            model: a transformers model of a known family.
            length: tokens of a sequence.

        Raises:
            UnsupportedError: the model has no such module.
        """
        return []

    @classmethod
    def probes(cls) -> dict[str, Part]:
        """Return the parts that `check_family` tries, by the names in its report."""
        return {}

    def size_in_words(self) -> str:
        """Describe the size of the part, or else all its options."""
        known = (getattr(self, name) for name in self.size_fields)
        return str(next((value for value in known if value is not None), dataclasses.asdict(self)))

    @classmethod
    def taken_out(cls, model: nn.Module) -> None:
        """Undo the effect of `Slot.placed` on the model as a whole, once all slots of all parts are removed."""


@dataclass
class FeaturePart(Part):
    """A part that consists of feature maps; `FeatureMapSpec` checks their options.

    Attributes:
        attends: whether its feature maps are for queries and keys.
    """

    attends: ClassVar[bool] = False
    size_fields: ClassVar[tuple[str, ...]] = ("num_features",)

    component: str = option("relu", "the function f in the features f(Wx), a name in `COMPONENTS`.", checked=False)
    projection: str = option("orf", "the matrix W, a name in `PROJECTIONS`.", checked=False)
    num_features: int = option(
        16, "rows of W, >= 1. Cost and trainable parameters grow linearly with it.", checked=False
    )
    layers: str | list[int] = option(
        "all",
        'which Transformer layers: "all", "top-K" (the last K), "bottom-K", or a list of indices from 0.',
        checked=False,
    )
    component_params: dict[str, Any] = option(dict, "keyword arguments of the component.", checked=False)
    projection_params: dict[str, Any] = option(dict, "keyword arguments of the projection.", checked=False)

    def faults(self, part: str) -> list[str]:
        faults = super().faults(part) + self.feature_map_spec().faults(part)
        if self.of_attention and not self.attends:
            faults.append(
                f"{part}.projection is {self.projection!r}, whose rows are made from the queries and keys of an "
                "attention; expected it in an attention part only. Use 'free' for rows that are learned"
            )
        return faults + layers_faults(f"{part}.layers", self.layers)

    def feature_map_spec(self, **known: Any) -> FeatureMapSpec:
        """Return the specification of this part's feature map, as far as the config determines it.

        Args:
            **known: further fields of `FeatureMapSpec`: dim, seed, site, save.
        """
        chosen = (self.component, self.projection, self.num_features, self.component_params, self.projection_params)
        return FeatureMapSpec(*chosen, **known)

    @property
    def needs_layer(self) -> bool:
        """Return whether rows are taken from a pretrained layer."""
        return self.feature_map_spec().needs_layer

    @property
    def of_attention(self) -> bool:
        """Return whether rows are computed from queries and keys."""
        return self.projection in PROJECTIONS and PROJECTIONS[self.projection].of_attention

    def not_drawn(self) -> str | None:
        return None if self.feature_map_spec().redrawable else f"projection is {self.projection!r}"


@dataclass(frozen=True)
class Patch:
    """One planned change.

    Args:
        path: the module to change.
        build: creates the slot, once all plans have proved possible; None changes nothing.
        train: whether the module itself is trained as well (and saved in full).
        replaces: whether the slot replaces the module; no other part may then replace it.
        around_head: whether the module is a task head, which is trained inside the slot around it.
    """

    path: str
    build: Callable[[], Slot] | None
    train: bool = False
    replaces: bool = False
    around_head: bool = False


@dataclass(frozen=True)
class PatchContext:
    """The model being patched and the options that all parts share.

    Args:
        model: a transformers model, or any module if the part needs no family.
        seed: seed of all random draws.
        save_projection: whether matrices W are saved.
        where: name of the planned part for messages.
        filled: whether a checkpoint provides all values, so that initial values need not be computed.
    """

    model: nn.Module
    seed: int
    save_projection: bool
    where: str = "part"
    filled: bool = False

    @property
    def family(self) -> ModelFamily:
        """The model's family, with its module paths; UnsupportedError if it is unknown."""
        return family_of(self.model)

    def modules(self, kind: type[nn.Module], pattern: str = "*") -> dict[str, nn.Module]:
        """Return the modules of a class, anywhere in the model, whose path matches a pattern ("*" for any).

        Args:
            kind: their class; nn.Linear includes transformers' Conv1D.
            pattern: see `matches`.

        Raises:
            UnsupportedError: no module matches.
        """
        whole = {path: as_linear(m) if kind is nn.Linear else m for path, m in plain_modules(self.model)}
        matching = {path: m for path, m in whole.items() if isinstance(m, kind) and matches(path, pattern)}
        if not matching:
            some = ", ".join(repr(path) for path, m in whole.items() if isinstance(m, kind)) or "none at all"
            raise UnsupportedError(
                f"no {kind.__name__} of {type(self.model).__name__} has a path that matches {pattern!r}; it has {some}"
            )
        return matching

    def linear(self, path: str, what: str, called: bool = False) -> nn.Linear:
        """Return the nn.Linear at `path`; UnsupportedError if it is not one, or quantized and not just `called`."""
        module = module_at(self.model, path, what)
        whole = [tensor for tensor in (*module.parameters(), *module.buffers()) if not tensor.is_floating_point()]
        if whole and not called:
            raise UnsupportedError(
                f"{what}: the {type(module).__name__} at {path!r} holds {str(whole[0].dtype).removeprefix('torch.')} "
                "numbers, so the model is quantized; expected an nn.Linear in floating point. Load it without "
                "quantization_config, patch it, and quantize its bundle"
            )
        return module_at(self.model, path, what, nn.Linear)  # type: ignore[return-value]

    def require_plain_ffn(self, what: str) -> None:
        """Raise UnsupportedError unless the family's FFN is one expansion and an activation module.

        Args:
            what: the part that requires it, and an alternative.
        """
        fault = None
        if self.family.gated:
            fault = "is gated, two expansions multiplied"
        elif self.family.activation is None:
            fault = "calls its activation as a function, which no module can take the place of"
        if fault is not None:
            raise UnsupportedError(
                f"{what}: the FFN of {type(self.model).__name__} (family {self.family.name!r}) {fault}; expected one "
                "expansion and an activation"
            )

    def generator(self, site: str) -> torch.Generator:
        return site_generator(self.seed, site + ".readout")

    def stage(
        self,
        part: FeaturePart,
        dim: int,
        site: str,
        source: nn.Linear | None = None,
        importance: Any = None,
        **options: Any,
    ) -> FeatureStage:
        """Build the feature stage of `part` for inputs of length `dim`.

        Args:
            part: defines component, projection, number of features and their parameters.
            dim: length of the inputs.
            site: name of the place; determines the draw together with the seed.
            source: the pretrained layer that the features replace, if there is one.
            importance: weight of each row of that layer, (rows,).
            **options: passed to `FeatureStage`.
        """
        spec = part.feature_map_spec(dim=dim, seed=self.seed, site=site, save=self.save_projection)
        if spec.needs_layer and source is None:
            raise ConfigError(f"{site}: projection {part.projection!r} needs a pretrained layer to take rows from")
        return FeatureStage(spec.build(source, importance=importance), **options)

    def feature_maps(self, part: FeaturePart, dim: int, sites: list[str]) -> list[FeatureMap]:
        return [self.stage(part, dim, site).feature_map for site in sites]

    def input_statistics(self, path: str, what: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Return mean and standard deviation of a LayerNorm's outputs, from its bias and weight alone; fp32, CPU."""
        norm = module_at(self.model, path, what, nn.LayerNorm)
        with at_hand(norm):
            weight, bias = wide_on_cpu(norm.weight), wide_on_cpu(norm.bias)  # type: ignore[arg-type]
        # A norm may zero a coordinate; a floor keeps its reciprocal finite.
        return bias, weight.abs().clamp_min(1e-3 * weight.abs().max().clamp_min(1e-6))


def refuse_offloaded(what: str, modules: Iterable[nn.Module]) -> None:
    """Raise ConfigError if modules to be fitted are offloaded, since a fit would not be stored there."""
    if any(offloaded(module) for module in modules):
        raise ConfigError(
            f"{what} are offloaded to memory or disk, where a fit would not last; expected them beside the model. "
            "Calibrate before dispatching the model"
        )


def shares_of(whole: int, shares: Sequence[float]) -> list[int]:
    """Return sizes that are these shares of a whole, at least 1 and less than the whole."""
    return sorted({max(1, round(whole * share)) for share in shares} - {whole}) if whole else []


def matches(path: str, pattern: str) -> bool:
    """Match a module path against a file-name pattern; a leading "*." also matches the empty string, like git's "**/".

    So "*.layers.0.*" means layer 0 in a task model ("model.layers.0.mlp") and in its bare encoder ("layers.0.mlp").
    """
    return fnmatch.fnmatchcase(path, pattern) or (pattern.startswith("*.") and fnmatch.fnmatchcase(path, pattern[2:]))


def layers_faults(where: str, layers: object) -> list[str]:
    """List the faults of `layers` unless it is "all", "top-K", "bottom-K" or a list of indices."""
    if isinstance(layers, str) and (layers == "all" or re.fullmatch(r"(top|bottom)-[1-9]\d*", layers)):
        return []
    if isinstance(layers, (list, tuple)) and layers and all(type(i) is int and i >= 0 for i in layers):
        return []
    near = re.fullmatch(r"(top|bottom)\W*([1-9]\d*)", layers.lower()) if isinstance(layers, str) else None
    hint = f". Did you mean '{near[1]}-{near[2]}'?" if near else ""
    return [f"{where} is {layers!r}; expected 'all', 'top-K', 'bottom-K' (K >= 1) or a list of indices from 0{hint}"]


def resolve_layers(where: str, layers: str | list[int], total: int) -> tuple[list[int], list[str]]:
    """Return layer indices for a model of `total` layers, and messages for those it does not have."""
    if layers == "all":
        return list(range(total)), []
    if isinstance(layers, str):
        end, count = layers.split("-")
        if int(count) > total:
            return [], [f"{where} is {layers!r}; the model has {total} layers"]
        return list(range(total))[-int(count) :] if end == "top" else list(range(int(count))), []
    outside = [i for i in layers if i >= total]
    return sorted(set(layers) - set(outside)), (
        [f"{where} has {outside}; the model has {total} layers, indices 0 to {total - 1}"] if outside else []
    )
