"""Candidates: a model with all of them, none active, and the places for which they compete."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import nn

from snnk_peft.bundling.bundle import folded_model
from snnk_peft.config import SNNKConfig
from snnk_peft.config_parts import part_name
from snnk_peft.errors import ConfigError, UnsupportedError
from snnk_peft.families import family_of
from snnk_peft.layers.slots import Slot
from snnk_peft.parts import PARTS, Part
from snnk_peft.tuner.get_model import get_snnk_model
from snnk_peft.tuner.given_model import as_floating_point
from snnk_peft.tuner.slot_layer import SlotLayer, original_path

Places = list[tuple["int | None", list[int]]]  # layer, the indices of the templates that compete for one place in it


def shared_copy(model: nn.Module) -> Any:
    """Copy the modules but share the tensors: patching the copy leaves the original unchanged."""
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        memo[id(parameter)] = nn.Parameter(parameter.detach(), requires_grad=False)
    for buffer in model.buffers():
        memo[id(buffer)] = buffer.detach()
    copied = copy.deepcopy(model, memo).eval()
    as_floating_point(copied)
    return copied


def share_tensors(bundled: nn.Module, original: nn.Module) -> None:
    """Replace tensors that a bundle copied unchanged by those of the original."""
    own = original.state_dict()
    for name, tensor in bundled.state_dict(keep_vars=True).items():
        same = own.get(name)
        if same is not None and same.shape == tensor.shape and same.dtype == tensor.dtype and torch.equal(same, tensor):
            tensor.data = same


class Template:
    """A part in all layers that it may change, in a copy of the model; nothing is active until requested.

    Raises:
        ConfigError, UnsupportedError: the model does not support the part, or it cannot be planned.

    Attributes:
        name: name of the part with its size.
        root: the patched transformers model.
        layers: paths of the Transformer layers.
        groups: the wrapped modules of each layer by path; those of a part outside the layers under None.
    """

    def __init__(self, part: Part, model: nn.Module, seed: int):
        self.part = part
        # The initial values are overwritten by the fit.
        config = SNNKConfig(parts=[part.undrawn()], seed=seed, modules_to_save=[])
        self.model = get_snnk_model(shared_copy(model), config).eval()
        self.root: Any = self.model.get_base_model()
        self.layers = family_of(model).layer_paths(model)
        self.groups: dict[int | None, dict[str, SlotLayer]] = {}
        for path, module in self.root.named_modules():
            if isinstance(module, SlotLayer):
                path = original_path(path)
                inside = (i for i, layer in enumerate(self.layers) if f"{path}.".startswith(f"{layer}."))
                self.groups.setdefault(next(inside, None), {})[path] = module
        by_layer = any(field.name == "layers" for field in dataclasses.fields(part))
        if len(self.groups) > 1 and (None in self.groups or not by_layer):
            raise ConfigError(
                f"{type(part).__name__} changes {len(self.groups)} places at once, of which none can be chosen alone; "
                "expected parts with `layers`, or a part outside of the Transformer layers"
            )
        self.activate(None, nothing=True)

    @property
    def name(self) -> str:
        """The name of the part with its size, such as "ffn 64"."""
        return f"{part_name(type(self.part))} {self.part.size_in_words()}"

    def activate(self, group: int | None, nothing: bool = False) -> None:
        """Activate one group and no other."""
        for key, slots in self.groups.items():
            for layer in slots.values():
                layer._disable_adapters = nothing or key != group

    def changed(self, group: int | None) -> set[str]:
        """Return the paths of everything that a group changes."""
        paths = set()
        for path, layer in self.groups[group].items():
            for slot in _slots(layer):
                paths |= {path, *slot.changes(path)}
        return paths

    def folded(self) -> Any:
        for slots in self.groups.values():
            for layer in slots.values():
                layer._disable_adapters = False
        try:
            bundled: nn.Module = folded_model(self.root)[0]
        finally:
            self.activate(None, nothing=True)
        share_tensors(bundled, self.root)
        return bundled


def default_templates(model: nn.Module, length: int, seed: int) -> list[Template]:
    """Collect the candidates of all kinds of parts that the model supports.

    Raises:
        UnsupportedError: an unknown family.
        ConfigError: the model supports none.
    """
    family_of(model)
    templates: list[Template] = []
    reasons: list[str] = []
    for name in PARTS:
        try:
            templates += [Template(part, model, seed) for part in PARTS[name].candidates(model, length)]
        except (ConfigError, UnsupportedError) as error:
            reasons.append(str(error))
    if not templates:
        raise ConfigError(
            f"{type(model).__name__} can take none of the parts that plan() tries; expected a model with a plain FFN, "
            "plain heads or a pooler, or candidates of your own as parts=[...]. " + " ".join(reasons)
        )
    return templates


def _slots(layer: SlotLayer) -> list[Slot]:
    return [cast(Slot, slot) for name in layer.snnk_slots for slot in layer.slots_of(name)]


def places(templates: Sequence[Template]) -> Places:
    """Return pairs (layer, competing templates): those that change the same module in it, or one inside it."""
    result: Places = []
    keys: dict[int | None, None] = {key: None for template in templates for key in template.groups}
    for key in sorted(keys, key=lambda key: -1 if key is None else key):
        sets: list[tuple[set[str], list[int]]] = []
        for number, template in enumerate(templates):
            if key not in template.groups:
                continue
            paths, members = template.changed(key), [number]
            for other in [each for each in sets if _overlap(each[0], paths)]:
                sets.remove(other)
                paths, members = paths | other[0], other[1] + members
            sets.append((paths, members))
        result += [(key, members) for _, members in sets]
    return result


def _overlap(one: set[str], other: set[str]) -> bool:
    return any(f"{a}.".startswith(f"{b}.") or f"{b}.".startswith(f"{a}.") for a in one for b in other)


@contextmanager
def replayed(root: nn.Module, outputs: Mapping[str, Any]) -> Iterator[None]:
    """Skip layers in a context, returning their known outputs."""
    layers = [(root.get_submodule(path), output) for path, output in outputs.items()]
    for layer, output in layers:
        layer.forward = lambda *args, output=output, **kwargs: output
    try:
        yield
    finally:
        for layer, _ in layers:
            del layer.forward
