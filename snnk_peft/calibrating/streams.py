"""The difference between the residual streams of the original and the converted model, after a replaced module.

A block is fitted to the original's contribution to the stream and, in addition, to the errors of earlier blocks. The
streams are compared at the sum that the module's output enters: S = residual + y before the next norm. It is found by
perturbation: a change of y arrives there unchanged, with something else added. A module whose output enters no sum
(queries, a pooler, a branch with a scale of its own) is compared at its output.

    missing = S of the original − S of the converted model with the original in this place alone
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from snnk_peft.layers.slots import Retrained, Slot
from snnk_peft.parts.attention.slots import Attend
from snnk_peft.tuner.slot_layer import SlotLayer

NEAR, MOST = 0.05, 0.98  # tensors are equal if most entries differ by less than this; in bf16 no two would be equal
LARGE = 30.0  # times the output's standard deviation: a change that stands out from the rounding of the sum


class Place(NamedTuple):
    """Place where a stream is read.

    Args:
        module: a module of the model.
        before: read its input instead of its output.
    """

    module: nn.Module
    before: bool = False


class Found(Exception):  # noqa: N818 - control flow, not an error
    """Exception that ends a forward pass after the place."""


def stands_in(slot: Slot) -> bool:
    """Return whether a slot approximates the original's output."""
    if isinstance(slot, Retrained):
        return False
    return slot.replaces or isinstance(slot, Attend) or type(slot).fitter is not Slot.fitter


@contextlib.contextmanager
def originals(layers: Mapping[str, SlotLayer]) -> Iterator[None]:
    """Run the originals of these layers instead of their replacements in a context; adapters stay active."""
    before = {layer: layer.held_back for layer in layers.values()}
    for layer in before:
        layer.held_back = frozenset(slot for slot in layer.active_slots() if stands_in(slot))
    try:
        yield
    finally:
        for layer, slots in before.items():
            layer.held_back = slots


@contextlib.contextmanager
def reading(place: Place, seen: list[Tensor], stop: bool = True) -> Iterator[None]:
    """Record the values at a place in a context; with `stop`, a pass ends there with `Found`."""

    def note(value: Any) -> None:
        seen.append(first_of(value))
        if stop:
            raise Found

    if place.before:
        hook = place.module.register_forward_pre_hook(
            lambda module, args, kwargs: note((*args, *kwargs.values())), with_kwargs=True
        )
    else:
        hook = place.module.register_forward_hook(lambda module, args, output: note(output))
    try:
        yield
    finally:
        hook.remove()


def sum_behind(model: nn.Module, path: str, layer: nn.Module, run: Callable[[], object]) -> Place:
    """Find the sum inside a Transformer layer that the output of the module at `path` enters, or else use its output.

    Args:
        model: the model that holds `path`.
        path: path of a module that runs once per pass.
        layer: the layer to search for a sum.
        run: runs a forward pass.
    """
    module = model.get_submodule(path)
    first, second = (_tried(module, layer, run, change) for change in (0.0, LARGE))
    own, change = first[0][1], second[0][1] - first[0][1]
    for (place, one), (_, other) in zip(first[1:], second[1:], strict=False):
        if one.shape == own.shape and _equal(other - one, change) and not _equal(one, own):
            return place
    return Place(module)


def _equal(one: Tensor, other: Tensor) -> bool:
    size = float(other.square().mean().sqrt())
    return float(((one - other).abs() <= NEAR * size).float().mean()) >= MOST


def _tried(module: nn.Module, layer: nn.Module, run: Callable[[], object], scale: float) -> list[tuple[Place, Tensor]]:
    """Return the module's output with a pattern added, `scale` times as large, and the inputs of all later modules."""
    seen: list[tuple[Place, Tensor]] = []

    def change(of: nn.Module, args: Any, output: Any) -> Any:
        value = first_of(output)
        pattern = torch.linspace(-1, 1, value.shape[-1], device=value.device, dtype=torch.float32).sin()
        changed = value + (scale * value.detach().float().std() * pattern).to(value)
        seen.append((Place(module), changed.float()))
        return (changed, *output[1:]) if isinstance(output, tuple) else changed

    def before(of: nn.Module, args: Any, kwargs: Any) -> None:
        values = [each for each in (*args, *kwargs.values()) if isinstance(each, Tensor) and each.is_floating_point()]
        if seen and values:
            seen.append((Place(of, before=True), values[0].float()))

    def behind(of: nn.Module, args: Any, output: Any) -> None:
        if seen:
            seen.append((Place(of), first_of(output).float()))
        raise Found

    with contextlib.ExitStack() as hooks:
        hooks.enter_context(module.register_forward_hook(change))
        for each in layer.modules():
            if each is not module and each is not layer:
                hooks.enter_context(each.register_forward_pre_hook(before, with_kwargs=True))
        if layer is not module:
            hooks.enter_context(layer.register_forward_hook(behind))
        with contextlib.suppress(Found), torch.no_grad():
            run()
    return seen


def first_of(value: Any) -> Tensor:
    """Return the hidden state among the inputs or outputs of a module."""
    if isinstance(value, Tensor):
        return value
    return next(each for each in value if isinstance(each, Tensor) and each.is_floating_point())
