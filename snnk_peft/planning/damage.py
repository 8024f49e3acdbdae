"""The effect of candidates on the answers: predicted from gradients for each alone, measured for the chosen ones."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from snnk_peft.calibrating.answers import Answers, Comparison, Rows
from snnk_peft.calibrating.calibrate import calibrate
from snnk_peft.calibrating.sensitivity import adding, differentiating
from snnk_peft.calibrating.streams import first_of
from snnk_peft.config import SNNKConfig
from snnk_peft.errors import UnsupportedError
from snnk_peft.planning.candidates import Template, replayed, shared_copy
from snnk_peft.planning.fits import OPTIONS, Errors
from snnk_peft.planning.sample import HELD_OUT, Sample
from snnk_peft.projections.base_drawn import site_generator
from snnk_peft.solvers.reduce import relative_error
from snnk_peft.tuner.get_model import get_snnk_model


def measure_damage(
    templates: Sequence[Template], sample: Sample, answers: Answers, seed: int, tick: Callable[[], Any]
) -> Errors:
    """Measure the effect of each group of each template alone on the answers for the held-out part of the sample.

    A group inside a layer changes the layer's output by δ, and the answers of an example by Σ g·δ over its tokens, with
    g the gradient of `Answers.drawn_loss` there: half its square, averaged over the examples, is the divergence. So
    only the layer itself is run. For groups outside the layers, or in a layer that runs several times, the model is run
    and compared.
    """
    root = templates[0].root
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


def joint_error(model: nn.Module, config: SNNKConfig, sample: Sample, answers: Answers) -> float:
    """Measure the distance of the held-out answers with all chosen parts, fitted to the rest of the sample."""
    if not config.parts:
        return 0.0
    patched: Any = get_snnk_model(shared_copy(model), config)
    batches = [batch for _, batch in sample.batches]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the sample is small, and its fit is discarded
        given = {"held_out": HELD_OUT, "ridges": OPTIONS.ridges, "pooling": answers.pooling}
        fit = partial(calibrate, patched, batches, **given, refit=False, progress=False)  # type: ignore[arg-type]
        try:
            fit()
        except UnsupportedError:  # it cannot be differentiated
            fit(metric="local")
    root, comparison = patched.eval().get_base_model(), Comparison(answers)
    with torch.no_grad():
        for inputs in sample.inputs(root, held_out=True):
            with patched.disable_adapter():
                expected = root(**inputs)
            comparison.update(expected, root(**inputs), inputs)
    return comparison.distance()


class _Seen:
    """One run of the original: its answers, the outputs of its layers, and the gradients there.

    Attributes:
        gradients: by path; None if a layer runs several times, so that its output has no single gradient, or if the
            model cannot be differentiated.
    """

    def __init__(
        self, root: Any, layers: Sequence[str], inputs: Mapping[str, Any], answers: Answers, generator: torch.Generator
    ):
        modules = {path: root.get_submodule(path) for path in layers}
        given: dict[str, list[Any]] = {path: [] for path in layers}
        added: dict[str, list[torch.Tensor]] = {path: [] for path in layers}

        def keep(path: str, module: nn.Module, args: Any, output: Any) -> None:
            given[path].append(_detached(output))

        with contextlib.ExitStack() as context:
            for path, module in modules.items():
                context.enter_context(module.register_forward_hook(partial(keep, path)))
            context.enter_context(adding(modules, added))
            context.enter_context(torch.inference_mode(False))
            context.enter_context(torch.enable_grad())
            answer = root(**inputs)
        once = all(len(each) == 1 for each in given.values())
        self.gradients: dict[str, torch.Tensor | None] | None = None
        if once:
            with contextlib.suppress(UnsupportedError), differentiating(root):
                loss = answers.drawn_loss(answers.read(answer, inputs), generator)
                taken = torch.autograd.grad(loss, [each[0] for each in added.values()], allow_unused=True)
                self.gradients = dict(zip(added, taken, strict=True))
        self.outputs = {path: each[0] for path, each in given.items()} if once else {}
        self.answer = _detached(answer)

    def before(self, key: int | None) -> dict[str, Any]:
        """Return the outputs of the layers before the one at index `key`; of all if None."""
        return dict(list(self.outputs.items())[:key])

    def response(self, root: nn.Module, path: str, inputs: Mapping[str, Any]) -> float:
        """Sum (Σ g·δ)² over the examples, with δ the change of the output of the layer at `path` in this model."""
        assert self.gradients is not None
        gradient, outputs = self.gradients[path], dict(self.outputs)
        if gradient is None:
            return 0.0
        before, found = first_of(outputs.pop(path)), list[torch.Tensor]()

        def keep(module: nn.Module, args: Any, output: Any) -> None:
            found.append(first_of(output))

        with torch.no_grad(), replayed(root, outputs), root.get_submodule(path).register_forward_hook(keep):
            root(**inputs)
        moved = ((found[0] - before).float() * gradient.float()).flatten(1).sum(1)
        return float(moved.double().square().sum())


class _Scale:
    """Conversion of sums of squared responses to the distance of `Comparison`."""

    def __init__(self, answers: Answers):
        self.answers, self.rows, self.numbers = answers, 0, dict[str, list[torch.Tensor]]()

    def update(self, answer: Rows) -> None:
        for name, rows in answer.items():
            self.rows += len(rows)
            if self.answers.kind(name, rows.shape[-1]) == "numbers":
                self.numbers.setdefault(name, []).append(rows.double())

    def of(self, squares: float) -> float:
        if not self.rows:
            return Comparison(self.answers).distance()  # which reports it
        if not self.numbers:
            return 0.5 * squares / self.rows
        whole = [torch.cat(each) for each in self.numbers.values()]
        variance = sum(float((rows - rows.mean(0)).square().sum()) for rows in whole)
        return relative_error(squares, variance, sum(float(rows.square().sum()) for rows in whole))


def _detached(output: Any) -> Any:
    if isinstance(output, torch.Tensor):
        return output.detach()
    if isinstance(output, Mapping):
        return {name: _detached(value) for name, value in output.items()}
    return tuple(map(_detached, output)) if isinstance(output, (tuple, list)) else output
