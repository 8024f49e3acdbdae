"""SlotLayer, the only module that PEFT sees: wraps an original module and holds its slots per adapter name.

All adapter bookkeeping is here and in `model.py`; the slots themselves (layers/slots.py) never see a name. A module may
exist but never be called (ALBERT's `dropout`), or not for this task; a slot there has no effect and gets no gradient.
So the first forward pass with an adapter in use, and only that one, is checked.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from functools import partial
from typing import Any, cast

import torch
from peft import PeftModel
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils import ModulesToSaveWrapper
from peft.utils.other import AuxiliaryTrainingWrapper
from torch import nn

from snnk_peft.config import SNNKConfig
from snnk_peft.errors import ConfigError
from snnk_peft.families.base import unwrap
from snnk_peft.functional.at_hand import place_of
from snnk_peft.layers.slots import Retrained, Slot

SHOWN = 4  # places named in a warning


class SlotLayer(nn.Module, BaseTunerLayer):
    """An original module with SNNK slots around it or in its place.

    Args:
        base_layer: the original module; kept, and used when adapters are disabled.

    Attributes:
        snnk_slots: adapter name -> the slots of that adapter here, innermost first.
        was_called: whether a forward pass has reached this module (outside compiled code).
        rows: the `RowAdapters` of the current call, if it names an adapter per row.
        held_back: slots that are temporarily disabled, while `calibrate` runs the original.
    """

    adapter_layer_names = ("snnk_slots",)
    other_param_names = ()

    def __init__(self, base_layer: nn.Module):
        super().__init__()
        self.base_layer = base_layer
        self.was_called = False
        self.rows: Any = None
        self.held_back: frozenset[Slot] = frozenset()
        self.merged_adapters: list[str] = []
        self.snnk_slots = nn.ModuleDict()
        first = next((p for p in base_layer.parameters() if p.ndim == 2), None)
        shape = (None, None) if first is None else tuple(first.shape)
        self.out_features: int | None = shape[0]
        self.in_features: int | None = shape[1]

    def __getattr__(self, name: str) -> Any:
        """Look up modules inside the original under their original path, where adapters may be placed as well."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            inside = self._modules.get("base_layer")
            if inside is None or name not in inside._modules:
                raise
            return getattr(inside, name)

    def add_slot(self, adapter_name: str, slot: Slot) -> None:
        """Add `slot` around the existing slots of `adapter_name`."""
        if adapter_name not in self.snnk_slots:
            self.snnk_slots[adapter_name] = nn.ModuleList()
        self.slots_of(adapter_name).append(slot)

    def slots_of(self, adapter_name: str) -> nn.ModuleList:
        return cast(nn.ModuleList, self.snnk_slots[adapter_name])

    def active_slots(self) -> list[Slot]:
        """Return the slots in use, innermost first: the replacing one, then the others in order of activation.

        Raises:
            ConfigError: two active adapters replace the same module.
        """
        if self.disable_adapters:
            return []
        slots: list[Slot] = []
        held: Any = self._modules["snnk_slots"]  # hot in training, so not by __getattr__
        for name in self.active_adapters:
            if name in held:
                slots += held[name]
        if self.held_back:
            slots = [slot for slot in slots if slot not in self.held_back]
        if len(slots) < 2:
            return slots
        if sum(slot.replaces for slot in slots) > 1:
            raise ConfigError(
                f"active adapters {list(self.active_adapters)} replace the same {type(self.base_layer).__name__}; "
                "activate one of them with set_adapter(name)"
            )
        # A replacement never calls the module it wraps, so it must be innermost.
        return sorted(slots, key=lambda slot: not slot.replaces)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if not self.was_called and not torch.compiler.is_compiling():
            self.was_called = True
        if self.rows is not None and not self.disable_adapters:
            return self.rows.run(self.base_layer, self._way, args, kwargs)
        return self._through(self.active_slots())(*args, **kwargs)

    def _way(self, adapter_name: str) -> Any:
        return self._through(self.slots_of(adapter_name) if adapter_name in self.snnk_slots else ())

    def _through(self, slots: Iterable[Any]) -> Any:
        run: Any = self._modules["base_layer"]
        for slot in slots:
            run = partial(slot, run)
        return run

    def _get_base_layer_device_and_dtype(self, base_layer: nn.Module) -> tuple[Any, Any]:
        first = next(base_layer.parameters(), None)
        return (None, None) if first is None else (first.device, first.dtype)

    def move_to(self, adapter_name: str, device: torch.device | None, dtype: torch.dtype | None) -> None:
        """Move one adapter's tensors. Parameters get `dtype`; frozen matrices stay in fp32.

        Args:
            adapter_name: the adapter; ignored if it has no slots here.
            device: the new device; None for no change.
            dtype: the new dtype of parameters; None for no change.
        """
        if adapter_name not in self.snnk_slots:
            return
        for module in self.snnk_slots[adapter_name].modules():
            for parameter in module.parameters(recurse=False):
                if parameter.device.type != "meta":
                    parameter.data = parameter.data.to(device, dtype)
            for name, buffer in list(module.named_buffers(recurse=False)):
                if buffer.device.type != "meta":
                    setattr(module, name, buffer.to(device))

    def _move_adapter_to_device_of_base_layer(self, adapter_name: str, device: torch.device | None = None) -> None:
        target = device if device is not None else place_of(self.base_layer)
        if target is not None:
            self.move_to(adapter_name, target, None)

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        """Unsupported: a non-linear layer cannot be added to a weight."""
        raise ConfigError("SNNK layers are not linear and cannot be merged in place; use snnk_peft.bundle(model)")

    def unmerge(self) -> None:
        raise ConfigError("SNNK layers are never merged; there is nothing to unmerge")

    def supports_lora_conversion(self, adapter_name: str = "default") -> bool:
        """Return False: the change is not a low-rank addition to a weight."""
        return False


def original_path(path: str) -> str:
    """Return the path of a module in the unpatched model, without PEFT's prefix and the wrappers around it."""
    return path.removeprefix("base_model.model.").replace(".base_layer.", ".")


def root_of(model: nn.Module) -> Any:
    """Return the model inside PEFT's wrapper."""
    return model.get_base_model() if isinstance(model, PeftModel) else model


def is_saved_in_full(module: nn.Module) -> bool:
    """Return True if adapters train copies of the module (PEFT's modules_to_save)."""
    return isinstance(module, ModulesToSaveWrapper)


def is_of_an_adapter(module: nn.Module) -> bool:
    """Return True if the module is wrapped by an adapter of any PEFT method."""
    return isinstance(module, (BaseTunerLayer, AuxiliaryTrainingWrapper))


def saved_in_full(module: nn.Module) -> nn.Module:
    """Return the active copy of a module that adapters save in full, or its original; any other module itself."""
    if not isinstance(module, ModulesToSaveWrapper):
        return module
    return module.original_module if module.disable_adapters else active_module(module)


def active_module(module: nn.Module) -> nn.Module:
    """Return the module in use inside the wrappers: the trained copy of modules_to_save, or the original."""
    if isinstance(module, ModulesToSaveWrapper):
        active = module.active_adapter
        name = active if isinstance(active, str) else next(iter(active), "")
        if name in module.modules_to_save:
            return module.modules_to_save[name]
        return module.original_module
    if isinstance(module, SlotLayer):
        copied = next((slot.module for slot in module.active_slots() if isinstance(slot, Retrained)), None)
        return unwrap(module) if copied is None else copied
    return unwrap(module)


class FirstForward:
    """Forward hook of the model that warns once about slots that were not called, and removes itself.

    Args:
        adapter_name: the adapter whose slots are checked.
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
        # Compiled layers do not record calls.
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
    """Run the hooks where PEFT calls the model without them."""
    for hook in list(model._forward_hooks.values()):
        if isinstance(hook, FirstForward):
            hook(model)


def warn_if_nothing_is_trained(config: SNNKConfig, model: nn.Module, adapter_name: str) -> None:
    """Warn if a new adapter has nothing to train, unless the config asks for it (`modules_to_save=[]`).

    Args:
        config: the config as completed by the tuner.
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
