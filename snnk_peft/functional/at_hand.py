"""Tensors that are kept elsewhere (accelerate's offload to memory or disk), brought here for a while.

accelerate's hooks bring a module's own tensors when that module is called, and take them away afterwards; in between
they are on the meta device, where products are computed without complaint and hold garbage. A feature map, though, is
one formula over the tensors of several modules (its matrix, its component): so whoever evaluates it brings the tensors
of all of them first, by the same hooks, and keeps them until it is done.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from torch import nn

Function = TypeVar("Function", bound=Callable[..., Any])


class _NothingToDo:
    """Stands in for a hook whose tensors are here already: calling the module, or a copy, must not take them away."""

    no_grad = False

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        return args, kwargs

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        return output

    def detach_hook(self, module: nn.Module) -> nn.Module:
        return module


def offloaded(module: nn.Module) -> list[nn.Module]:
    """Modules in and below `module` whose tensors a hook of accelerate keeps elsewhere."""
    # A walk of its own: `modules()` takes longer than what a layer computes for one token.
    found, waiting = [], [module]
    while waiting:
        part = waiting.pop()
        if getattr(part.__dict__.get("_hf_hook"), "offload", False):
            found.append(part)
        waiting.extend(child for child in part._modules.values() if child is not None)
    return list(dict.fromkeys(found))


def place_of(module: nn.Module) -> torch.device | None:
    """Return the device on which a module computes: that of its first parameter, or the one it is brought to; None if
    unknown."""
    place = next((parameter.device for parameter in module.parameters()), None)
    if place is None or place.type != "meta":
        return place
    hooks: list[Any] = [part._hf_hook for part in offloaded(module)]
    return torch.device(hooks[0].execution_device) if hooks and hooks[0].execution_device is not None else None


def at_hand(module: nn.Module) -> contextlib.AbstractContextManager[None]:
    """A context in which all tensors in and below `module` can be read directly."""
    away = offloaded(module)
    return _brought(away) if away else contextlib.nullcontext()


def wide_on_cpu(tensor: torch.Tensor) -> torch.Tensor:
    """The values in fp32 on the CPU; on the meta device an empty tensor of that shape."""
    wide = tensor.detach().float()
    return wide if wide.is_meta else wide.cpu()


def tensors_at_hand(function: Function) -> Function:
    """For a method of a module, or a function of one: within it, all tensors in and below the module are at hand."""

    @functools.wraps(function)
    def with_tensors(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with at_hand(module):
            return function(module, *args, **kwargs)

    return with_tensors  # type: ignore[return-value]


@contextlib.contextmanager
def _brought(modules: list[nn.Module]) -> Iterator[None]:
    hooks: list[Any] = [module._hf_hook for module in modules]
    for module, hook in zip(modules, hooks, strict=True):
        hook.pre_forward(module)
        module._hf_hook = _NothingToDo()  # type: ignore[assignment]
    try:
        yield
    finally:
        for module, hook in zip(modules, hooks, strict=True):
            module._hf_hook = hook
            hook.post_forward(module, None)
