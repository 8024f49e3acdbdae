"""calibrate: fit every slot that can be fitted to what it stands in for, on real activations.

The schedule of passes and nothing else: front to back, as often as each slot's fitter (`Slot.fitter`, in parts/) reads
the batches. Inputs come from the stack as fitted so far, so a later layer repairs what an earlier one got wrong.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import peft
import torch
from torch import nn
from tqdm.auto import tqdm

from snnk_peft.calibration.landmarks import RULES
from snnk_peft.calibration.reduce import gathered, process, processes, same_everywhere
from snnk_peft.calibration.ridge import DEFAULT_RIDGES
from snnk_peft.errors import ConfigError
from snnk_peft.families.base import unwrap
from snnk_peft.functional.at_hand import offloaded
from snnk_peft.layers.slots import Call, FitOptions, Fitter, Slot
from snnk_peft.tuner.batches import Batches, count_batches, is_held_out, model_inputs, read
from snnk_peft.tuner.calibration_report import CalibrationReport, SlotReport
from snnk_peft.tuner.held_out import warn_of_repeated_rows
from snnk_peft.tuner.slot_layer import SlotLayer, active_module


class _Reached(Exception):  # noqa: N818 - control flow, not an error
    """Ends a forward pass at the slot whose input was wanted."""


def calibrate(
    model: nn.Module,
    batches: Batches,
    *,
    landmarks: str = "greedy",
    held_out: float = 0.2,
    ridges: Sequence[float] = DEFAULT_RIDGES,
    refit: bool = True,
    steps: int = 0,
    progress: bool = True,
) -> CalibrationReport:
    """Fit the replaced FFN blocks, pooler, attention, heads and low-rank layers of a patched model to the originals.

    Adapters, and linear attention over other rows than `centroids`, hold nothing that stands for a module's output.
    They stay as they are, and what is fitted sees their effect in its inputs.

    With several processes (torch.distributed is initialised) each gives its own share of the batches:
    `batches[rank::world_size]` in every process fits what `batches` fits in one, up to the rounding of sums, with the
    same bits in every process. Shares may differ in size; each needs one batch at least. Calibrate before DDP or FSDP.

    Args:
        model: a model from `get_snnk_model` whose active adapter replaces something.
        batches: model-input dicts on any device, as a list, a DataLoader or a function that returns an iterator; read
            once or twice per slot, always in the same order. Labels are ignored. A few hundred to a few thousand
            sentences of the kind the model will see are enough.
        landmarks: how landmark projections choose their rows: "greedy" or "importance" (see calibration/landmarks).
        held_out: fraction of the batches that chooses the regularisation and is not fitted, in (0, 1).
        ridges: candidates for the regularisation, as fractions of the mean feature variance.
        refit: once the regularisation is chosen, fit to all batches, the held-out ones included. The reported error is
            the held-out one from before.
        steps: of Adam behind the closed form of an attention part over `centroids`, per layer: the first half on the
            divergence of the weights from softmax, the second on the error of the output. 200 take a few seconds a
            layer. 0 for the closed form alone.
        progress: show a progress bar with an estimate.

    Returns:
        A CalibrationReport; print it for a table.

    Raises:
        ConfigError: nothing to calibrate, too few batches, an iterator that can be read only once, bad arguments.
        ValueError: activations hold NaN or infinity.

    Example:
        >>> import torch
        >>> from transformers import BertConfig, BertForSequenceClassification
        >>> from snnk_peft import FFNPart, SNNKConfig, calibrate, get_snnk_model
        >>> tiny = BertConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64)
        >>> config = SNNKConfig(ffn=FFNPart(num_features=16, layers="top-1"))
        >>> model = get_snnk_model(BertForSequenceClassification(tiny), config)
        >>> batches = [{"input_ids": torch.randint(0, 1000, (8, 16))} for _ in range(5)]
        >>> report = calibrate(model, batches, progress=False)
        >>> report.slots[0].error_after < report.slots[0].error_before
        True
    """
    faults = []
    if landmarks not in RULES:
        faults.append(f"landmarks is {landmarks!r}; expected one of {', '.join(RULES)}")
    if not 0 < held_out < 1:
        faults.append(f"held_out is {held_out!r}; expected a fraction between 0 and 1")
    slots = {name: module for name, module in model.named_modules() if isinstance(module, SlotLayer)}
    slots = {name: layer for name, layer in slots.items() if _slot_to_fit(layer) is not None}
    if type(steps) is not int or steps < 0:
        faults.append(f"steps is {steps!r}; expected an integer >= 0")
    options = FitOptions(landmarks, ridges, refit, steps)
    if not slots:
        faults.append(
            "the model has no active part that can be calibrated; expected a model from get_snnk_model with ffn=, "
            "pooler=, low_rank=, attention over projection 'centroids' or a part such as NarrowHeadsPart, with that "
            "adapter active (adapters and other linear attention are trained, not calibrated)"
        )
    if away := [name for name, layer in slots.items() if offloaded(layer.snnk_slots)]:
        faults.append(
            f"the readouts of {', '.join(away)} are offloaded to memory or disk, where a fit would not last; expected "
            "them beside the model. Calibrate before dispatching the model, or put the adapter on an offloaded base"
        )
    if any(hasattr(parameter, "full_tensor") for parameter in model.parameters()):
        faults.append("the model is sharded (FSDP2), so that no process has its weights; calibrate it before")
    if not faults:
        shares = gathered(count_batches(batches, held_out))
        total, fitted = (sum(column) for column in zip(*shares, strict=True))
        if empty := [number for number, (share, _) in enumerate(shares) if share == 0]:
            who = f" in processes {empty} of {len(shares)}" if len(shares) > 1 else ""
            faults.append(
                f"batches is empty{who}; expected dicts of model inputs, at least two and better a few dozen, such as "
                "a DataLoader of tokenized sentences of the kind that the model will see"
            )
        elif fitted == 0 or fitted == total:
            faults.append(
                f"batches holds {total}, of which held_out={held_out} leaves {fitted} to fit; expected at least one to "
                "fit and one to hold out. Use smaller batches"
            )
    if faults:
        raise ConfigError(faults)
    warn_of_repeated_rows((is_held_out(index, held_out), batch) for index, batch in enumerate(read(batches)))
    total = shares[process()][0]

    was_training = {module: module.training for module in model.modules()}
    model.eval()
    try:
        order = _execution_order(model, slots, batches)
        fitters = {name: _fitter(model, slots[name], options) for name in order}
        if processes() > 1 and (alone := [name for name in order if not fitters[name].reduces]):
            kinds = sorted({type(fitters[name]).__name__ for name in alone})
            raise ConfigError(
                f"{', '.join(kinds)} (of {', '.join(alone)}) reads one process's share of the data only, and there are "
                f"{processes()}; expected a Fitter with reduces = True. Calibrate in one process and load the result"
            )
        passes = sum(fitter.reads for fitter in fitters.values())
        with tqdm(total=passes * total, desc="calibrate", unit="batch", disable=not progress or process() > 0) as bar:
            reports = []
            for name, runs in order.items():
                data = _Pass(model, slots[name], fitters[name], runs, batches, held_out, bar)
                reports.append(_fit_slot(name, fitters[name], data))
                same_everywhere(slots[name].snnk_slots)
    finally:
        for module, training in was_training.items():
            module.training = training
    return CalibrationReport(reports)


@dataclass(frozen=True)
class _FitPlace:
    """A `FitPlace`: one slotted module of a model."""

    root: nn.Module
    original: nn.Module

    def original_at(self, path: str) -> nn.Module:
        """The pretrained module at a path of the unpatched model."""
        return unwrap(self.root.get_submodule(path))

    def active_at(self, path: str) -> nn.Module:
        """The module in use there."""
        return active_module(self.root.get_submodule(path))


def _slot_to_fit(layer: SlotLayer) -> Slot | None:
    """The active slot of a layer that can be fitted, or None."""
    return next((slot for slot in layer.active_slots() if type(slot).fitter is not Slot.fitter), None)


def _fitter(model: nn.Module, layer: SlotLayer, options: FitOptions) -> Fitter:
    slot = _slot_to_fit(layer)
    assert slot is not None
    found = slot.fitter(_FitPlace(_root(model), unwrap(layer.base_layer)), options)
    assert found is not None
    return found


def _root(model: nn.Module) -> Any:
    return model.get_base_model() if isinstance(model, peft.PeftModel) else model


def _execution_order(model: nn.Module, slots: Mapping[str, SlotLayer], batches: Batches) -> dict[str, int]:
    """Slot names in the order in which a forward pass reaches them, and how often it does (shared layers: several)."""
    order: list[str] = []
    names = {layer: name for name, layer in slots.items()}
    hooks = [
        layer.register_forward_pre_hook(lambda module, args: order.append(names[module])) for layer in slots.values()
    ]
    try:
        with torch.no_grad():
            model(**model_inputs(model, next(read(batches))))
    finally:
        for hook in hooks:
            hook.remove()
    return Counter(order)


def _slot_calls(
    model: nn.Module, layer: SlotLayer, fitter: Fitter, runs: int, batches: Batches, bar: Any
) -> Iterator[tuple[int, list[Call]]]:
    """(batch index, the calls of a slot), from the stack as it is now; stops each pass there.

    A layer that runs several times gives the inputs of all runs, with the original in its place: what the stand-in
    would make of the earlier ones is not known before it is fitted.
    """
    caught: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def catch(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        caught.append((args, kwargs))
        if len(caught) == runs:
            raise _Reached

    hook = layer.register_forward_pre_hook(catch, with_kwargs=True)
    try:
        for index, batch in enumerate(read(batches)):
            inputs = model_inputs(model, batch)
            with torch.no_grad(), _as_it_was(model, layer, fitter.together, runs), contextlib.suppress(_Reached):
                model(**inputs)
            mask = inputs.get("attention_mask")
            yield index, [Call(*each, mask) for each in caught]
            caught.clear()
            bar.update()
    finally:
        hook.remove()


@contextlib.contextmanager
def _as_it_was(model: nn.Module, layer: SlotLayer, together: Sequence[str], runs: int) -> Iterator[None]:
    """The original of a layer with several runs, and of what goes with it, in place of what replaces them."""
    inside: list[SlotLayer] = []
    if runs > 1:
        others = [_root(model).get_submodule(path) for path in together]
        inside = [place for place in (layer, *others) if isinstance(place, SlotLayer)]
    for place in inside:
        place._disable_adapters = True
    try:
        yield
    finally:
        for place in inside:
            place._disable_adapters = False


class _Pass:
    """One streaming pass per iteration: (is it held out?, inputs of the slot, or its calls)."""

    def __init__(
        self,
        model: nn.Module,
        layer: SlotLayer,
        fitter: Fitter,
        runs: int,
        batches: Batches,
        held_out: float,
        bar: Any,
    ):
        self.inputs = (model, layer, fitter, runs, batches, bar)
        self.fitter, self.held_out = fitter, held_out

    def __iter__(self) -> Iterator[tuple[bool, Any]]:
        for index, calls in _slot_calls(*self.inputs):
            rows = self.fitter.rows
            given = calls if self.fitter.calls else torch.cat([rows(call.args[0], call.mask) for call in calls])
            yield is_held_out(index, self.held_out), given


@torch.no_grad()
def _fit_slot(name: str, fitter: Fitter, data: _Pass) -> SlotReport:
    start = time.perf_counter()
    fit = fitter.fit(data)
    path, seconds = name.removeprefix("base_model.model."), time.perf_counter() - start
    return SlotReport(
        path, fit.size, fit.tokens, fit.held_out_tokens, fit.ridge, fit.error_before, fit.error_after, seconds
    )
