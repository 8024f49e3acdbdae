"""How far the original's stream is ahead of the converted model's, where a replaced module writes into it.

What a block adds is fitted to what the original adds and, beside that, to what earlier blocks left out. The place to
compare is the sum that the module's output enters: S = residual + y before the next norm. It is found by trying: a
change of y comes out there unchanged, and with it something else. A module whose output enters no sum (queries, a
pooler, a branch with a scale of its own) is compared at its output.

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

NEAR, MOST = 0.05, 0.98  # two tensors are equal if most numbers differ by less than this; in bf16 no two would be
LARGE = 30.0  # times the output's deviation: a change that stands out from the rounding of what it is added to


class Place(NamedTuple):
    """Where a stream is read.

    Args:
        module: a module of the model.
        before: its input is read, not its output.
    """

    module: nn.Module
    before: bool = False


class Found(Exception):  # noqa: N818 - control flow, not an error
    """Ends a forward pass behind the place."""


def stands_in(slot: Slot) -> bool:
    """Return True if a slot computes, up to an error, what the original does."""
    if isinstance(slot, Retrained):
        return False
    return slot.replaces or isinstance(slot, Attend) or type(slot).fitter is not Slot.fitter


@contextlib.contextmanager
def originals(layers: Mapping[str, SlotLayer]) -> Iterator[None]:
    """Hold back in a context what stands in for the originals of these layers; adapters go on."""
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
    """Note what comes by at a place; with `stop`, a pass ends there with `Found`."""

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
    """The sum that the output of the module at `path` enters inside a Transformer layer, or else its output.

    Args:
        model: that holds `path`.
        path: of a module that runs once in a pass.
        layer: in which a sum is looked for.
        run: a forward pass.
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
    """The module's output, changed by a pattern of the size `scale` times its own, and what later modules are given."""
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
    """The hidden state among what a module is given or gives."""
    if isinstance(value, Tensor):
        return value
    return next(each for each in value if isinstance(each, Tensor) and each.is_floating_point())
