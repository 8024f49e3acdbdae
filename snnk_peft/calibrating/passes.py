"""The passes over the batches for one slot: its inputs, from the stack as converted so far, and the difference between
the residual streams after it. Passes are shortened in stored_inputs.py.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from snnk_peft.calibrating.batches import Survey, is_held_out, model_inputs
from snnk_peft.calibrating.stored_inputs import Run
from snnk_peft.calibrating.streams import Found, Place, originals, reading
from snnk_peft.errors import ConfigError
from snnk_peft.functional.precision import wide
from snnk_peft.layers.slots import Call, Fitter, Given, real_tokens
from snnk_peft.tuner.slot_layer import SlotLayer, root_of


class _Reached(Exception):  # noqa: N818 - control flow, not an error
    """Exception that ends a forward pass at the slot whose input is wanted."""


def execution_order(model: nn.Module, slots: Mapping[str, SlotLayer], inputs: Mapping[str, Any]) -> dict[str, int]:
    """Return the names in the order in which a forward pass reaches them, with the number of calls of each."""
    order: list[str] = []
    names = {layer: name for name, layer in slots.items()}
    with contextlib.ExitStack() as hooks, torch.no_grad():
        for layer in names:
            hooks.enter_context(layer.register_forward_pre_hook(lambda module, args: order.append(names[module])))
        model(**inputs)
    return Counter(order)


@dataclass(frozen=True)
class Behind:
    """Place after a slot where the residual stream is compared with the original's.

    Args:
        place: the sum that the slot's output enters.
        converted: layers that are not fitted yet, including this slot and those fitted with it.
        all: every layer with a replacement.
        start: context that starts a pass of the original, like `start` of `SlotInputs`.
    """

    place: Place
    converted: Mapping[str, SlotLayer]
    all: Mapping[str, SlotLayer]
    start: Callable[[], AbstractContextManager[Run]]


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
    """Streaming passes, one per iteration, of (held out or not, inputs of the slot, or its calls, or a `Given`).

    A layer that runs several times yields the inputs of all runs, computed with the original in its place: the
    replacement's outputs of earlier runs are not known before it is fitted.

    Args:
        model: the patched model, with everything before the slot already fitted.
        layer: the layer that holds the slot.
        fitter: the slot's fitter.
        runs: number of calls of the layer per forward pass.
        batches: the batches to read.
        held_out: fraction of the batches that is not fitted.
        bar: the progress bar.
        start: context that starts a pass of the model.
        weights: function from a batch's index to its tokens' weights; None without a metric.
        behind: where the streams are compared; None if no earlier layer is converted.

    Attributes:
        at: index of the current batch, None between passes.
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
        weights: Callable[[int], torch.Tensor | None] | None = None,
        behind: Behind | None = None,
    ):
        self.model, self.layer, self.fitter, self.runs = model, layer, fitter, runs
        self.batches, self.held_out, self.bar, self.start = batches, held_out, bar, start
        self.weights, self.behind = weights, behind
        self.at: int | None = None
        self._reads = 0

    def __iter__(self) -> Iterator[tuple[bool, Any]]:
        self.at = 0
        behind = self.behind if self._reads >= self.fitter.missing_from else None
        self._reads += 1
        caught: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

        def catch(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if len(caught) == self.runs:
                return
            caught.append((args, kwargs))
            if len(caught) == self.runs and behind is None:
                raise _Reached

        with contextlib.ExitStack() as passes:
            run = passes.enter_context(self.start())
            whole = None if behind is None else passes.enter_context(behind.start())
            passes.enter_context(self.layer.register_forward_pre_hook(catch, with_kwargs=True))
            for index, batch in self.batches:
                self.at = index
                inputs = model_inputs(self.model, batch)
                sums = self._run(run, index, inputs, behind)
                if len(caught) < self.runs:
                    raise ConfigError(
                        f"batch {index} runs it {len(caught)} times, and batch 0 {self.runs} times; expected batches "
                        "of the same kind of inputs"
                    )
                calls = [Call(*each, inputs.get("attention_mask")) for each in caught]
                rows = torch.cat([self.fitter.rows(_first(call), call.mask) for call in calls])
                if wrong := int((~torch.isfinite(rows)).any(-1).sum()):
                    raise ValueError(
                        f"{wrong} of {len(rows)} inputs hold NaN or infinity; expected finite numbers. Look at this "
                        "batch, or run the model in fp32 or bf16"
                    )
                given: Any = calls if self.fitter.calls else rows
                if self.weights is not None:
                    weight = self.weights(index)
                    missing = None if whole is None else self._original(whole, index, inputs) - sums
                    given = Given(given, weight, missing)
                caught.clear()
                yield is_held_out(index, self.held_out), given
                self.bar.update()
                self.at = index + 1
        self.at = None

    def _run(self, run: Run, index: int, inputs: Mapping[str, Any], behind: Behind | None) -> Any:
        """Run the converted model up to the slot, or up to the sum after it, which is returned as (n, out)."""
        seen: list[torch.Tensor] = []
        with (
            torch.no_grad(),
            _as_it_was(self.model, self.layer, self.fitter.together, self.runs),
            contextlib.ExitStack() as inside,
            contextlib.suppress(_Reached, Found),
        ):
            if behind is not None:
                inside.enter_context(originals(behind.converted))
                inside.enter_context(reading(behind.place, seen))
            run(index, inputs)
        return None if behind is None else self._rows(seen, inputs)

    def _original(self, run: Run, index: int, inputs: Mapping[str, Any]) -> Any:
        """Return the same sum in the original model."""
        assert self.behind is not None
        seen: list[torch.Tensor] = []
        with (
            torch.no_grad(),
            originals(self.behind.all),
            reading(self.behind.place, seen),
            contextlib.suppress(Found),
        ):
            run(index, inputs)
        return self._rows(seen, inputs)

    @staticmethod
    def _rows(seen: list[torch.Tensor], inputs: Mapping[str, Any]) -> Any:
        return real_tokens(wide(seen[0]), inputs.get("attention_mask"))


def _first(call: Call) -> torch.Tensor:
    return next(value for value in (*call.args, *call.kwargs.values()) if isinstance(value, torch.Tensor))
