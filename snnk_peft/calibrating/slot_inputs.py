"""The inputs of a slot over all batches, from the stack as converted so far: the data of its fitter."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from snnk_peft.calibrating.batches import Survey, is_held_out, model_inputs
from snnk_peft.calibrating.stored_inputs import Run
from snnk_peft.errors import ConfigError
from snnk_peft.layers.slots import Call, Fitter
from snnk_peft.tuner.slot_layer import SlotLayer, root_of


class _Reached(Exception):  # noqa: N818 - control flow, not an error
    """Ends a forward pass at the slot whose input is wanted."""


def execution_order(model: nn.Module, slots: Mapping[str, SlotLayer], batches: Survey) -> dict[str, int]:
    """Slot names in the order in which a forward pass reaches them, and how often it does (shared layers: several)."""
    order: list[str] = []
    names = {layer: name for name, layer in slots.items()}
    hooks = [
        layer.register_forward_pre_hook(lambda module, args: order.append(names[module])) for layer in slots.values()
    ]
    try:
        with torch.no_grad():
            model(**model_inputs(model, next(iter(batches))[1]))
    finally:
        for hook in hooks:
            hook.remove()
    return Counter(order)


def _slot_calls(
    model: nn.Module, layer: SlotLayer, fitter: Fitter, runs: int, batches: Survey, bar: Any, run: Run
) -> Iterator[tuple[int, list[Call]]]:
    """Yield (batch index, calls of a slot) from the stack as it is now; stops each pass there.

    A layer that runs several times gives the inputs of all runs, with the original in its place: what the replacement
    would make of the earlier ones is not known before it is fitted.
    """
    caught: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def catch(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        caught.append((args, kwargs))
        if len(caught) == runs:
            raise _Reached

    hook = layer.register_forward_pre_hook(catch, with_kwargs=True)
    try:
        for index, batch in batches:
            inputs = model_inputs(model, batch)
            with torch.no_grad(), _as_it_was(model, layer, fitter.together, runs), contextlib.suppress(_Reached):
                run(index, inputs)
            if len(caught) < runs:
                raise ConfigError(
                    f"batch {index} runs it {len(caught)} times, and batch 0 {runs} times; expected batches of the "
                    "same kind of inputs"
                )
            mask = inputs.get("attention_mask")
            yield index, [Call(*each, mask) for each in caught]
            caught.clear()
            bar.update()
    finally:
        hook.remove()


@contextlib.contextmanager
def _as_it_was(model: nn.Module, layer: SlotLayer, together: Sequence[str], runs: int) -> Iterator[None]:
    """Restore the originals of a layer with several runs, and of the modules fitted with it, in a context."""
    inside: list[SlotLayer] = []
    if runs > 1:
        others = [root_of(model).get_submodule(path) for path in together]
        inside = [place for place in (layer, *others) if isinstance(place, SlotLayer)]
    for place in inside:
        place._disable_adapters = True
    try:
        yield
    finally:
        for place in inside:
            place._disable_adapters = False


class SlotInputs:
    """One streaming pass per iteration: (is it held out?, inputs of the slot, or its calls).

    Attributes:
        at: number of the batch that is looked at, None between passes.
    """

    def __init__(
        self,
        model: nn.Module,
        layer: SlotLayer,
        fitter: Fitter,
        runs: int,
        batches: Survey,
        held_out: float,
        bar: Any,
        start: Callable[[], AbstractContextManager[Run]],
    ):
        self.inputs, self.start = (model, layer, fitter, runs, batches, bar), start
        self.fitter, self.held_out = fitter, held_out
        self.at: int | None = None

    def __iter__(self) -> Iterator[tuple[bool, Any]]:
        self.at = 0
        with self.start() as run:
            for index, calls in _slot_calls(*self.inputs, run):
                self.at = index
                rows = torch.cat([self.fitter.rows(_first(call), call.mask) for call in calls])
                if wrong := int((~torch.isfinite(rows)).any(-1).sum()):
                    raise ValueError(
                        f"{wrong} of {len(rows)} inputs hold NaN or infinity; expected finite numbers. Look at this "
                        "batch, or run the model in fp32 or bf16"
                    )
                yield is_held_out(index, self.held_out), calls if self.fitter.calls else rows
                self.at = index + 1
        self.at = None


def _first(call: Call) -> torch.Tensor:
    """Return the first tensor among a module's arguments, positional or keyword."""
    return next(value for value in (*call.args, *call.kwargs.values()) if isinstance(value, torch.Tensor))
