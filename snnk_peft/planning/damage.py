"""The effect of converting one layer on the output of the model, with everything else original."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from snnk_peft.errors import ConfigError
from snnk_peft.planning.candidates import Template, replayed
from snnk_peft.planning.fitting import Errors
from snnk_peft.planning.sample import Sample
from snnk_peft.solvers.error_meter import ErrorMeter


class OutputError:
    """Distance of outputs from those of the original, over all batches.

    Logits of classes or of words by the Kullback-Leibler divergence of their distributions, in nats per row; anything
    else, the score of a regression for instance, by the squared difference relative to the variance over all rows. Of
    several outputs (start and end of an answer), the mean.

    Args:
        config: of the model.
    """

    def __init__(self, config: Any):
        self.problem = getattr(config, "problem_type", None)
        self.squared: dict[str, ErrorMeter] = {}
        self.divergence: dict[str, tuple[float, int]] = {}  # sum, rows

    def update(self, original: Any, other: Any, mask: Any) -> None:
        for name in _compared(original):
            target, found = _rows(original[name], mask).double(), _rows(other[name], mask).double()
            if name.endswith("logits") and target.shape[-1] > 1 and self.problem not in OTHER_PROBLEMS:
                target, found = target.log_softmax(-1), found.log_softmax(-1)
                total, rows = self.divergence.get(name, (0.0, 0))
                # A class that the original rules out (-inf) adds nothing.
                lost = torch.where(target.isneginf(), 0.0, target.exp() * (target - found))
                self.divergence[name] = total + float(lost.sum()), rows + len(target)
            else:
                self.squared.setdefault(name, ErrorMeter()).update(target, found)

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
        found = [0.0 if total <= 0 else total / count for total, count in self.divergence.values()]
        found += [meter.value() for meter in self.squared.values()]
        return sum(found) / len(found)


OTHER_PROBLEMS = ("regression", "multi_label_classification")


def _compared(outputs: Mapping[str, Any]) -> list[str]:
    found = [name for name in outputs if name.endswith("logits")]
    return found or [next(n for n, v in outputs.items() if isinstance(v, torch.Tensor) and v.is_floating_point())]


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

    Args:
        templates: fitted; of one kind, so that their attention runs in the same way.
        sample: the data.
        tick: called after each measurement of a batch.
    """
    first = templates[0]
    found = {(n, key): OutputError(first.root.config) for n, each in enumerate(templates) for key in each.groups}
    for inputs in sample.inputs(first.root, held_out=True):
        mask = inputs.get("attention_mask")
        original, outputs = _remember(first, inputs)
        for (number, key), error in found.items():
            template = templates[number]
            before = {} if outputs is None or key is None else dict(list(outputs.items())[:key])
            template.activate(key)
            try:
                with replayed(template.root, before):
                    error.update(original, template.root(**inputs), mask)
            finally:
                template.activate(None, nothing=True)
            tick()
    return {name: error.value() for name, error in found.items()}


def _remember(template: Template, inputs: Mapping[str, Any]) -> tuple[Any, dict[str, Any] | None]:
    """Outputs of the original and of each of its layers; None for these if the model runs a layer several times."""
    outputs: dict[str, list[Any]] = {path: [] for path in template.layers}
    hooks = [
        template.root.get_submodule(path).register_forward_hook(
            lambda module, args, output, path=path: outputs[path].append(output)
        )
        for path in template.layers
    ]
    try:
        result = template.root(**inputs)
    finally:
        for hook in hooks:
            hook.remove()
    once = all(len(each) == 1 for each in outputs.values())
    return result, {path: each[0] for path, each in outputs.items()} if once else None
