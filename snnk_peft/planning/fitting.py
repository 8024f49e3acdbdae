"""Fit candidates side by side on the inputs of the original's modules; the model runs once for all of them.

`calibrate` fits what was chosen again, after the layers that were converted before.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from snnk_peft.calibrating.calibrate import fitter_of, slot_to_fit
from snnk_peft.layers.slots import FitOptions, Fitter
from snnk_peft.planning.candidates import Template
from snnk_peft.planning.sample import Sample, listen
from snnk_peft.solvers.ridge import DEFAULT_RIDGES
from snnk_peft.tuner.slot_layer import SlotLayer

OPTIONS = FitOptions(landmarks="greedy", ridges=DEFAULT_RIDGES, refit=False)
Errors = dict[tuple[int, "int | None"], float]  # by number of the template and layer


@torch.no_grad()
def fit_all(templates: Sequence[Template], sample: Sample, tick: Any) -> Errors:
    """Fit every slot of templates that can be fitted.

    Args:
        templates: of one kind: their attention runs in the same way.
        sample: the data.
        tick: called with the number of fits that were done.

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
        found = first.fit_sizes(others, _KeptCalls(first, calls[path])) if others else None
        if found is None:
            found = [fitter.fit(_KeptCalls(fitter, calls[path])).error_after for fitter in fitters]
        torch.clear_autocast_cache()  # the caller's autocast would judge copies of what was there before
        errors |= {(number, key): error for (number, key, _), error in zip(here, found, strict=True)}
        tick(len(here))
        calls[path] = []  # the inputs of a layer are not needed any more
        for template in templates:
            template.activate(None, nothing=True)
    return errors


def _fitted(template: Template, key: int | None, layer: SlotLayer) -> bool:
    template.activate(key)
    found = slot_to_fit(layer) is not None
    template.activate(None, nothing=True)
    return found


class _KeptCalls:
    """Kept calls in the form that a fitter reads, as often as it likes."""

    def __init__(self, fitter: Fitter, calls: Any):
        self.fitter, self.kept = fitter, calls

    def __iter__(self) -> Any:
        for held_out, calls in self.kept:
            rows = self.fitter.rows
            yield held_out, calls if self.fitter.calls else torch.cat([rows(c.args[0], c.mask) for c in calls])
