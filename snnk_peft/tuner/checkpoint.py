"""Check that an adapter checkpoint is complete and fits, before the model is changed.

PEFT puts the adapter's modules into the model first and reads the file afterwards, so a fault found then leaves a
half-loaded model behind. The tuner therefore looks up the file (doors.py) and compares it with the modules it is about
to install: sizes first, so that nothing large is allocated for a manipulated config.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from peft.utils import ModulesToSaveWrapper
from torch import nn

from snnk_peft.config import SNNKConfig
from snnk_peft.digests import Layout, layout_faults, refuse
from snnk_peft.errors import ConfigError
from snnk_peft.layers.slots import Slot
from snnk_peft.projections.base import Projection
from snnk_peft.tuner.base_model import check_labels
from snnk_peft.tuner.slot_layer import SlotLayer, original_path

INSIDE = (".snnk_slots.", ".modules_to_save.", ".original_module.", ".base_layer.")
ADDED_BY_PEFT = {"classifier", "score", "qa_outputs"}  # for a task_type, even if the model lacks them
# A config may ask for this many times the parameters of its file (which lacks redrawn matrices), and for 256 MB
# whatever the file.
ROOM, UNASKED = 4, 1 << 26


@dataclass(frozen=True)
class Incoming:
    """Content of a weights file, or of a dict of tensors.

    Args:
        name: name of the file, for messages.
        layout: shape and dtype of every tensor.
        checksums: checksums of redrawn matrices.
        content_faults: returns messages about values that are damaged or belong to another config; reads all values.
    """

    name: str
    layout: Layout
    checksums: Mapping[str, torch.Tensor]
    content_faults: Callable[[], list[str]] = list


def plain_start(config: SNNKConfig) -> SNNKConfig:
    """Return a config of the same sizes that needs no pretrained weights, and allocates every matrix.

    Its modules can be built on the meta device, which gives their sizes before memory is allocated.
    """
    return SNNKConfig(parts=[part.undrawn() for part in config.named_parts().values()], seed=config.seed)


def check_size(trial: Mapping[str, list[Slot]], incoming: Incoming) -> None:
    """Raise ConfigError if the config asks for far more parameters than the file holds."""
    wanted = sum(value.numel() for slots in trial.values() for value in nn.ModuleList(slots).state_dict().values())
    given = sum(math.prod(shape) for shape, _ in incoming.layout.values())
    if wanted > ROOM * given + UNASKED:
        raise ConfigError(
            f"adapter_config.json asks for modules of {wanted:,} parameters, and {incoming.name} holds {given:,}: the "
            "two do not belong together. Look at num_features and the params of the parts, or copy the folder again"
        )


def check_weights(
    config: SNNKConfig, model: nn.Module, slots: Mapping[str, list[Slot]], saved: list[str] | None, incoming: Incoming
) -> None:
    """Raise ConfigError if the tensors to load do not fit; nothing is changed."""
    given_layout = {original_path(key): entry for key, entry in incoming.layout.items()}
    checksums = {original_path(key): value for key, value in incoming.checksums.items()}
    expected: Layout = {}
    for place, installed in slots.items():
        holder = nn.ModuleList(installed)
        for name, value in holder.state_dict().items():
            expected[f"{place}.snnk_slots.{name}"] = (tuple(value.shape), value.dtype)
        for name, module in holder.named_modules():
            checksum = checksums.get(f"{place}.snnk_slots.{name}.checksum")
            if checksum is not None and isinstance(module, Projection):
                module.verify(checksum)
    for name, module in model.named_modules():
        if any(name.endswith(target) for target in saved or ()) and not _inside_adapter(name):
            original = module.original_module if isinstance(module, ModulesToSaveWrapper) else module
            for key, value in cast(nn.Module, original).state_dict().items():
                expected[f"{original_path(name)}.{key}"] = (tuple(value.shape), value.dtype)
    base = {original_path(key): (tuple(value.shape), value.dtype) for key, value in model.state_dict().items()}
    embeddings = {original_path(key) for key in config.saved_embeddings or ()} & _embedding_keys(model)
    expected |= {key: base[key] for key in embeddings}
    check_labels(config, model, given_layout, expected)
    faults = [f"{key} is missing" for key in sorted(expected.keys() - given_layout.keys())]
    for key in sorted(given_layout.keys() - expected.keys()):
        what = "is a tensor of the base model and would overwrite it" if key in base else "has no place in this model"
        faults.append(f"{key} {what}")
    faults += layout_faults(given_layout, expected)
    for key in sorted(_embedding_keys(model) & given_layout.keys() & base.keys()):
        (given, _), (present, _) = given_layout[key], base[key]
        if given[:1] != present[:1] and given[1:] == present[1:]:
            faults.append(f"the vocabulary was changed: call model.resize_token_embeddings({given[0]}) first")
    refuse(
        incoming.name, f"does not fit {type(model).__name__} with this adapter_config.json", list(dict.fromkeys(faults))
    )
    refuse(incoming.name, "is damaged", incoming.content_faults())


def check_loaded(config: SNNKConfig, model: nn.Module, adapter_name: str, incoming: Incoming | None) -> None:
    """Apply `check_weights` to an adapter that is already in the model and gets new weights."""
    if incoming is not None:
        layers = {original_path(n): m for n, m in model.named_modules() if isinstance(m, SlotLayer)}
        slots = {
            place: [cast(Slot, slot) for slot in layer.slots_of(adapter_name)]
            for place, layer in layers.items()
            if adapter_name in layer.snnk_slots
        }
        check_weights(config, model, slots, config.modules_to_save, incoming)


def _embedding_keys(model: Any) -> set[str]:
    """Return the keys of the embeddings, which PEFT saves if the vocabulary was changed, or on request."""
    keys = set()
    getters = (getattr(model, name, lambda: None) for name in ("get_input_embeddings", "get_output_embeddings"))
    for getter in getters:
        try:
            embedding = getter()
        except NotImplementedError:  # transformers' way of saying that they cannot be exchanged
            continue
        for name, module in model.named_modules() if embedding is not None else ():
            if module is embedding:
                keys |= {original_path(f"{name}.{key}") for key in embedding.state_dict()}
    return keys


def _inside_adapter(name: str) -> bool:
    return any(mark in f".{name}." for mark in INSIDE)


def clashes(model: nn.Module, places: set[str], saved: list[str] | None) -> list[str]:
    """List conflicts between this adapter's places and the modules that some adapter saves in full.

    PEFT matches `modules_to_save` by the end of the path, copies the whole module and renames its children.
    """
    named = {original_path(name): module for name, module in model.named_modules()}
    remedy = "leave one of the two out, or load the adapters into separate copies of the model"
    faults = [
        f"{place!r} cannot be changed: another adapter saves it, or a module around it, in full; {remedy}"
        for place in sorted(places)
        if place not in named or isinstance(named[place], ModulesToSaveWrapper)
    ]
    for target in saved or ():
        if target not in ADDED_BY_PEFT and not any(name.endswith(target) for name in named):
            close = difflib.get_close_matches(target, [name.rpartition(".")[2] for name in named], n=1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            faults.append(f"modules_to_save: no module path ends in {target!r}{hint}")
    slotted = places | {name for name, module in named.items() if isinstance(module, SlotLayer)}
    for name in named:
        if any(name.endswith(target) for target in saved or ()) and not _inside_adapter(name):
            inside = sorted(place for place in slotted if place == name or place.startswith(f"{name}."))
            if inside:
                faults.append(f"{name!r} cannot be saved in full: an SNNK part changes {inside[0]!r}; {remedy}")
    return faults
