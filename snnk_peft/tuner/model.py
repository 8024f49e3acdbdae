"""SNNKModel: the PEFT tuner. Plans all parts, then wraps each planned module in a `SlotLayer`.

Everything PEFT users know works on the result: several named adapters, set/disable/delete, modules_to_save,
adapter-only checkpoints, AutoPeftModel, Trainer. One difference: a replacing part (pooler, FFN) is initially an
approximation, not the identity; `calibrate` makes it a good one.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
from accelerate import init_empty_weights
from peft.tuners.tuners_utils import BaseTuner
from torch import nn

from snnk_peft.config import SNNKConfig
from snnk_peft.errors import ConfigError, UnsupportedError
from snnk_peft.families import known_family
from snnk_peft.families.base import ModelFamily, module_at, unwrap
from snnk_peft.functional.at_hand import place_of
from snnk_peft.heads.features import HEAD
from snnk_peft.layers.slots import Retrained, Slot
from snnk_peft.parts import PARTS
from snnk_peft.parts.base import Part, Patch, PatchContext
from snnk_peft.tuner.base_model import (
    base_digests,
    check_measurements,
    measurements,
    note_another_base,
    note_labels,
    take_labels,
)
from snnk_peft.tuner.checkpoint import check_size, check_weights, clashes, plain_start
from snnk_peft.tuner.doors import open_door
from snnk_peft.tuner.given_model import refuse_prepared
from snnk_peft.tuner.row_adapters import refuse_rows, rows_of, rows_through
from snnk_peft.tuner.saving import guard_save, name_faults, put_back, release_save
from snnk_peft.tuner.slot_layer import (
    SlotLayer,
    original_path,
    run_watchers,
    warn_if_nothing_is_trained,
    watch_first_forward,
)


def plan_patches(model: nn.Module, config: SNNKConfig, filled: bool = False) -> list[Patch]:
    """Plan all patches of all parts, without changing the model.

    Raises:
        ConfigError, UnsupportedError: all faults of all parts in one error.
    """
    patches: list[Patch] = []
    taken: dict[str, list[tuple[str, Part, Patch]]] = {}
    faults: list[str] = []
    unsupported: list[str] = []
    for name, part in config.named_parts().items():
        try:
            if hasattr(model, "config"):
                part.check_model(model)  # gives more detail than an unknown architecture
            planned = part.plan(PatchContext(model, config.seed, config.save_projection, where=name, filled=filled))
        except ConfigError as error:
            faults += error.faults
        except UnsupportedError as error:
            unsupported.append(str(error))
        else:
            if not planned:
                faults.append(f"{name} changes nothing in {type(model).__name__}; leave it out, or name other modules")
            for patch in planned:
                taken.setdefault(patch.path, []).append((name, part, patch))
            patches += planned
    faults += [fault for path, several in taken.items() if (fault := _clash(path, several))]
    if faults:
        raise ConfigError(faults + unsupported)
    if unsupported:
        raise UnsupportedError("; ".join(dict.fromkeys(unsupported)))
    return patches


def _clash(path: str, several: list[tuple[str, Part, Patch]]) -> str | None:
    several = [entry for entry in several if entry[2].build is not None]
    for index, (name, part, patch) in enumerate(several):
        for other, second, change in several[:index]:
            both_replace = patch.replaces and change.replaces
            if name != other and (both_replace or type(part) is type(second)):
                what = "replace" if both_replace else "change in the same way"
                return f"{other} and {name} both {what} {path!r}; give them different layers, or leave one out"
    return None


def quantized_faults(model: nn.Module, saved: list[str]) -> list[str]:
    """List faults of modules trained in full, such as the task head, that have quantized weights."""
    by_transformers = getattr(model, "is_quantized", False)
    return [
        f"{name} is trained in full and holds quantized weights ({type(value.data).__name__}, {value.dtype}); expected "
        f"floating point. Load the model with a quantization_config that leaves {name!r} out (modules_to_not_convert, "
        "of bitsandbytes llm_int8_skip_modules), or give modules_to_save=[]"
        for name, module in model.named_modules()
        if any(name == end or name.endswith(f".{end}") for end in saved)
        for value in list(module.parameters())[:1]
        if not value.is_floating_point() or (by_transformers and type(value.data) is not torch.Tensor)
    ]


def build_slots(patches: list[Patch]) -> dict[str, list[Slot]]:
    """Build the slots that the patches ask for, by path, innermost first."""
    slots: dict[str, list[Slot]] = {}
    for patch in patches:
        if patch.build is not None:
            slots.setdefault(patch.path, []).append(patch.build())
    return slots


class SNNKModel(BaseTuner):
    """PEFT tuner of a patched model; create it with `get_snnk_model` or `peft.get_peft_model`."""

    prefix = "snnk_"
    tuner_layer_cls = SlotLayer
    target_module_mapping: dict[str, Any] = {}  # noqa: RUF012 - PEFT's attribute; families do this job

    _making: Callable[[], contextlib.AbstractContextManager[Any]]
    _adding: str

    def __init__(self, model: nn.Module, peft_config: Any, adapter_name: str, *args: Any, **kwargs: Any):
        known = set(getattr(model, "peft_config", ()))
        try:
            super().__init__(model, peft_config, adapter_name, *args, **kwargs)
        except BaseException:  # Ctrl-C too
            # transformers registers the adapter before creating it.
            if getattr(model, "_hf_peft_config_loaded", False):
                noted: Any = getattr(model, "peft_config", {})
                for name in set(noted) - known:
                    del noted[name]
                model._hf_peft_config_loaded = bool(noted)  # type: ignore[assignment]
            raise

    def _prepare_adapter_config(self, peft_config: Any, model_config: dict) -> Any:
        return peft_config  # the targets follow from the parts: see _prepare_model

    def _prepare_model(self, peft_config: Any, model: nn.Module) -> None:
        refuse_prepared(model, peft_config.named_parts().values())
        for part in peft_config.named_parts().values() if hasattr(model, "config") else ():
            part.check_model(model)  # gives more detail than that modules are elsewhere
        family = known_family(model)
        sizes = measurements(model, family)
        check_measurements(peft_config, sizes)
        patches = plan_patches(model, peft_config)
        extra = [patch.path for patch in patches if patch.train]
        saved = modules_to_save(peft_config, model, family, extra)
        places = {patch.path for patch in patches if patch.build is not None}
        # PEFT matches modules_to_save by suffix: "classifier" would also match a changed "pre_classifier".
        copied = [n for n in saved or () if any(p != n and p.endswith(n) for p in places) and n in module_names(model)]
        within = {patch.path for patch in patches if patch.around_head}
        copied += sorted(within & {*(saved or ()), *(peft_config.trained_within or ())})
        head = None if family is None or family.classifier is None else family.path(model, family.classifier)
        if head is not None and head in (peft_config.target_modules or ()) and head not in {*places, *copied}:
            copied.append(head)  # a loaded config, written after `head` was removed from modules_to_save
        saved = [name for name in saved or () if name not in copied] or None
        others = cast(dict[str, SNNKConfig], {k: v for k, v in self.peft_config.items() if k != self._adding})
        held = {*(saved or ()), *(target for one in others.values() for target in one.modules_to_save or ())}
        faults = name_faults(self._adding, held) + quantized_faults(model, [*(saved or ()), *copied])
        faults += [fault for one in others for fault in name_faults(one, saved or ())]
        if faults := faults + clashes(model, places | set(copied), saved):
            raise ConfigError(faults)
        # Build everything, and compare it with the checkpoint, before changing the first module.
        door = open_door()
        incoming = None if door is None else door.incoming()
        if incoming is not None:
            with torch.device("meta"):
                check_size(build_slots(plan_patches(model, plain_start(peft_config))), incoming)
            patches = plan_patches(model, peft_config, filled=True)
        with self._making():
            slots = build_slots(patches)
        for name in copied:
            slots.setdefault(name, []).insert(0, Retrained(module_at(model, name, "modules_to_save")))
        if incoming is not None:
            check_weights(peft_config, model, slots, saved, incoming)
        base = base_digests(model, saved)
        if door is not None:
            note_another_base(peft_config, base, model)
        if door is None or not peft_config.inference_mode:
            peft_config.base_digests = base
        self._slots = slots
        peft_config.target_modules = tuple(sorted(slots))
        # Keep an empty list: null would mean the classifier when the adapter is loaded.
        peft_config.modules_to_save = [] if saved is None and peft_config.modules_to_save is not None else saved
        peft_config.trained_within = sorted(within & set(copied)) or None
        peft_config.made_for = sizes

    @staticmethod
    def _check_target_module_exists(peft_config: Any, key: str) -> bool:
        return original_path(key) in peft_config.target_modules

    def inject_adapter(
        self,
        model: nn.Module,
        adapter_name: str,
        autocast_adapter_dtype: bool = True,
        low_cpu_mem_usage: bool = False,
        state_dict: dict[str, torch.Tensor] | None = None,
    ) -> None:
        """Inject an adapter as PEFT does, but also inside layers wrapped by an earlier adapter, which PEFT skips."""
        if torch.is_inference_mode_enabled() and not self.peft_config[adapter_name].inference_mode:
            raise ConfigError(
                "an adapter is made inside torch.inference_mode(), where nothing is made that can be trained; leave "
                "it, or call get_snnk_model, which does"
            )
        # PEFT creates the modules of other methods while it traverses the model; ours are created before.
        self._making = init_empty_weights if low_cpu_mem_usage else contextlib.nullcontext
        self._adding = adapter_name
        patched = any(isinstance(module, SlotLayer) for module in model.modules())
        trained = [(parameter, parameter.requires_grad) for parameter in model.parameters()] if patched else []
        super().inject_adapter(model, adapter_name, autocast_adapter_dtype, low_cpu_mem_usage, state_dict)
        guard_save(model)
        for path in list(self._slots):
            parent, _, name = path.rpartition(".")
            places = model.get_submodule(path), name, model.get_submodule(parent)
            self._create_and_replace(self.peft_config[adapter_name], adapter_name, *places, current_key=path)
        # As in PEFT, except for parameters whose path happens to contain the new adapter's name.
        for parameter, requires_grad in trained:
            parameter.requires_grad = requires_grad
        warn_if_nothing_is_trained(cast(SNNKConfig, self.peft_config[adapter_name]), model, adapter_name)
        watch_first_forward(model, adapter_name)
        by_transformers = getattr(model, "_hf_peft_config_loaded", False)
        if by_transformers and refuse_rows not in model._forward_pre_hooks.values():
            model.register_forward_pre_hook(refuse_rows, with_kwargs=True)
        if open_door() is not None:
            take_labels(cast(SNNKConfig, self.peft_config[adapter_name]), model)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model as PEFT does, which bypasses its hooks."""
        output = super().forward(*args, **kwargs)
        run_watchers(self.model)
        return output

    @contextlib.contextmanager
    def _enable_peft_forward_hooks(self, *args: Any, **kwargs: Any) -> Iterator[None]:
        """Handle `adapter_names`, an adapter per row, in forward and generate; PEFT's hook for it."""
        names = kwargs.get("adapter_names")
        if names is None:
            yield
        else:
            with rows_through(self.model, names, self.peft_config, rows_of(self.model, args, kwargs)):
                yield

    def add_weighted_adapter(self, *args: Any, **kwargs: Any) -> None:
        """Unsupported: a weighted sum of two non-linear adapters is not an adapter with averaged tensors."""
        raise UnsupportedError(
            "add_weighted_adapter was called on SNNK adapters; expected adapters that are added to a weight, such as "
            "LoRA's. Non-linear ones have feature matrices of their own, and the mean of their readouts fits neither. "
            "Activate several at once, set_adapter([...]), where they change different modules or follow each other"
        )

    def _create_and_replace(
        self,
        peft_config: Any,
        adapter_name: str,
        target: nn.Module,
        target_name: str,
        parent: nn.Module,
        current_key: str,
        parameter_name: str | None = None,
    ) -> None:
        if isinstance(target, SlotLayer):
            layer = target
        else:
            layer = SlotLayer(target)
        slots = self._slots.pop(original_path(current_key))
        for slot in slots:
            layer.add_slot(adapter_name, slot)
        layer.train(layer.base_layer.training)
        home: nn.Module = self.model if next(parent.parameters(), None) is None else parent
        dtype = next(home.parameters()).dtype
        layer.move_to(adapter_name, place_of(home), dtype if dtype.is_floating_point else None)
        layer.set_adapter(self.active_adapters, inference_mode=peft_config.inference_mode)
        if layer is not target:
            setattr(unwrap(parent), target_name, layer)
        for slot in slots:
            slot.placed(layer, self.model)

    def _unload_and_optionally_merge(self, *args: Any, **kwargs: Any) -> Any:
        model: Any = super()._unload_and_optionally_merge(*args, **kwargs)
        for module in list(model.modules()):  # PEFT does not look inside the layers that it removes
            for name, child in list(module.named_children()):
                if isinstance(child, SlotLayer):
                    setattr(module, name, unwrap(child))
        release_save(model)
        for name in PARTS:
            PARTS[name].taken_out(model)
        return model

    def _replace_module(self, parent: nn.Module, child_name: str, new_module: nn.Module, child: nn.Module) -> None:
        setattr(parent, child_name, new_module)

    def delete_adapter(self, adapter_name: str) -> None:
        """Remove an adapter; if it was in use, use the first remaining one everywhere."""
        was_active = adapter_name in self.active_adapters
        super().delete_adapter(adapter_name)
        if was_active and self.peft_config:
            # Adapters may have parts in different places, and PEFT lets each place choose its own successor.
            rest = [name for name in self.active_adapters if name in self.peft_config]
            self.set_adapter(rest or next(iter(self.peft_config)))

    def _check_merge_allowed(self) -> None:
        raise ConfigError("SNNK layers cannot be merged into the base weights; use snnk_peft.bundle(model)")

    @classmethod
    def _get_adapter_state_dict(
        cls,
        model: nn.Module,
        config: Any,
        adapter_name: str,
        state_dict: dict[str, torch.Tensor],
        unwanted_adapter_names: list[str],
    ) -> dict[str, torch.Tensor]:
        # PEFT goes on to use this dict for modules_to_save and embeddings.
        put_back(model, adapter_name, state_dict, unwanted_adapter_names)
        note_labels(config, model)
        return {key: value for key, value in state_dict.items() if f".snnk_slots.{adapter_name}." in key}

    @classmethod
    def _remove_adapter_name_from_key(cls, key: str, adapter_name: str) -> str:
        return re.sub(rf"\.snnk_slots\.{re.escape(adapter_name)}\.", ".snnk_slots.", key)


# Attributes of task models under which transformers keeps a head that was not pretrained.
HEADS = ("classifier", "score", "qa_outputs", "cls_classifier", "distillation_classifier", HEAD)


def module_names(model: nn.Module) -> set[str]:
    """Return the paths of all modules."""
    return {name for name, _ in model.named_modules()}


def modules_to_save(
    config: SNNKConfig, model: nn.Module, family: ModelFamily | None, extra: list[str]
) -> list[str] | None:
    """Return the modules to train and save in full: the config's list or the task head, and those added by parts."""
    classifier, output = (None, None) if family is None else (family.classifier, family.head_output)
    inside = output is not None and any(part.holds_head for part in config.named_parts().values())
    if config.modules_to_save is None:
        head = output if inside else classifier
        path = None if head is None or family is None else family.path(model, head)
        present = path in module_names(model) and not isinstance(model.get_submodule(str(path)), nn.Identity)
        names = [path] if present and path is not None else []
        # The head of another task (token classes, answers) is as new as the family's own; names do not differ.
        own = {name for name, part in model.named_children() if not isinstance(part, nn.Identity)} - {classifier}
        if family is None or classifier is not None:  # None: the family trains no head along
            names += [name for name in HEADS if name in own and name not in names]
    else:
        names = list(config.modules_to_save)
        if classifier in names and hasattr(model, HEAD):  # PEFT adds the classifier for its task type SEQ_CLS
            names = list(dict.fromkeys(HEAD if name == classifier else name for name in names))
        if output is not None and inside and classifier in names:
            # The head holds the replaced pooler; only its last layer can also be saved in full.
            names = [output if name == classifier else name for name in names]
    return names + [path for path in extra if path not in names] or None
