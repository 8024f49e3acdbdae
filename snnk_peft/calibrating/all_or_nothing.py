"""Transactions on a model: either all of its step-by-step changes are made, or none.

Of tensors, only those that are written to are kept: those of the active slots, or what the caller names. Of everything
else that a module holds (hooks, flags, whose attention it asks for), the references are, of every module of the model.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from snnk_peft.tuner.slot_layer import SlotLayer


@contextlib.contextmanager
def all_or_nothing(model: nn.Module, written: Iterable[torch.Tensor] | None = None) -> Iterator[None]:
    """Whatever ends the block early, an error or Ctrl-C, the model leaves it bit for bit as it entered.

    Args:
        model: any model.
        written: the tensors that the block may write to; None for those of the active slots.
    """
    before = _Before(model, _slot_tensors(model) if written is None else written)
    try:
        yield
    except BaseException:
        while True:
            try:
                before.restore()
                break
            except KeyboardInterrupt:  # once more, from the start; the first one is raised below
                continue
        raise


class _Before:
    """A model at one moment; arguments as for `all_or_nothing`."""

    def __init__(self, model: nn.Module, written: Iterable[torch.Tensor]):
        self.modules = [_Attributes(module) for module in model.modules()]
        tensors = {id(tensor): tensor for tensor in written}
        self.tensors = [_Tensor(tensor) for tensor in tensors.values()]

    def restore(self) -> None:
        """Put everything back; may be interrupted and begun again."""
        for module in self.modules:
            module.restore()
        for tensor in self.tensors:
            tensor.restore()
        torch.clear_autocast_cache()


class _Attributes:
    """References of one module; its dicts (of hooks, parameters, children) stay the same objects."""

    def __init__(self, module: nn.Module):
        self.module, self.values = module, dict(vars(module))
        self.inside = {name: dict(value) for name, value in self.values.items() if isinstance(value, dict)}

    def restore(self) -> None:
        for name, content in self.inside.items():
            _become(self.values[name], content)
        _become(vars(self.module), self.values)


class _Tensor:
    """Saves the values of one tensor, its gradient and whether it has one."""

    def __init__(self, tensor: torch.Tensor):
        self.tensor, self.values = tensor, tensor.detach().clone()
        self.trained, self.gradient = tensor.requires_grad, tensor.grad

    def restore(self) -> None:
        self.tensor.requires_grad_(self.trained)
        self.tensor.grad = self.gradient
        with torch.no_grad():
            self.tensor.copy_(self.values)


def _become(target: dict[Any, Any], content: dict[Any, Any]) -> None:
    if list(target) != list(content) or any(target[key] is not value for key, value in content.items()):
        target.clear()
        target.update(content)


def _slot_tensors(model: nn.Module) -> Iterator[torch.Tensor]:
    for layer in model.modules():
        if isinstance(layer, SlotLayer):
            for slot in layer.active_slots():
                yield from slot.parameters()
                yield from slot.buffers()
