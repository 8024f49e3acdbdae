"""Candidates fitted side by side, on what the original's modules are called with; the model runs once for all of them.

`calibrate` fits what was chosen again, behind the layers that were converted before.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from snnk_peft.calibration.landmarks import SecondMoments, choose_landmarks, fit_landmarks
from snnk_peft.calibration.ridge import DEFAULT_RIDGES
from snnk_peft.families.base import as_linear
from snnk_peft.functional.at_hand import at_hand
from snnk_peft.layers.slots import FitOptions, Fitter
from snnk_peft.parts.base_replaced import ReplacedFitter
from snnk_peft.planning.candidates import Template
from snnk_peft.planning.sample import Sample, listen
from snnk_peft.tuner.calibrate import _fitter, _slot_to_fit
from snnk_peft.tuner.slot_layer import SlotLayer

OPTIONS = FitOptions(landmarks="greedy", ridges=DEFAULT_RIDGES, refit=False)
Errors = dict[tuple[int, "int | None"], float]  # by number of the template and layer


@torch.no_grad()
def fit_all(templates: Sequence[Template], sample: Sample, tick: Any) -> Errors:
    """Fit every slot of templates that can be fitted.

    Args:
        templates: of one kind: their attention runs in the same way.
        sample: the data.
        tick: called after each fit.

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
    at = {path: template.groups[key][path] for template in templates[:1] for _, key, path, _ in places}
    calls = listen(templates[0].root, at, sample)
    errors: Errors = {}
    for path in at:
        fitters = {}
        for number, key, where, layer in places:
            if where == path:
                templates[number].activate(key)
                fitters[number, key] = _fitter(templates[number].root, layer, OPTIONS)
        together = {key: fitter for key, fitter in fitters.items() if _picks_units(fitter)}
        if len(together) > 1:
            errors |= dict(zip(together, _fit_units(list(together.values()), calls[path]), strict=True))  # type: ignore[arg-type]
            for _ in together:
                tick()
        for name, fitter in fitters.items():
            if name not in together or len(together) == 1:
                errors[name] = fitter.fit(_Again(fitter, calls[path])).error_after
                tick()
        calls[path] = []  # the inputs of a layer are not needed any more
        for template in templates:
            template.activate(None, nothing=True)
    return errors


def _fitted(template: Template, key: int | None, layer: SlotLayer) -> bool:
    template.activate(key)
    found = _slot_to_fit(layer) is not None
    template.activate(None, nothing=True)
    return found


class _Again:
    """Kept calls in the form that a fitter reads, as often as it likes."""

    def __init__(self, fitter: Fitter, calls: Any):
        self.fitter, self.kept = fitter, calls

    def __iter__(self) -> Any:
        for held_out, calls in self.kept:
            rows = self.fitter.rows
            yield held_out, calls if self.fitter.calls else torch.cat([rows(c.args[0], c.mask) for c in calls])


def _picks_units(fitter: Fitter) -> bool:
    """Whether features are hidden units of the layer: all sizes can then be fitted from the same second moments."""
    if not isinstance(fitter, ReplacedFitter) or fitter.landmarks is None or fitter.stand_in.stage.append_input:
        return False
    return fitter.features_are_hidden_units()


def _fit_units(fitters: Sequence[ReplacedFitter], calls: Any) -> list[float]:
    """Fit stand-ins of several sizes for one layer; returns their errors."""
    first = fitters[0]
    assert first.output_weight is not None
    train, test = (SecondMoments(first.stand_in.out_features) for _ in range(2))
    for held_out, x in _Again(first, calls):
        (test if held_out else train).update(first.hidden(x))
    found = []
    linear: Any = as_linear(first.original)
    for fitter in fitters:
        stand_in, projection = fitter.stand_in, fitter.landmarks
        assert projection is not None
        count = projection.num_features
        chosen = choose_landmarks(train, first.output_weight, count, rule=OPTIONS.landmarks)
        wanted = torch.zeros(stand_in.out_features).index_fill_(0, chosen.cpu(), 1.0)
        with at_hand(linear):
            chosen = projection.select(linear.weight, linear.bias, wanted.to(linear.weight.device)).to(chosen.device)
        fit = fit_landmarks(train, test, chosen, first.output_weight, ridges=OPTIONS.ridges)
        stand_in.A.copy_(fit.weight * count**0.5)  # the feature map divides by √m
        stand_in.bias.copy_(fit.bias)  # type: ignore[union-attr, arg-type]
        found.append(fit.error)
    return found
