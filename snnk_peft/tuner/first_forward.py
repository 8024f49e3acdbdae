"""Checks of a new adapter in its first forward pass: whether anything is trained, and whether all of it runs.

A module may exist and never be called (ALBERT's `dropout`), or not for this task; a slot there has no effect and gets
no gradient. So the first forward pass in which the adapter is in use is watched, and only that one.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import nn

from snnk_peft.config import SNNKConfig
from snnk_peft.tuner.slot_layer import SlotLayer

SHOWN = 4  # places named in a warning


class FirstForward:
    """A forward hook of the model that warns once about slots that were not called, and takes itself out.

    Args:
        adapter_name: whose slots.
    """

    def __init__(self, adapter_name: str):
        self.adapter_name = adapter_name

    def __call__(self, model: nn.Module, *unused: Any) -> None:
        if torch.compiler.is_compiling():
            return
        layers = {name: module for name, module in model.named_modules() if isinstance(module, SlotLayer)}
        layers = {name: layer for name, layer in layers.items() if self.adapter_name in layer.snnk_slots}
        if any(layer.disable_adapters or self.adapter_name not in layer.active_adapters for layer in layers.values()):
            return  # not in use yet
        for number, hook in list(model._forward_hooks.items()):
            if hook is self:
                del model._forward_hooks[number]
        # Compiled layers do not tell.
        quiet = tuple(f"{name}." for name, part in model.named_modules() if part._compiled_call_impl is not None)
        silent = [name for name, layer in layers.items() if not layer.was_called and not f"{name}.".startswith(quiet)]
        if silent:
            more = f" and {len(silent) - SHOWN} more" if len(silent) > SHOWN else ""
            warnings.warn(
                f"adapter {self.adapter_name!r} has parts in places that the first forward pass did not call: "
                f"{', '.join(map(repr, silent[:SHOWN]))}{more}. They have no effect and get no gradient. If the model "
                "never calls them, its family (ModelFamily) names the wrong modules: snnk_peft.check_family tells",
                stacklevel=2,
            )


def watch_first_forward(model: nn.Module, adapter_name: str) -> None:
    """Warn after the first forward pass of `model` that leaves slots of an adapter uncalled.

    Args:
        model: the model inside PEFT's wrappers.
        adapter_name: a new adapter.
    """
    model.register_forward_hook(FirstForward(adapter_name))


def run_watchers(model: nn.Module) -> None:
    """Do the work of the hooks where PEFT runs the model without them."""
    for hook in list(model._forward_hooks.values()):
        if isinstance(hook, FirstForward):
            hook(model)


def warn_if_nothing_is_trained(config: SNNKConfig, model: nn.Module, adapter_name: str) -> None:
    """Warn if a new adapter has nothing to train, unless the config says so (`modules_to_save=[]`).

    Args:
        config: as the tuner completed it.
        model: the patched model.
        adapter_name: the adapter.
    """
    if config.inference_mode or config.modules_to_save is not None:
        return
    layers = [module for module in model.modules() if isinstance(module, SlotLayer)]
    slots = [layer.slots_of(adapter_name) for layer in layers if adapter_name in layer.snnk_slots]
    if any(True for one in slots for _ in one.parameters()):
        return
    warnings.warn(
        f"adapter {adapter_name!r} has nothing to train: its feature matrices are drawn, and {type(model).__name__} "
        "has no task head that would be trained along. To train, name modules (modules_to_save=[...], for example the "
        "layers' query and key), learn the matrices (projection='free' or 'gmm'), blend in a band (near_field=...), or "
        "add an adapter (adapter=AdapterPart()). If nothing shall be trained, modules_to_save=[] says so",
        stacklevel=2,
    )
