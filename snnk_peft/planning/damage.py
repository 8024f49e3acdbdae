"""Errors of candidates: of the fit of each to its module, and of the output of the model, all else original.

Candidates are fitted side by side on the inputs of the original's modules; the model runs once for all of them.
`calibrate` fits what was chosen again, after the layers that were converted before.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from snnk_peft.calibrating.batches import Batches, Survey, is_held_out, model_inputs, tokens_of
from snnk_peft.calibrating.calibrate import fitter_of, slot_to_fit
from snnk_peft.errors import ConfigError
from snnk_peft.layers.slots import Call, FitOptions, Fitter
from snnk_peft.planning.candidates import Template, replayed
from snnk_peft.solvers.reduce import ErrorMeter
from snnk_peft.solvers.ridge import DEFAULT_RIDGES
from snnk_peft.tuner.slot_layer import SlotLayer

HELD_OUT = 0.3
OPTIONS = FitOptions(landmarks="greedy", ridges=DEFAULT_RIDGES, refit=False)
Errors = dict[tuple[int, "int | None"], float]  # by number of the template and layer


class Sample:
    """Batches spread evenly over all, of about `tokens` tokens; some of them are held out.

    Raises:
        ConfigError: fewer than three batches, or ones that `calibrate` would refuse.

    Attributes:
        batches: (is it held out?, model inputs).
        middle: the batch of median size of all.
        padding: tokens that stand where a mask leaves them out.
    """

    def __init__(self, model: nn.Module, batches: Batches, tokens: int):
        survey = Survey(model, batches, HELD_OUT)
        if survey.faults:
            raise ConfigError(survey.faults)
        total = survey.total
        if total < 3:
            raise ConfigError(
                f"batches holds {total}; expected three at least, of which one is held out, and better a few dozen, "
                "such as a list of tokenized sentences of the kind that the model will see"
            )
        sizes = [tokens_of(batch) for _, batch in survey]
        wanted = min(total, max(3, round(tokens * total / max(1, sum(sizes)))))
        chosen = {round((step + 0.5) * total / wanted - 0.5) for step in range(wanted)}
        middle = sorted(range(total), key=lambda index: (sizes[index], index))[total // 2]
        kept = {index: batch for index, batch in survey if index in chosen or index == middle}
        self.padding = survey.padding
        self.middle = kept[middle]
        self.batches = [(is_held_out(number, HELD_OUT), kept[index]) for number, index in enumerate(sorted(chosen))]

    def inputs(self, model: nn.Module, held_out: bool) -> Iterable[dict[str, Any]]:
        return (model_inputs(model, batch) for out, batch in self.batches if out == held_out)


Calls = dict[str, list[tuple[bool, list[Call]]]]


def listen(model: nn.Module, modules: Mapping[str, nn.Module], sample: Sample) -> Calls:
    """Record the arguments of modules, batch by batch."""
    calls_at: Calls = {path: [] for path in modules}
    caught: dict[str, list[tuple[Any, Any]]] = {path: [] for path in modules}

    def note(path: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        caught[path].append((args, kwargs))

    with contextlib.ExitStack() as hooks:
        for path, module in modules.items():
            hooks.enter_context(module.register_forward_pre_hook(partial(note, path), with_kwargs=True))
        for held_out, batch in sample.batches:
            inputs = model_inputs(model, batch)
            with torch.no_grad():
                model(**inputs)
            for path, calls in caught.items():
                calls_at[path].append((held_out, [Call(*call, inputs.get("attention_mask")) for call in calls]))
                calls.clear()
    return calls_at


@torch.no_grad()
def fit_all(templates: Sequence[Template], sample: Sample, tick: Any) -> Errors:
    """Fit every slot of templates that can be fitted.

    Returns:
        The normalised error on the held-out part: by number of the template and layer, where there is one.
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
    errors: Errors = {}
    for path in at:
        here = [(number, key, layer) for number, key, where, layer in places if where == path]
        for number, key, _ in here:
            templates[number].activate(key)
        fitters = [fitter_of(templates[number].root, layer, OPTIONS) for number, _, layer in here]
        first, *others = fitters
        fitted = first.fit_sizes(others, _KeptCalls(first, calls[path])) if others else None
        if fitted is None:
            fitted = [fitter.fit(_KeptCalls(fitter, calls[path])).error_after for fitter in fitters]
        torch.clear_autocast_cache()  # the caller's autocast would judge copies of what was there before
        errors |= {(number, key): error for (number, key, _), error in zip(here, fitted, strict=True)}
        tick(len(here))
        calls[path] = []  # the inputs of a layer are not needed any more
        for template in templates:
            template.activate(None, nothing=True)
    return errors


def _fitted(template: Template, key: int | None, layer: SlotLayer) -> bool:
    template.activate(key)
    fits = slot_to_fit(layer) is not None
    template.activate(None, nothing=True)
    return fits


class _KeptCalls:
    """Kept calls in the form that a fitter reads, as often as it likes."""

    def __init__(self, fitter: Fitter, calls: Any):
        self.fitter, self.kept = fitter, calls

    def __iter__(self) -> Any:
        for held_out, calls in self.kept:
            rows = self.fitter.rows
            yield held_out, calls if self.fitter.calls else torch.cat([rows(c.args[0], c.mask) for c in calls])


class OutputError:
    """Distance of outputs from those of the original, over all batches.

    Logits of classes or of words by the Kullback-Leibler divergence of their distributions, in nats per row; anything
    else, the score of a regression for instance, by the squared difference relative to the variance over all rows. Of
    several outputs (start and end of an answer), the mean.
    """

    def __init__(self, config: Any):
        self.problem = getattr(config, "problem_type", None)
        self.squared: dict[str, ErrorMeter] = {}
        self.divergence: dict[str, tuple[float, int]] = {}  # sum, rows

    def update(self, original: Any, other: Any, mask: Any) -> None:
        for name in _compared(original):
            target, output = _rows(original[name], mask).double(), _rows(other[name], mask).double()
            if name.endswith("logits") and target.shape[-1] > 1 and self.problem not in OTHER_PROBLEMS:
                target, output = target.log_softmax(-1), output.log_softmax(-1)
                total, rows = self.divergence.get(name, (0.0, 0))
                # A class that the original rules out (-inf) adds nothing.
                lost = torch.where(target.isneginf(), 0.0, target.exp() * (target - output))
                self.divergence[name] = total + float(lost.sum()), rows + len(target)
            else:
                self.squared.setdefault(name, ErrorMeter()).update(target, output)

    def value(self) -> float:
        """The error: 0 for equal outputs, NaN if an output is no number.

        Raises:
            ConfigError: no row was compared.
        """
        rows = [count for _, count in self.divergence.values()] + [meter.count for meter in self.squared.values()]
        if not rows or 0 in rows:
            raise ConfigError(
                "the batches that are held out have no token that counts (attention_mask is 0 everywhere), so there is "
                "nothing to compare outputs on; expected real tokens in every batch"
            )
        errors = [0.0 if total <= 0 else total / count for total, count in self.divergence.values()]
        errors += [meter.value() for meter in self.squared.values()]
        return sum(errors) / len(errors)


OTHER_PROBLEMS = ("regression", "multi_label_classification")


def _compared(outputs: Mapping[str, Any]) -> list[str]:
    logits = [name for name in outputs if name.endswith("logits")]
    return logits or [next(n for n, v in outputs.items() if isinstance(v, torch.Tensor) and v.is_floating_point())]


def _rows(output: torch.Tensor, mask: Any) -> torch.Tensor:
    """(n, dim) without padding, where the output has a row for every token."""
    rows = output.reshape(-1, output.shape[-1])
    if output.ndim > 2 and isinstance(mask, torch.Tensor) and mask.shape == output.shape[:-1]:
        return rows[mask.bool().flatten()]
    return rows


@torch.no_grad()
def measure_damage(templates: Sequence[Template], sample: Sample, tick: Callable[[], Any]) -> Errors:
    """The output's error with one group of one template in use, on the held-out part of the sample.

    What the layers before it give is remembered and not computed again.
    """
    first = templates[0]
    errors = {(n, key): OutputError(first.root.config) for n, each in enumerate(templates) for key in each.groups}
    for inputs in sample.inputs(first.root, held_out=True):
        mask = inputs.get("attention_mask")
        original, outputs = _remember(first, inputs)
        for (number, key), error in errors.items():
            template = templates[number]
            before = {} if outputs is None or key is None else dict(list(outputs.items())[:key])
            template.activate(key)
            try:
                with replayed(template.root, before):
                    error.update(original, template.root(**inputs), mask)
            finally:
                template.activate(None, nothing=True)
            tick()
    return {name: error.value() for name, error in errors.items()}


def _remember(template: Template, inputs: Mapping[str, Any]) -> tuple[Any, dict[str, Any] | None]:
    """Outputs of the original and of each of its layers; None for these if the model runs a layer several times."""
    outputs: dict[str, list[Any]] = {path: [] for path in template.layers}
    with contextlib.ExitStack() as hooks:
        for path, given in outputs.items():
            layer = template.root.get_submodule(path)
            hooks.enter_context(layer.register_forward_hook(lambda module, args, out, given=given: given.append(out)))
        result = template.root(**inputs)
    once = all(len(each) == 1 for each in outputs.values())
    return result, {path: each[0] for path, each in outputs.items()} if once else None
