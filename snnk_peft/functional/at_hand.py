"""Temporary access to tensors that are kept elsewhere (accelerate's offload to memory or disk).

accelerate's hooks load a module's own tensors when that module is called, and unload them afterwards; between calls
they are on the meta device, where products are computed silently and hold garbage. A feature map, though, is
one formula over the tensors of several modules (its matrix, its component): so its caller loads the tensors
of all of them first, by the same hooks, and keeps them until the evaluation is done.
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
    """Replaces a hook whose tensors are already loaded: calling the module, or a copy, must not unload them."""

    no_grad = False

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        return args, kwargs

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        return output

    def detach_hook(self, module: nn.Module) -> nn.Module:
        return module


def offloaded(module: nn.Module) -> list[nn.Module]:
    """Return the modules in and below `module` whose tensors a hook of accelerate keeps elsewhere."""
    # An explicit walk: `modules()` takes longer than a layer's computation for one token.
    found, waiting = [], [module]
    while waiting:
        part = waiting.pop()
        if getattr(part.__dict__.get("_hf_hook"), "offload", False):
            found.append(part)
        waiting.extend(child for child in part._modules.values() if child is not None)
    return list(dict.fromkeys(found))


def place_of(module: nn.Module) -> torch.device | None:
    """Return the device on which a module computes: that of its first parameter, or the one it is loaded to; None if
    unknown."""
    place = next((parameter.device for parameter in module.parameters()), None)
    if place is None or place.type != "meta":
        return place
    hooks: list[Any] = [part._hf_hook for part in offloaded(module)]
    return torch.device(hooks[0].execution_device) if hooks and hooks[0].execution_device is not None else None


def at_hand(module: nn.Module) -> contextlib.AbstractContextManager[None]:
    """Return a context in which all tensors in and below `module` can be read directly."""
    away = offloaded(module)
    return _brought(away) if away else contextlib.nullcontext()


def wide_on_cpu(tensor: torch.Tensor) -> torch.Tensor:
    """Return the values in fp32 on the CPU; on the meta device an empty tensor of that shape."""
    wide = tensor.detach().float()
    return wide if wide.is_meta else wide.cpu()


def tensors_at_hand(function: Function) -> Function:
    """Decorate a method of a module, or a function of one, to have all tensors in and below the module at hand."""

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
