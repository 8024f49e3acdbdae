"""What is checked before an adapter checkpoint touches a model: the file is whole, and it fits.

PEFT puts the adapter's modules into the model first and reads the file afterwards, so whatever is found then leaves a
half-loaded model behind. `SNNKConfig.from_pretrained` therefore remembers the folder, and the tuner compares the file
with the modules it is about to install.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import cast

from peft.utils import ModulesToSaveWrapper
from safetensors import SafetensorError, safe_open
from torch import nn

from snnk_peft.config import SNNKConfig
from snnk_peft.errors import ConfigError
from snnk_peft.families.base import ModelFamily, module_at
from snnk_peft.layers.slots import Slot
from snnk_peft.projections.base import Projection
from snnk_peft.tuner.slot_layer import SlotLayer, original_path

PREFIX = "base_model.model."
WEIGHTS = "adapter_model.safetensors"
INSIDE = (".snnk_slots.", ".modules_to_save.", ".original_module.", ".base_layer.")
ADDED_BY_PEFT = {"classifier", "score", "qa_outputs"}  # for a task_type, whether the model has them or not
SHOWN = 6  # tensors named in a message; a wrong base model misfits in hundreds


def measurements(model: nn.Module, family: ModelFamily) -> dict[str, str | int]:
    """What decides the shapes of an adapter: the architecture and its sizes."""
    layers = family.layer_paths(model)
    expansion = module_at(model, f"{layers[0]}.{family.ffn_in}", "the FFN expansion")
    found: dict[str, str | int] = {"model_type": family.name, "layers": len(layers)}
    if isinstance(expansion, nn.Linear):
        return found | {"hidden_size": expansion.in_features, "ffn_size": expansion.out_features}
    # A family whose FFN is built otherwise; such a model takes no part that would depend on its size.
    config = family.config_of(model)
    return found | {"hidden_size": config.hidden_size, "heads": config.num_attention_heads}


def check_measurements(config: SNNKConfig, found: Mapping[str, str | int]) -> None:
    """ConfigError if the adapter was made for a model of other sizes; says which."""
    made_for = config.made_for
    if made_for is None or dict(made_for) == dict(found):
        return
    differing = [
        f"{key} is {found.get(key)!r}, the adapter's is {made_for.get(key)!r}"
        for key in sorted({*made_for, *found})
        if made_for.get(key) != found.get(key)
    ]
    raise ConfigError(
        f"this adapter belongs to another base model ({config.base_model_name_or_path or 'name unknown'}): "
        f"{'; '.join(differing)}. Load that base model, or make a new SNNKConfig for this one"
    )


def check_weights(
    config: SNNKConfig, model: nn.Module, slots: Mapping[str, list[Slot]], saved: list[str] | None
) -> None:
    """ConfigError if the weights file that belongs to `config` is damaged or does not fit; nothing is changed.

    Args:
        config: as loaded; one that was not loaded from a local folder is not checked.
        model: the base model, not yet changed.
        slots: the modules about to be installed, by path.
        saved: the modules that are saved in full.
    """
    folder = config.loaded_from
    if folder is None or not (path := Path(folder) / WEIGHTS).is_file():
        return
    try:
        with safe_open(path, framework="pt") as file:
            keys = list(file.keys())
            shapes = {_place(key): tuple(file.get_slice(key).get_shape()) for key in keys}
            checksums = {_place(key): file.get_tensor(key) for key in keys if key.endswith("checksum")}
    except SafetensorError as error:
        raise ConfigError(
            f"{path} is truncated or corrupted ({error}); expected a whole safetensors file. Copy or download it again"
        ) from error
    expected: dict[str, tuple[int, ...]] = {}
    for place, installed in slots.items():
        holder = nn.ModuleList(installed)
        for name, value in holder.state_dict().items():
            expected[f"{place}.snnk_slots.{name}"] = tuple(value.shape)
        for name, module in holder.named_modules():
            checksum = checksums.get(f"{place}.snnk_slots.{name}.checksum")
            if checksum is not None and isinstance(module, Projection):
                module.verify(checksum)
    for name, module in model.named_modules():
        if any(name.endswith(target) for target in saved or ()) and not _inside_adapter(name):
            original = module.original_module if isinstance(module, ModulesToSaveWrapper) else module
            for key, value in cast(nn.Module, original).state_dict().items():
                expected[f"{name}.{key}"] = tuple(value.shape)
    # PEFT may add tensors of the base model itself, such as resized embeddings.
    expected |= {key: tuple(value.shape) for key, value in model.state_dict().items() if key in shapes}
    faults = [f"{key} is missing" for key in sorted(expected.keys() - shapes.keys())]
    faults += [f"{key} has no place in this model" for key in sorted(shapes.keys() - expected.keys())]
    faults += [
        f"{key} has shape {shapes[key]}; the model needs {expected[key]}"
        for key in sorted(expected.keys() & shapes.keys())
        if shapes[key] != expected[key]
    ]
    if faults:
        more = [f"... and {len(faults) - SHOWN} more"] if len(faults) > SHOWN else []
        raise ConfigError(
            [f"{path} does not fit {type(model).__name__} with this adapter_config.json", *faults[:SHOWN], *more]
        )


def _place(key: str) -> str:
    """A key of the file without PEFT's prefix, and without the wrappers around a module inside a wrapped one."""
    return original_path(key.removeprefix(PREFIX))


def _inside_adapter(name: str) -> bool:
    return any(mark in f".{name}." for mark in INSIDE)


def clashes(model: nn.Module, places: set[str], saved: list[str] | None) -> list[str]:
    """Messages where this adapter's places and the modules that some adapter saves in full get in each other's way.

    PEFT matches `modules_to_save` by the end of the path, copies the whole module and renames what is inside.

    Args:
        model: the model, perhaps with other adapters in it.
        places: paths of the modules that get slots.
        saved: the modules that this adapter saves in full.
    """
    named = {original_path(name): module for name, module in model.named_modules()}
    remedy = "leave one of the two out, or load the adapters into separate copies of the model"
    found = [
        f"{place!r} cannot be changed: another adapter saves it, or a module around it, in full; {remedy}"
        for place in sorted(places)
        if place not in named or isinstance(named[place], ModulesToSaveWrapper)
    ]
    for target in saved or ():
        if target not in ADDED_BY_PEFT and not any(name.endswith(target) for name in named):
            close = difflib.get_close_matches(target, [name.rpartition(".")[2] for name in named], n=1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            found.append(f"modules_to_save: no module path ends in {target!r}{hint}")
    slotted = places | {name for name, module in named.items() if isinstance(module, SlotLayer)}
    for name in named:
        if any(name.endswith(target) for target in saved or ()) and not _inside_adapter(name):
            inside = sorted(place for place in slotted if place == name or place.startswith(f"{name}."))
            if inside:
                found.append(f"{name!r} cannot be saved in full: an SNNK part changes {inside[0]!r}; {remedy}")
    return found
