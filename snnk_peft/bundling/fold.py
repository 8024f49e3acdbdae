"""Folding: which plain modules take the places of a patched model's slots (SNNK paper, section 3.3 and App. E).

    FFN         Φ -> A -> W₂                     becomes  Φ -> W₂A
    pooler      Φ -> A -> classifier             becomes  Φ -> W̄  (num_classes × num_features)
    adapter     x + scaling · v ⊙ (Φ(x) Aᵀ)      becomes  x + Φ(x) Mᵀ
    parallel    W₂ h + scaling · v ⊙ (Φ(x) Aᵀ)   becomes  [W₂, M] [h, Φ(x)]
    query_value W x + scaling · v ⊙ (Φ(x) Aᵀ)    becomes  [M, W] [Φ(x), x]

Nothing is changed here: the result is a table from module paths to new modules, which may contain the originals.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils import ModulesToSaveWrapper
from peft.utils.other import AuxiliaryTrainingWrapper
from torch import nn

from snnk_peft.bundling.modules import Beside, BundledAdapter, Leading
from snnk_peft.bundling.report import Folded
from snnk_peft.errors import UnsupportedError
from snnk_peft.families.base import ModelFamily, as_linear, unwrap
from snnk_peft.layers.attention_term import AttentionTerm
from snnk_peft.layers.feature_stage import FeatureStage
from snnk_peft.layers.kernel_attention import KernelAttention
from snnk_peft.layers.slots import (
    After,
    Attend,
    BesideLinear,
    Bypass,
    ParallelActivation,
    ParallelFeatures,
    ParallelReadout,
    Replace,
    Retrained,
    Slot,
)
from snnk_peft.layers.snnk_linear import plain_linear
from snnk_peft.tuner.slot_layer import SlotLayer, active_module


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
    """Every module by its path in the unpatched model; `original` is the pretrained twin of a trained copy."""
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
        if isinstance(module, ModulesToSaveWrapper):
            original = unwrap(module.original_module)
            module = module.original_module if module.disable_adapters else active_module(module)
        elif isinstance(module, SlotLayer):
            here = module.active_slots()
            slots = [slot for slot in here if not isinstance(slot, Retrained)] + slots
            copied = next((slot.module for slot in here if isinstance(slot, Retrained)), None)
            if copied is not None:
                original = unwrap(module.base_layer)
            module = module.base_layer if copied is None else copied
        elif isinstance(module, (BaseTunerLayer, AuxiliaryTrainingWrapper)):
            raise UnsupportedError(
                f"{path} is wrapped by PEFT's {type(module).__name__}; expected SNNK slots only. Merge the other "
                "adapter first (merge_and_unload) and then add and bundle the SNNK parts"
            )
        else:
            return Place(module, module if original is None else original, slots)


@dataclass
class FoldPlan:
    """New modules by path, and what to tell about them.

    Args:
        dtype: floating type of the bundle.
        modules: path -> the module that takes this place.
        folded: one entry per folded group.
        remarks: what could not be folded further, and why.
        additions: path -> the module that is put where the original has none.
        head: path of the Linear that reads the pooler's features, if there is one.
        pooler: path of the stage that makes these features.
    """

    dtype: torch.dtype
    modules: dict[str, nn.Module] = field(default_factory=dict)
    folded: list[Folded] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)
    additions: dict[str, KernelAttention] = field(default_factory=dict)
    head: str | None = None
    pooler: str | None = None


def plan_folds(table: dict[str, Place], family: ModelFamily, layers: list[str], dtype: torch.dtype) -> FoldPlan:
    """The plan for a patched model.

    Args:
        table: the places of the model.
        family: where its parts are.
        layers: paths of its Transformer layers.
        dtype: floating type that the bundle will have, for the sizes.

    Raises:
        UnsupportedError: slots in a combination that has no folded form.
    """
    plan = FoldPlan(dtype)
    for layer in layers:
        if family.activation is not None:
            _fold_ffn(plan, table, *(f"{layer}.{name}" for name in (family.ffn_in, family.activation, family.ffn_out)))
    for path, place in table.items():
        if path not in plan.modules and any(isinstance(slot, Replace) for slot in place.slots):
            _fold_pooler(plan, table, path)
    for path, place in table.items():
        _keep_attention(plan, path, place)
    for path, place in table.items():
        if path not in plan.modules and place.slots:
            plan.modules[path] = _followed(path, place.module, place.slots)
            _record(plan, table, [path])
    return plan


def _keep_attention(plan: FoldPlan, path: str, place: Place) -> None:
    """Linear attention has no smaller form: its feature maps move into the attention module."""
    attend = _only(path, place.slots, Attend)
    if not isinstance(attend, Attend):
        return
    place.slots.remove(attend)
    plan.additions[f"{path}.snnk_kernel"] = attend.kernel
    kept = "softmax attention" if attend.kernel.near_field is None else "softmax attention over all tokens"
    plan.folded.append(
        Folded(
            paths=[path],
            before=kept,
            after=f"linear attention, {' + '.join(map(describe, attend.kernel.terms))}",
            bytes_before=0,
            bytes_after=stored_bytes(attend.kernel, plan.dtype),
        )
    )


def _only(path: str, slots: list[Slot], kind: type[Slot]) -> Slot | None:
    found = [slot for slot in slots if isinstance(slot, kind)]
    if len(found) > 1:
        raise UnsupportedError(
            f"{path}: {len(found)} active adapters put a {kind.__name__} here; activate one of them with set_adapter"
        )
    return found[0] if found else None


def _followed(path: str, module: nn.Module, slots: list[Slot]) -> nn.Module:
    """`module` with the sequential adapters of its place behind it, and what is beside it multiplied in."""
    adapters: list[nn.Module] = []
    beside = _only(path, slots, BesideLinear)
    if isinstance(beside, BesideLinear) and isinstance(module, nn.Linear):
        slots = [slot for slot in slots if slot is not beside]
        matrix = beside.readout.matrix().to(module.weight.dtype)
        joint = plain_linear(torch.cat((matrix, module.weight), 1), module.bias)
        module = nn.Sequential(beside.stage.simplified().with_input(), joint)
    for slot in slots:
        if not isinstance(slot, After):
            raise UnsupportedError(
                f"{path}: a {type(slot).__name__} slot has no folded form in this place; activate one adapter at a "
                "time with set_adapter, and check that the family describes the model's FFN"
            )
        adapter = slot.adapter
        adapters.append(BundledAdapter(adapter.stage.simplified(), plain_linear(adapter.readout.matrix(), None)))
    return nn.Sequential(module, *adapters) if adapters else module


def _fold_ffn(plan: FoldPlan, table: dict[str, Place], path_in: str, path_act: str, path_out: str) -> None:
    into, act, out = (table[path] for path in (path_in, path_act, path_out))
    replace = _only(path_in, into.slots, Replace)
    beside = _only(path_in, into.slots, ParallelFeatures)
    readout = _only(path_out, out.slots, ParallelReadout)
    if replace is None and beside is None:
        return
    new_in: nn.Module = into.module
    new_act: nn.Module = act.module
    new_out = as_linear(out.module)
    assert isinstance(new_out, nn.Linear)
    if isinstance(replace, Replace):
        new_in, new_act = replace.layer.stage.simplified(), nn.Identity()
        new_out = replace.layer.fold(following=new_out)[1]
    if isinstance(beside, ParallelFeatures) and isinstance(readout, ParallelReadout):
        new_in = Beside(new_in, beside.stage.simplified())
        if replace is None:
            new_act = Leading(new_act, new_out.in_features)
        matrix = readout.readout.matrix()
        new_out = plain_linear(torch.cat((new_out.weight, matrix.to(new_out.weight.dtype)), 1), new_out.bias)
    rest = [slot for slot in out.slots if slot is not readout]
    for path, slots in ((path_in, into.slots), (path_act, act.slots)):
        for slot in slots:
            if not isinstance(slot, (Replace, ParallelFeatures, Bypass, ParallelActivation)):
                raise UnsupportedError(f"{path}: a {type(slot).__name__} slot inside a folded FFN has no folded form")
    plan.modules |= {path_in: new_in, path_act: new_act, path_out: _followed(path_out, new_out, rest)}
    _record(plan, table, [path_in, path_act, path_out])


def _fold_pooler(plan: FoldPlan, table: dict[str, Place], path: str) -> None:
    replace = _only(path, table[path].slots, Replace)
    assert isinstance(replace, Replace)
    reader = table.get(replace.following) if replace.following is not None else None
    stage = replace.layer.stage.simplified()
    paths = [path]
    if replace.activation is not None:
        paths.append(replace.activation)
        plan.modules[replace.activation] = nn.Identity()
    if replace.following is not None and reader is not None and isinstance(reader.module, nn.Linear):
        plan.modules[path] = stage
        folded = replace.layer.fold(following=reader.module)[1]
        plan.modules[replace.following] = _followed(replace.following, folded, reader.slots)
        plan.head, plan.pooler = replace.following, path
        paths.append(replace.following)
    else:
        plan.modules[path] = nn.Sequential(stage, replace.layer.fold()[1])
        reason = (
            "the activation behind it is called inside the model's forward()"
            if replace.activation is None
            else "no Linear reads its output"
        )
        plan.remarks.append(f"{path}: its readout stays a Linear of its own, because {reason}")
    _record(plan, table, paths)


def _record(plan: FoldPlan, table: dict[str, Place], paths: list[str]) -> None:
    before = [table[path].original for path in paths]
    after = [plan.modules[path] for path in paths]
    plan.folded.append(
        Folded(
            paths=paths,
            before=" + ".join(describe(module) for module in before),
            after=" + ".join(describe(module) for module in after if not isinstance(module, nn.Identity)),
            bytes_before=sum(stored_bytes(module, plan.dtype) for module in before),
            bytes_after=sum(stored_bytes(module, plan.dtype) for module in after),
        )
    )


def stored_bytes(module: nn.Module, dtype: torch.dtype) -> int:
    """Bytes of the tensors that a checkpoint of `module` in `dtype` holds."""
    tensors = module.state_dict().values()
    return sum(t.numel() * (dtype.itemsize if t.is_floating_point() else t.element_size()) for t in tensors)


def describe(module: nn.Module) -> str:
    """One short phrase, e.g. "Linear 384→1536" or "64 relu features"."""
    if isinstance(module, nn.Linear):
        return f"Linear {module.in_features}→{module.out_features}"
    if isinstance(module, FeatureStage):
        spec = module.spec()
        extra = " and the input" if spec["append_input"] else ""
        stored = "" if spec["save"] else " (seed only)"
        return f"{spec['num_features']} {spec['component']} features{extra}{stored}"
    if isinstance(module, AttentionTerm):
        features = describe(FeatureStage(module.pairs()[0][0]))
        apart = "" if module.key_maps is None else ", queries and keys apart"
        return f"{features}{' per head' if len(module.feature_maps) > 1 else ''}{apart}"
    if isinstance(module, BundledAdapter):
        return f"adapter ({describe(module.stage)})"
    if isinstance(module, Beside):
        return f"[{describe(module.module)}, {describe(module.stage)}]"
    if isinstance(module, Leading):
        return f"{describe(module.module)} on the first {module.width}"
    if isinstance(module, nn.Sequential):
        return " + ".join(describe(part) for part in module)
    return type(module).__name__
