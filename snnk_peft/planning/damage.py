"""Errors of candidates: of the fit of each to its module, and of the answers of the model, all else original.

Candidates are fitted side by side on the inputs of the original's modules; the model runs once for all of them.
`calibrate` fits what was chosen again, after the layers that were converted before.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from snnk_peft.calibrating.answers import Answers, Comparison, Rows
from snnk_peft.calibrating.batches import Batches, Survey, is_held_out, model_inputs
from snnk_peft.calibrating.calibrate import calibrate, fitter_of, slot_to_fit
from snnk_peft.config import SNNKConfig
from snnk_peft.errors import ConfigError
from snnk_peft.layers.slots import Call, FitOptions, Fitter
from snnk_peft.planning.candidates import Template, replayed, shared_copy
from snnk_peft.projections.base_drawn import site_generator
from snnk_peft.solvers.reduce import relative_error
from snnk_peft.tuner.get_model import get_snnk_model
from snnk_peft.tuner.slot_layer import SlotLayer

HELD_OUT = 0.3
IMAGE_TOKENS = 196  # of an image of the usual size
OPTIONS = FitOptions(landmarks="greedy", ridges=(1e-5, 1e-4, 1e-3, 1e-2), refit=False, search=20)
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
        The normalised error on the held-out part: by number of the template and layer, where there is one; of several
        modules, the mean.
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
        fitted = first.fit_sizes(others, _KeptCalls(first, calls[path])) if others else None
        if fitted is None:
            fitted = [fitter.fit(_KeptCalls(fitter, calls[path])).error_after for fitter in fitters]
        torch.clear_autocast_cache()  # the caller's autocast would judge copies of what was there before
        for (number, key, _), error in zip(here, fitted, strict=True):
            errors.setdefault((number, key), []).append(error)
        tick(len(here))
        calls[path] = []  # the inputs of a layer are not needed any more
        for template in templates:
            template.activate(None, nothing=True)
    return {name: sum(each) / len(each) for name, each in errors.items()}


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


def measure_damage(templates: Sequence[Template], sample: Sample, seed: int, tick: Callable[[], Any]) -> Errors:
    """What each group of each template, all else original, does to the answers on the held-out part of the sample.

    A group inside a layer changes what the layer gives by δ, and the answers of an example by Σ g·δ over its tokens, g
    the gradient there of `Answers.drawn_loss`: in the mean over the examples, half its square is the divergence. So
    only the layer itself is run. What stands outside of the layers, or in a layer that runs several times, is run and
    compared.
    """
    root, answers = templates[0].root, Answers(templates[0].root)
    names = [(number, key) for number, template in enumerate(templates) for key in template.groups]
    compared = {name: Comparison(answers) for name in names}
    moved = dict.fromkeys(names, 0.0)
    whole = _Scale(answers)
    for number, inputs in enumerate(sample.inputs(root, held_out=True)):
        seen = _Seen(root, templates[0].layers, inputs, answers, site_generator(seed, f"plan.{number}"))
        whole.update(answers.read(seen.answer, inputs))
        for at, key in names:
            template = templates[at]
            template.activate(key)
            try:
                if key is None or seen.gradients is None:
                    with torch.no_grad(), replayed(template.root, seen.before(key)):
                        compared[at, key].update(seen.answer, template.root(**inputs), inputs)
                else:
                    moved[at, key] += seen.response(template.root, template.layers[key], inputs)
            finally:
                template.activate(None, nothing=True)
            tick()
    return {
        name: comparison.distance() if comparison.sums else whole.of(moved[name])
        for name, comparison in compared.items()
    }


def joint_error(model: nn.Module, config: SNNKConfig, sample: Sample) -> float:
    """The distance of the held-out answers of the model with all chosen parts, fitted to the rest of the sample."""
    if not config.parts:
        return 0.0
    patched: Any = get_snnk_model(shared_copy(model), config)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a sample is small, and what is fitted to it is not kept
        calibrate(patched, [batch for _, batch in sample.batches], held_out=HELD_OUT, refit=False, progress=False)
    root, comparison = patched.eval().get_base_model(), Comparison(Answers(model))
    with torch.no_grad():
        for inputs in sample.inputs(root, held_out=True):
            with patched.disable_adapter():
                expected = root(**inputs)
            comparison.update(expected, root(**inputs), inputs)
    return comparison.distance()


class _Seen:
    """One run of the original: its answer, what its layers gave, and the gradients there.

    Attributes:
        gradients: by path, None if a layer runs several times, whose outputs no one gradient belongs to.
    """

    def __init__(
        self, root: Any, layers: Sequence[str], inputs: Mapping[str, Any], answers: Answers, generator: torch.Generator
    ):
        given: dict[str, list[Any]] = {path: [] for path in layers}
        added: dict[str, torch.Tensor] = {}

        def keep(path: str, module: nn.Module, args: Any, output: Any) -> Any:
            given[path].append(_detached(output))
            # Of what is added gradients can be taken, whatever trains.
            first = _first(output)
            added[path] = torch.zeros_like(first, requires_grad=True)
            return first + added[path] if first is output else (first + added[path], *output[1:])

        with contextlib.ExitStack() as context:
            for path in layers:
                context.enter_context(root.get_submodule(path).register_forward_hook(partial(keep, path)))
            context.enter_context(torch.inference_mode(False))
            context.enter_context(torch.enable_grad())
            answer = root(**inputs)
            self.gradients = None
            if all(len(each) == 1 for each in given.values()):
                loss = answers.drawn_loss(answers.read(answer, inputs), generator)
                taken = torch.autograd.grad(loss, list(added.values()), allow_unused=True)
                self.gradients = dict(zip(added, taken, strict=True))
        self.outputs = {path: each[0] for path, each in given.items()} if self.gradients is not None else {}
        self.answer = _detached(answer)

    def before(self, key: int | None) -> dict[str, Any]:
        """The outputs of the layers in front of one; of all if that is None."""
        return dict(list(self.outputs.items())[:key])

    def response(self, root: nn.Module, path: str, inputs: Mapping[str, Any]) -> float:
        """Sum over the examples of (Σ g·δ)², δ what the layer at `path` gives in this model beyond what it gave."""
        assert self.gradients is not None
        gradient, outputs = self.gradients[path], dict(self.outputs)
        if gradient is None:
            return 0.0
        before, found = _first(outputs.pop(path)), list[torch.Tensor]()

        def keep(module: nn.Module, args: Any, output: Any) -> None:
            found.append(_first(output))

        with torch.no_grad(), replayed(root, outputs), root.get_submodule(path).register_forward_hook(keep):
            root(**inputs)
        moved = ((found[0] - before).float() * gradient.float()).flatten(1).sum(1)
        return float(moved.double().square().sum())


class _Scale:
    """Turns sums of squared responses into the distance of `Comparison`."""

    def __init__(self, answers: Answers):
        self.answers, self.rows, self.numbers = answers, 0, dict[str, list[torch.Tensor]]()

    def update(self, answer: Rows) -> None:
        for name, rows in answer.items():
            self.rows += len(rows)
            if self.answers.kind(name, rows.shape[-1]) == "numbers":
                self.numbers.setdefault(name, []).append(rows.double())

    def of(self, squares: float) -> float:
        if not self.rows:
            return Comparison(self.answers).distance()  # which says so
        if not self.numbers:
            return 0.5 * squares / self.rows
        whole = [torch.cat(each) for each in self.numbers.values()]
        variance = sum(float((rows - rows.mean(0)).square().sum()) for rows in whole)
        return relative_error(squares, variance, sum(float(rows.square().sum()) for rows in whole))


def _first(output: Any) -> torch.Tensor:
    """The hidden state among the outputs of a layer."""
    return output if isinstance(output, torch.Tensor) else output[0]


def _detached(output: Any) -> Any:
    if isinstance(output, torch.Tensor):
        return output.detach()
    if isinstance(output, Mapping):
        return {name: _detached(value) for name, value in output.items()}
    return tuple(map(_detached, output)) if isinstance(output, (tuple, list)) else output
