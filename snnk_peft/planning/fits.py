"""Fits of candidates, each to its module, on the inputs of the original's modules.

The model runs once for all of them. `calibrate` fits the chosen ones again, after converted layers.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import nn

from snnk_peft.calibrating.answers import Answers
from snnk_peft.calibrating.batches import model_inputs
from snnk_peft.calibrating.calibrate import fitter_of, slot_to_fit
from snnk_peft.calibrating.guards import refuse_overflow
from snnk_peft.calibrating.sensitivity import Sensitivity, sensitivities
from snnk_peft.errors import UnsupportedError
from snnk_peft.layers.slots import Call, FitOptions, Fitter, Given
from snnk_peft.planning.candidates import Template
from snnk_peft.planning.sample import Sample
from snnk_peft.tuner.slot_layer import SlotLayer

OPTIONS = FitOptions(landmarks="greedy", ridges=(1e-4, 1e-3, 1e-2), refit=False, search=20)
Errors = dict[tuple[int, "int | None"], float]  # by number of the template and layer

Calls = dict[str, list[tuple[bool, list[Call]]]]


def listen(model: nn.Module, modules: Mapping[str, nn.Module], sample: Sample) -> Calls:
    """Record the arguments of modules, batch by batch; ValueError if an output of the model is NaN or infinite."""
    calls_at: Calls = {path: [] for path in modules}
    caught: dict[str, list[tuple[Any, Any]]] = {path: [] for path in modules}

    def note(path: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        caught[path].append((args, kwargs))

    with contextlib.ExitStack() as hooks:
        for path, module in modules.items():
            hooks.enter_context(module.register_forward_pre_hook(partial(note, path), with_kwargs=True))
        for number, (held_out, batch) in enumerate(sample.batches):
            inputs = model_inputs(model, batch)
            with torch.no_grad():
                outputs = model(**inputs)
            if not torch.isfinite(_main(outputs)).all():
                refuse_overflow(model, inputs, f"batch {number} of those that were chosen")
            for path, calls in caught.items():
                calls_at[path].append((held_out, [Call(*call, inputs.get("attention_mask")) for call in calls]))
                calls.clear()
    return calls_at


def _main(outputs: Any) -> torch.Tensor:
    """Return the first floating-point output of a model."""
    return next(value for value in outputs.values() if isinstance(value, torch.Tensor) and value.is_floating_point())


def sense(
    templates: Sequence[Template], sample: Sample, answers: Answers, tick: Callable[[], Any]
) -> dict[str, Sensitivity]:
    """Measure the sensitivity of the answers wherever a fit's error is measured; empty if there are no gradients."""
    root, judged = templates[0].root, set[str]()
    for template in templates:
        for key, group in template.groups.items():
            for layer in group.values():
                if _fitted(template, key, layer):
                    template.activate(key)
                    judged.add(fitter_of(template.root, layer, OPTIONS).counted or "")
                    template.activate(None, nothing=True)
    places = {path: root.get_submodule(path) for path in sorted(judged - {""})}
    try:
        return sensitivities(root, places, cast(Any, sample), answers, tick) if places else {}
    except UnsupportedError:
        return {}


@torch.no_grad()
def fit_all(
    templates: Sequence[Template], sample: Sample, sensed: Mapping[str, Sensitivity], tick: Callable[[int], Any]
) -> Errors:
    """Fit every slot of templates that can be fitted, in the metric of the answers if it is known.

    Returns:
        The normalised error on the held-out part, by index of the template and layer; for several modules, the mean.
    """
    places = [
        (number, key, path, layer)
        for number, template in enumerate(templates)
        for key, group in template.groups.items()
        for path, layer in group.items()
        if _fitted(template, key, layer)
    ]
    at = {path: templates[0].root.get_submodule(path) for _, _, path, _ in places}
    calls = listen(templates[0].root, at, sample)
    errors: dict[tuple[int, int | None], list[float]] = {}
    for path in at:
        here = [(number, key, layer) for number, key, where, layer in places if where == path]
        for number, key, _ in here:
            templates[number].activate(key)
        fitters = [fitter_of(templates[number].root, layer, OPTIONS) for number, _, layer in here]
        first, *others = fitters
        found = sensed.get(first.counted or "")
        metric = None if found is None else found.root()
        for fitter in fitters:
            fitter.metric = metric
        weights = None if found is None else found.weights
        fitted = first.fit_sizes(others, _KeptCalls(first, calls[path], weights)) if others else None
        if fitted is None:
            fitted = [fitter.fit(_KeptCalls(fitter, calls[path], weights)).error_after for fitter in fitters]
        torch.clear_autocast_cache()  # otherwise the caller's autocast would use copies of the old tensors
        for (number, key, _), error in zip(here, fitted, strict=True):
            errors.setdefault((number, key), []).append(error)
        tick(len(here))
        calls[path] = []  # the inputs of a layer are no longer needed
        for template in templates:
            template.activate(None, nothing=True)
    return {name: sum(each) / len(each) for name, each in errors.items()}


def _fitted(template: Template, key: int | None, layer: SlotLayer) -> bool:
    template.activate(key)
    fits = slot_to_fit(layer) is not None
    template.activate(None, nothing=True)
    return fits


class _KeptCalls:
    """Recorded calls in the form that a fitter reads, any number of times."""

    def __init__(self, fitter: Fitter, calls: Any, weights: Callable[[int], Any] | None):
        self.fitter, self.kept, self.weights = fitter, calls, weights

    def __iter__(self) -> Any:
        for number, (held_out, calls) in enumerate(self.kept):
            rows = self.fitter.rows
            read = calls if self.fitter.calls else torch.cat([rows(c.args[0], c.mask) for c in calls])
            yield held_out, read if self.weights is None else Given(read, self.weights(number))
