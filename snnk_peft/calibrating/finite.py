"""NaN and infinity: in which parameter they are, or in which layer they begin."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from snnk_peft.calibrating.batches import evaluating
from snnk_peft.calibrating.padding import masked_tokens, named_padding
from snnk_peft.tuner.slot_layer import SlotLayer, original_path, saved_in_full

SHOWN = 4  # parameters that are named


def refuse_not_finite(model: nn.Module, replaced: bool = True) -> None:
    """ValueError if a parameter in use holds NaN or infinity.

    Args:
        model: plain or patched; the slots of adapters that are not active do not count.
        replaced: whether the originals of modules that a slot replaces are in use, as they are when it is fitted.
    """
    found = [
        f"{path} holds {_what(value)} in {int((~value.isfinite()).sum())} of {value.numel():,} numbers"
        for path, value in _in_use(model, "", replaced)
        if value.is_floating_point() and value.device.type != "meta" and not bool(value.detach().isfinite().all())
    ]
    if found:
        more = f"; and {len(found) - SHOWN} more" if len(found) > SHOWN else ""
        raise ValueError(
            f"{'; '.join(found[:SHOWN])}{more}; expected finite numbers. A training that diverged, an overflow in fp16 "
            "or a head that was never initialised leave such weights: load or train it again"
        )


def refuse_overflow(model: nn.Module, inputs: Mapping[str, Any], what: str) -> None:
    """ValueError if an output of the model is NaN or infinite for some inputs, with the module where that begins.

    Args:
        model: of finite weights.
        inputs: its keyword arguments.
        what: they are, for the message.
    """
    first: list[str] = []
    hooks = [
        module.register_forward_hook(
            lambda module, args, output, path=path: None if first or _finite(output) else first.append(path)
        )
        for path, module in model.named_modules()
    ]
    try:
        with torch.no_grad(), evaluating(model), named_padding(model, masked_tokens(inputs)):
            outputs = model(**inputs)
    finally:
        for hook in hooks:
            hook.remove()
    wrong = [name for name, value in outputs.items() if not _finite(value)]
    if wrong:
        where = _plain(first[0]) if first else type(model).__name__
        raise ValueError(
            f"{what}: the model's {', '.join(wrong)} hold NaN or infinity, which begins in the output of "
            f"{where or type(model).__name__}; expected finite numbers. Look at these inputs, or run the model in fp32 "
            "or bf16"
        )


def _in_use(module: nn.Module, path: str, replaced: bool) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(module, SlotLayer):
        slots = module.active_slots()
        for slot in slots:
            for name, value in slot.named_parameters():
                yield f"{_plain(path)} ({name} of the adapter)", value
        if replaced or not any(slot.replaces for slot in slots):
            yield from _in_use(module.base_layer, path, replaced)
        return
    module = saved_in_full(module)
    for name, value in module.named_parameters(recurse=False):
        yield f"{_plain(path)}.{name}".removeprefix("."), value
    for name, child in module.named_children():
        yield from _in_use(child, f"{path}.{name}".removeprefix("."), replaced)


def _plain(path: str) -> str:
    """The path in the unpatched model."""
    return original_path(path.removeprefix("base_model.model."))


def _what(value: torch.Tensor) -> str:
    return "NaN" if bool(value.detach().isnan().any()) else "infinity"


def _finite(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return not value.is_floating_point() or bool(value.isfinite().all())
    if isinstance(value, Mapping):
        value = list(value.values())
    return all(map(_finite, value)) if isinstance(value, (tuple, list)) else True
