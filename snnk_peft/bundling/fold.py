"""Folding: the plain modules that replace the slots of a patched model (SNNK paper, section 3.3 and App. E).

Every slot folds itself (`Slot.fold`, with its formula in parts/): first those that replace a module, then the others,
innermost first, in the order of the model's modules. Nothing is changed here: the result is a table from module paths
to new modules, which may contain the originals.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from snnk_peft.bundling.report import Folded
from snnk_peft.errors import UnsupportedError
from snnk_peft.families.base import unwrap
from snnk_peft.layers.feature_stage import FeatureStage
from snnk_peft.layers.folded import Beside, FoldedAdapter, Leading
from snnk_peft.layers.slots import FoldPlace, Retrained, Slot
from snnk_peft.tuner.slot_layer import SlotLayer, is_of_an_adapter, is_saved_in_full, saved_in_full


@dataclass
class Place:
    """One module of a patched model, without the wrappers around it.

    Args:
        module: the module in use: the original, or the trained copy of `modules_to_save`.
        original: the pretrained module.
        slots: what the active adapters do to it, innermost first.
    """

    module: nn.Module
    original: nn.Module
    slots: list[Slot] = field(default_factory=list)


def places(model: nn.Module, path: str = "", original: nn.Module | None = None) -> Iterator[tuple[str, Place]]:
    """Yield every module by its path in the unpatched model; `original` is the pretrained twin of a trained copy."""
    place = _unwrap(model, path)
    if original is not None:
        place.original = original
    yield path, place
    for name, child in place.module._modules.items():
        if child is not None:
            twin = place.original._modules[name] if place.original is not place.module else None
            yield from places(child, f"{path}.{name}" if path else name, twin)


def _unwrap(module: nn.Module, path: str) -> Place:
    slots: list[Slot] = []
    original: nn.Module | None = None
    while True:
        if is_saved_in_full(module):
            original, module = unwrap(module.original_module), saved_in_full(module)  # type: ignore[arg-type]
        elif isinstance(module, SlotLayer):
            here = module.active_slots()
            slots = [slot for slot in here if not isinstance(slot, Retrained)] + slots
            copied = next((slot.module for slot in here if isinstance(slot, Retrained)), None)
            if copied is not None:
                original = unwrap(module.base_layer)
            module = module.base_layer if copied is None else copied
        elif is_of_an_adapter(module):
            raise UnsupportedError(
                f"{path} is wrapped by PEFT's {type(module).__name__}; expected SNNK slots only. Merge the other "
                "adapter first (merge_and_unload) and then add and bundle the SNNK parts"
            )
        else:
            return Place(module, module if original is None else original, slots)


@dataclass
class FoldPlan:
    """The new modules by path, and their report.

    Args:
        table: the places of the model.
        dtype: floating type of the bundle, for the sizes.
        modules: path -> the new module at this place.
        folded: one entry per group of modules that were folded together.
        remarks: what could not be folded further, and why.
        additions: path -> the module added where the original has none.
        altered: path of a module that stays -> the spec of its new behaviour.
        head: path of the Linear that reads the pooler's features, if there is one.
        pooler: path of the stage that computes these features.
    """

    table: dict[str, Place]
    dtype: torch.dtype
    modules: dict[str, nn.Module] = field(default_factory=dict)
    folded: list[Folded] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)
    additions: dict[str, Any] = field(default_factory=dict)
    altered: dict[str, dict[str, Any]] = field(default_factory=dict)
    head: str | None = None
    pooler: str | None = None

    def record(self, paths: Sequence[str]) -> None:
        before = [self.table[path].original for path in paths]
        after = [self.modules[path] for path in paths]
        self.folded.append(
            Folded(
                paths=list(paths),
                before=" + ".join(describe(module) for module in before),
                after=" + ".join(describe(module) for module in after if not isinstance(module, nn.Identity)),
                bytes_before=sum(stored_bytes(module, self.dtype) for module in before),
                bytes_after=sum(stored_bytes(module, self.dtype) for module in after),
            )
        )


@dataclass(frozen=True)
class PlaceInPlan:
    """A `FoldPlace`: one module in a plan."""

    plan: FoldPlan
    path: str

    @property
    def module(self) -> nn.Module:
        """The module at this place, as folded so far."""
        return self.plan.modules.get(self.path, self.plan.table[self.path].module)

    @property
    def original(self) -> bool:
        """Whether the original module is still in place."""
        return self.path not in self.plan.modules

    @property
    def slots(self) -> Sequence[Slot]:
        """The slots of the active adapters, innermost first."""
        return self.plan.table[self.path].slots

    def at(self, path: str) -> FoldPlace:
        if path not in self.plan.table:
            raise LookupError(path)
        return PlaceInPlan(self.plan, path)

    def put(self, module: nn.Module) -> None:
        self.plan.modules[self.path] = module

    def add(self, name: str, module: nn.Module, before: str, after: str) -> None:
        self.plan.additions[f"{self.path}.{name}"] = module
        self.plan.folded.append(Folded([self.path], before, after, 0, stored_bytes(module, self.plan.dtype)))

    def alter(self, kind: str, before: str = "", after: str = "", **values: Any) -> None:
        """Keep the module here, with the altered behaviour `kind`."""
        self.plan.altered[self.path] = {"kind": kind, **values}
        if after:
            self.plan.folded.append(Folded([self.path], before, after, 0, 0))

    def remark(self, text: str) -> None:
        self.plan.remarks.append(text)

    def reads_features(self, stage: FoldPlace) -> None:
        """Record that this is the head that reads the features of `stage`."""
        both = stage.path == self.path
        self.plan.head = f"{self.path}.1" if both else self.path
        self.plan.pooler = f"{self.path}.0" if both else stage.path


def plan_folds(table: dict[str, Place], dtype: torch.dtype) -> FoldPlan:
    """Plan the folds of a patched model.

    Raises:
        UnsupportedError: slots in a combination that has no folded form.
    """
    plan = FoldPlan(table, dtype)
    groups: list[dict[str, None]] = []  # paths, in order
    for path, place in table.items():
        kinds = [type(slot) for slot in place.slots if slot.alone]
        if twice := next((kind for kind in kinds if kinds.count(kind) > 1), None):
            raise UnsupportedError(
                f"{path}: {kinds.count(twice)} active adapters put a {twice.__name__} here; activate one of them with "
                "set_adapter"
            )
        for slot in place.slots:
            changed = dict.fromkeys(slot.changes(path))
            joined = [group for group in groups if group.keys() & changed.keys()]
            for group in joined[1:]:
                groups.remove(group)
            if not joined:
                groups.append(changed)
            for group in joined:
                joined[0].update(group | changed)
    for replaces in (True, False):
        for path, place in table.items():
            for slot in place.slots:
                if slot.replaces == replaces:
                    slot.fold(PlaceInPlan(plan, path))
    for group in groups:
        if done := [path for path in group if path in plan.modules]:
            plan.record(done)
    return plan


def stored_bytes(module: nn.Module, dtype: torch.dtype) -> int:
    """Return the size in bytes of a checkpoint of `module` in `dtype`."""
    tensors = module.state_dict().values()
    return sum(t.numel() * (dtype.itemsize if t.is_floating_point() else t.element_size()) for t in tensors)


def describe(module: nn.Module) -> str:
    """Describe a module in a short phrase, e.g. "Linear 384→1536" or "64 relu features"."""
    if isinstance(module, nn.Linear):
        return f"Linear {module.in_features}→{module.out_features}"
    if isinstance(module, (nn.Conv1d, nn.Conv2d)):
        kernel = "×".join(map(str, module.kernel_size))
        return f"{type(module).__name__} {module.in_channels}→{module.out_channels} ({kernel})"
    if isinstance(module, FeatureStage):
        return module.in_words()
    if isinstance(module, FoldedAdapter):
        return f"adapter ({describe(module.stage)})"
    if isinstance(module, Beside):
        return f"[{describe(module.module)}, {describe(module.stage)}]"
    if isinstance(module, Leading):
        return f"{describe(module.module)} on the first {module.width}"
    if isinstance(module, nn.Sequential):
        return " + ".join(describe(part) for part in module)
    return type(module).__name__
