"""calibrate: fit every replaced part to the module it replaces, on real activations, in closed form.

Front to back, one pass over the batches per slot: inputs come from the already converted stack, targets from the
original module on those very inputs, so a later layer repairs what an earlier one got wrong. No labels and no
backpropagation. Moments are kept in fp64; memory does not depend on the number of tokens.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import peft
import torch
from torch import nn
from tqdm.auto import tqdm

from snnk_peft.calibration.error_meter import ErrorMeter
from snnk_peft.calibration.landmarks import RULES, SecondMoments, choose_landmarks, fit_landmarks
from snnk_peft.calibration.ridge import DEFAULT_RIDGES, GramAccumulator, RidgeFit, fit_ridge
from snnk_peft.errors import ConfigError
from snnk_peft.families.base import as_linear, unwrap
from snnk_peft.functional.at_hand import at_hand, offloaded, place_of
from snnk_peft.layers.slots import Replace
from snnk_peft.projections.landmark import Landmark
from snnk_peft.tuner.calibration_report import CalibrationReport, SlotReport
from snnk_peft.tuner.held_out import warn_of_repeated_rows
from snnk_peft.tuner.slot_layer import SlotLayer, active_module

Batch = Mapping[str, Any]
Batches = Iterable[Batch] | Callable[[], Iterable[Batch]]


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
    progress: bool = True,
) -> CalibrationReport:
    """Fit the replaced FFN blocks and pooler of a patched model to the originals.

    Adapters and linear attention hold no readout that stands for a module's output. They stay as they are, and what
    is fitted sees their effect in its inputs.

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
    slots = {name: layer for name, layer in slots.items() if _replacement(layer) is not None}
    if not slots:
        faults.append(
            "the model has no active replaced part to calibrate; expected a model from get_snnk_model with ffn= or "
            "pooler=, with that adapter active (adapters and linear attention are trained, not calibrated)"
        )
    if away := [name for name, layer in slots.items() if offloaded(layer.snnk_slots)]:
        faults.append(
            f"the readouts of {', '.join(away)} are offloaded to memory or disk, where a fit would not last; expected "
            "them beside the model. Calibrate before dispatching the model, or put the adapter on an offloaded base"
        )
    if not faults:
        total, fitted = _count_batches(batches, held_out)
        if total == 0:
            faults.append(
                "batches is empty; expected dicts of model inputs, at least two and better a few dozen, such as a "
                "DataLoader of tokenized sentences of the kind that the model will see"
            )
        elif fitted == 0 or fitted == total:
            faults.append(
                f"batches holds {total}, of which held_out={held_out} leaves {fitted} to fit; expected at least one to "
                "fit and one to hold out. Use smaller batches"
            )
    if faults:
        raise ConfigError(faults)
    warn_of_repeated_rows((_is_held_out(index, held_out), batch) for index, batch in enumerate(_read(batches)))

    was_training = {module: module.training for module in model.modules()}
    model.eval()
    try:
        order = _execution_order(model, slots, batches)
        passes = sum(_passes(_Target.of(model, slots[name])) for name in order)
        with tqdm(total=passes * total, desc="calibrate", unit="batch", disable=not progress) as bar:
            reports = [
                _calibrate_slot(model, name, slots[name], runs, batches, landmarks, held_out, ridges, refit, bar)
                for name, runs in order.items()
            ]
    finally:
        for module, training in was_training.items():
            module.training = training
    return CalibrationReport(reports)


def _replacement(layer: SlotLayer) -> Replace | None:
    return next((slot for slot in layer.active_slots() if isinstance(slot, Replace)), None)


def _read(batches: Batches) -> Iterator[Batch]:
    return iter(batches() if callable(batches) else batches)


def _is_held_out(index: int, fraction: float) -> bool:
    """Spread the held-out batches evenly: whenever the running count of index·fraction passes a half."""
    return int((index + 1) * fraction + 0.5) > int(index * fraction + 0.5)


def _count_batches(batches: Batches, held_out: float) -> tuple[int, int]:
    if not callable(batches) and iter(batches) is batches:
        raise ConfigError(
            f"batches is a {type(batches).__name__}, which can be read only once; expected a list, a DataLoader, or a "
            "function that returns a fresh iterator"
        )
    total = sum(1 for _ in _read(batches))
    return total, sum(not _is_held_out(index, held_out) for index in range(total))


def _inputs(model: nn.Module, batch: Batch) -> dict[str, Any]:
    device = place_of(model)
    return {
        key: value.to(device) if isinstance(value, torch.Tensor) else value
        for key, value in batch.items()
        if key not in ("label", "labels")
    }


def _execution_order(model: nn.Module, slots: Mapping[str, SlotLayer], batches: Batches) -> dict[str, int]:
    """Slot names in the order in which a forward pass reaches them, and how often it does (shared layers: several)."""
    order: list[str] = []
    names = {layer: name for name, layer in slots.items()}
    hooks = [
        layer.register_forward_pre_hook(lambda module, args: order.append(names[module])) for layer in slots.values()
    ]
    try:
        with torch.no_grad():
            model(**_inputs(model, next(_read(batches))))
    finally:
        for hook in hooks:
            hook.remove()
    return Counter(order)


def _slot_inputs(
    model: nn.Module, layer: SlotLayer, runs: int, batches: Batches, bar: Any
) -> Iterator[tuple[int, torch.Tensor]]:
    """(batch index, real-token inputs (n, dim)) of a slot, from the stack as it is now; stops each pass there.

    A layer that runs several times gives the inputs of all runs, with the original in its place: what the stand-in
    would make of the earlier ones is not known before it is fitted.
    """
    caught: list[torch.Tensor] = []

    def catch(module: nn.Module, args: tuple[Any, ...]) -> None:
        caught.append(args[0])
        if len(caught) == runs:
            raise _Reached

    hook = layer.register_forward_pre_hook(catch)
    try:
        for index, batch in enumerate(_read(batches)):
            inputs = _inputs(model, batch)
            with torch.no_grad(), _as_it_was(model, layer, runs), contextlib.suppress(_Reached):
                model(**inputs)
            mask = inputs.get("attention_mask")
            yield index, torch.cat([_real_tokens(x, mask) for x in caught])
            caught.clear()
            bar.update()
    finally:
        hook.remove()


@contextlib.contextmanager
def _as_it_was(model: nn.Module, layer: SlotLayer, runs: int) -> Iterator[None]:
    """The original of a layer with several runs, and of the activation behind it, in place of what replaces them."""
    slot = _replacement(layer)
    inside: list[SlotLayer] = []
    if runs > 1 and slot is not None:
        root: Any = model.get_base_model() if isinstance(model, peft.PeftModel) else model
        behind = None if slot.activation is None else root.get_submodule(slot.activation)
        inside = [place for place in (layer, behind) if isinstance(place, SlotLayer)]
    for place in inside:
        place._disable_adapters = True
    try:
        yield
    finally:
        for place in inside:
            place._disable_adapters = False


def _real_tokens(x: torch.Tensor, mask: Any) -> torch.Tensor:
    """(..., dim) -> (n, dim) without padding, where x has as many rows as the mask has entries."""
    rows = x.reshape(-1, x.shape[-1])
    return rows[mask.bool().flatten()] if isinstance(mask, torch.Tensor) and mask.numel() == len(rows) else rows


def _passes(target: _Target) -> int:
    """Reads of the data that a slot needs: choosing rows is one of its own where features are not hidden units."""
    return 2 if target.landmarks is not None and not target.features_are_hidden_units() else 1


@dataclass(frozen=True)
class _Target:
    """A slot next to the original that it stands in for."""

    layer: SlotLayer
    slot: Replace
    activation: nn.Module
    output_weight: torch.Tensor | None

    @classmethod
    def of(cls, model: nn.Module, layer: SlotLayer) -> _Target:
        slot = _replacement(layer)
        assert slot is not None
        root = model.get_base_model() if isinstance(model, peft.PeftModel) else model
        activation = nn.Identity() if slot.activation is None else unwrap(root.get_submodule(slot.activation))
        following = None if slot.following is None else as_linear(active_module(root.get_submodule(slot.following)))
        weight = None
        if isinstance(following, nn.Linear):
            with at_hand(following):
                weight = following.weight.detach()
        return cls(layer, slot, activation, weight)

    def hidden(self, x: torch.Tensor) -> torch.Tensor:
        """What the original makes of x (n, dim)."""
        return self.activation(self.layer.base_layer(x))

    @property
    def landmarks(self) -> Landmark | None:
        """The landmark projection, if the slot has one whose rows can be chosen by their effect on the output."""
        projection = self.slot.layer.stage.feature_map.projection
        return projection if isinstance(projection, Landmark) and self.output_weight is not None else None

    def features_are_hidden_units(self) -> bool:
        """Whether a landmark feature equals a hidden unit: the component is the original activation."""
        z = torch.linspace(-6, 6, 97, device=self.slot.layer.A.device)
        component = self.slot.layer.stage.feature_map.component
        if not component.elementwise():
            return False
        return torch.allclose(component.function(z), self.activation(z), rtol=1e-5, atol=1e-6)


class _Pass:
    """One streaming pass per call: (is it held out?, inputs of the slot)."""

    def __init__(self, model: nn.Module, layer: SlotLayer, runs: int, batches: Batches, held_out: float, bar: Any):
        self.model, self.layer, self.runs, self.batches = model, layer, runs, batches
        self.held_out, self.bar = held_out, bar

    def __iter__(self) -> Iterator[tuple[bool, torch.Tensor]]:
        for index, x in _slot_inputs(self.model, self.layer, self.runs, self.batches, self.bar):
            yield _is_held_out(index, self.held_out), x


@torch.no_grad()
def _calibrate_slot(
    model: nn.Module,
    name: str,
    layer: SlotLayer,
    runs: int,
    batches: Batches,
    rule: str,
    held_out: float,
    ridges: Sequence[float],
    refit: bool,
    bar: Any,
) -> SlotReport:
    start = time.perf_counter()
    target, data = _Target.of(model, layer), _Pass(model, layer, runs, batches, held_out, bar)
    before = ErrorMeter(target.output_weight)
    if target.landmarks is not None and target.features_are_hidden_units():
        fit, tokens = _fit_hidden_units(target, data, rule, ridges, refit, before)
    else:
        if target.landmarks is not None:
            _select_rows(target, _joint_moments(target, data)[0], rule)
        fit, tokens = _fit_features(target, data, ridges, refit, before)
    stand_in = target.slot.layer
    stand_in.A.copy_(fit.weight)
    stand_in.bias.copy_(fit.bias)  # type: ignore[union-attr, arg-type]
    return SlotReport(
        path=name.removeprefix("base_model.model."),
        num_features=stand_in.stage.feature_map.num_features,
        tokens=tokens,
        held_out_tokens=before.count,
        ridge=fit.ridge,
        error_before=before.value(),
        error_after=fit.error,
        seconds=time.perf_counter() - start,
    )


def _joint_moments(
    target: _Target, data: _Pass, before: ErrorMeter | None = None
) -> tuple[SecondMoments, SecondMoments]:
    """Moments of [hidden units, inputs if the readout sees them], of fitted and of held-out tokens."""
    stand_in = target.slot.layer
    append = stand_in.stage.append_input
    train, test = (SecondMoments(stand_in.out_features + append * stand_in.stage.dim) for _ in range(2))
    for is_test, x in data:
        hidden = target.hidden(x)
        (test if is_test else train).update(torch.cat((hidden, x), -1) if append else hidden)
        if is_test and before is not None:
            before.update(hidden, stand_in(x))
    return train, test


def _select_rows(target: _Target, moments: SecondMoments, rule: str) -> torch.Tensor:
    """Choose the landmarks and copy their rows; returns their indices."""
    projection, stand_in = target.landmarks, target.slot.layer
    assert projection is not None
    assert target.output_weight is not None
    given = len(moments.mean) - stand_in.out_features
    chosen = choose_landmarks(moments, target.output_weight, projection.num_features, rule=rule, given=given)
    importance = torch.zeros(stand_in.out_features, device=chosen.device).index_fill_(0, chosen, 1.0)
    linear = as_linear(target.layer.base_layer)
    assert isinstance(linear, nn.Linear)
    with at_hand(linear):
        return projection.select(linear.weight, linear.bias, importance.to(linear.weight.device))


def _fit_hidden_units(
    target: _Target, data: _Pass, rule: str, ridges: Sequence[float], refit: bool, before: ErrorMeter
) -> tuple[RidgeFit, int]:
    """Features are hidden units: their joint moments decide which to keep and the readout, in one pass."""
    train, test = _joint_moments(target, data, before)
    stand_in = target.slot.layer
    given, m = len(train.mean) - stand_in.out_features, stand_in.stage.feature_map.num_features
    chosen = _select_rows(target, train, rule).to(train.mean.device)
    assert target.output_weight is not None
    fit = fit_landmarks(train, test, chosen, target.output_weight, given=given, ridges=ridges, refit=refit)
    fit.weight[:, :m] *= m**0.5  # the feature map divides by √m
    return fit, train.count


def _fit_features(
    target: _Target, data: _Pass, ridges: Sequence[float], refit: bool, before: ErrorMeter
) -> tuple[RidgeFit, int]:
    """Any features: ridge regression of the original's output on them."""
    stand_in = target.slot.layer
    train, test = (
        GramAccumulator(stand_in.stage.out_dim, stand_in.out_features, output_weight=target.output_weight)
        for _ in range(2)
    )
    for is_test, x in data:
        hidden = target.hidden(x)
        if is_test:
            before.update(hidden, stand_in(x))
        (test if is_test else train).update(stand_in.stage(x.to(stand_in.A.dtype)), hidden)
    fit, fitted = fit_ridge(train, test, ridges), train.count
    if refit:
        train.merge(test)
        final = train.solve(fit.ridge * train.ridge_scale)
        fit = fit._replace(weight=final.weight, bias=final.bias)
    return fit, fitted
