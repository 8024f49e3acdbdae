"""plan: which parts, on which layers, with which sizes, for a budget.

Every candidate is measured alone: what it saves, and what it does to the output of the model when everything else is
the original. Both are then added up. That the errors of several places add up is an assumption: they are small, and
calibration lets a later layer repair what an earlier one got wrong. That costs do is checked in the end: the chosen
parts are measured together, and if that is more than the budget, the choice is made again for a smaller one.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from tqdm.auto import tqdm

from snnk_peft.arguments import in_words, path_of
from snnk_peft.calibrating.batches import IMAGE_TOKENS, Batches, checked_one, model_inputs
from snnk_peft.calibrating.guards import named_padding, refuse_not_finite, refuse_overflow
from snnk_peft.config import SNNKConfig
from snnk_peft.config_parts import part_name
from snnk_peft.errors import ConfigError
from snnk_peft.families import family_of
from snnk_peft.options import closest
from snnk_peft.parts import Part
from snnk_peft.planning.candidates import Places, Template, default_templates, places
from snnk_peft.planning.choose import Offer, Point, apart, pareto
from snnk_peft.planning.costs import OF, Measure
from snnk_peft.planning.damage import Errors, Sample, fit_all, measure_damage
from snnk_peft.planning.result import POINTS, Candidate, Plan
from snnk_peft.tuner.given_model import refuse_patched, refuse_prepared, takes_model

ATTEMPTS = 4  # to find the budget in proportion
AGAIN = 3  # times in all that what seems too dear is timed
ROOM = 1.1  # seconds of parts alone do not tell those of all together to more than this
SURPLUS = 1.05  # times the saving that was asked for: more is looked into
STRIDE = 0.02  # of the budget between two choices: what they cost in seconds could not be told apart


@takes_model
def plan(
    model: nn.Module,
    batches: Batches,
    budget: str | float = "2x",
    *,
    of: str = "latency",
    parts: Sequence[Part] | None = None,
    inputs: Mapping[str, Any] | None = None,
    tokens: int = 6144,
    seed: int = 0,
    timings: str | os.PathLike[str] | None = None,
    progress: bool = True,
) -> Plan:
    """Choose parts, layers and sizes that meet a cost budget with the least error.

    For each candidate in each layer, its saving is measured, and the output error on held-out batches with only this
    layer converted and fitted: the Kullback-Leibler divergence from the original's distribution for logits, the squared
    error relative to the variance for anything else. The choice of least total error for each cost is exact (a
    knapsack). Its parts are then measured together; the plan is the choice of least error that meets the budget.

    MACs and bytes are exact, so the same arguments give the same plan. Timings vary. Each is the minimum of several
    that alternate with the original's, and was reached three times; savings are rounded to steps of 0.5%, and choices
    are about 2% of the budget apart, so that only a timing at the border of two of these changes a plan, to one that is
    as near to the budget. On a busy machine give torch one thread, whose own time is then counted. What was measured is
    remembered as long as the process lives, and with `timings` for as long as that file: the same plan then, in any
    case.

    Args:
        model: a transformers model of a known family, without adapters; it is not changed.
        batches: model-input dicts without labels, as for `calibrate`; three at least.
        budget: "2x" for half of the original's cost, or the share of it that may remain, in (0, 1).
        of: "latency" (seconds of a forward pass, measured here and now), "macs" (its multiply-accumulate operations) or
            "bytes" (of the saved model).
        parts: the candidates, `FFNPart(num_features=64)` for example; their `layers` say where each is tried. None:
            FFN, heads, pooler and, for encoders and long sequences, linear attention, each at several sizes.
        inputs: model inputs for which latency and MACs are counted; None for the batch of median size.
        tokens: about how many of the batches are used; more is slower and more exact.
        seed: of all draws, and of the config.
        timings: a JSON file of measured seconds: read where it knows them, written where it does not. It belongs to a
            machine; delete it to measure again.
        progress: show a progress bar.

    Returns:
        A Plan: `get_snnk_model(model, plan.config)`, then `calibrate`, then `bundle`. Print it for a table.

    Raises:
        ConfigError: bad arguments, all of them; a budget that cannot be met, with the nearest that can.
        UnsupportedError: an unknown family, or a model that is patched, wrapped or quantized already.

    Example:
        >>> import torch
        >>> from transformers import BertConfig, BertForSequenceClassification
        >>> from snnk_peft import FFNPart, get_snnk_model, plan
        >>> tiny = BertConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64)
        >>> model = BertForSequenceClassification(tiny)
        >>> batches = [{"input_ids": torch.randint(0, 1000, (8, 16))} for _ in range(5)]
        >>> found = plan(model, batches, 0.8, of="macs", parts=[FFNPart(num_features=8)], progress=False)
        >>> found.predicted["measured"] <= 0.8
        True
        >>> patched = get_snnk_model(model, found.config)
    """
    share = _check(budget, of, parts, tokens)
    if timings is not None:
        path_of("timings", timings)
    refuse_prepared(model)
    refuse_patched(model)
    refuse_not_finite(model)
    family_of(model)
    sample = Sample(model, batches, tokens)
    with named_padding(model, sample.padding):
        for number, (_, batch) in enumerate(sample.batches):
            refuse_overflow(model, model_inputs(model, batch), f"batch {number} of those that were chosen")
        given = model_inputs(model, sample.middle if inputs is None else checked_one(model, inputs, "inputs"))
        return _planned(model, sample, given, share, of, parts, seed, timings, tokens, progress)


def _planned(
    model: nn.Module,
    sample: Sample,
    given: Mapping[str, Any],
    share: float,
    of: str,
    parts: Sequence[Part] | None,
    seed: int,
    timings: str | os.PathLike[str] | None,
    tokens: int,
    progress: bool,
) -> Plan:
    if parts is None:
        templates = default_templates(model, _length(given), seed)
    else:
        templates = [Template(part, model, seed) for part in parts]
    measure = Measure(model, given, of, timings)
    saved = measure.savings(templates)
    templates, saved = _worth_it(templates, saved)
    by_place = places(templates)
    _check_reach(by_place, saved, share, of)
    fit_errors, output_errors = _errors(templates, sample, progress)
    offers = [
        [Offer(saved[number].get(key, 0.0), output_errors[number, key]) for number in members]
        for key, members in by_place
    ]
    points = pareto([[o if math.isfinite(o.error) else Offer(0.0, 0.0) for o in place] for place in offers])
    steps = apart(points, math.ceil(STRIDE * share / measure.grain) * measure.grain if measure.grain else 0.0)
    index, config, measured = _settle(templates, by_place, steps, share, seed, measure)
    point, dear = steps[index], steps[index - 1]
    if share / measured > SURPLUS:
        steps = [each for each in points if point.cost <= each.cost <= dear.cost]
        index, config, measured = _settle(templates, by_place, steps, share, seed, measure)
        point = steps[index]
    chosen = {(members[i], key) for (key, members), i in zip(by_place, point.chosen, strict=True) if i >= 0}
    candidates = [
        Candidate(
            key,
            part_name(type(templates[number].part)),
            templates[number].part.size_in_words(),
            saved[number].get(key, 0.0),
            fit_errors.get((number, key)),
            output_errors[number, key],
            (number, key) in chosen,
        )
        for key, members in by_place
        for number in sorted(members)
    ]
    every = max(1, len(points) // POINTS)
    shown = [p for i, p in enumerate(points) if i % every == 0 or p in (point, points[-1])]
    curve = [{"cost": each.cost, "error": each.error} for each in shown]
    predicted = {"cost": point.cost, "speed_up": 1 / point.cost, "error": point.error, "measured": measured}
    settings = {**measure.where, "tokens": tokens, "seed": seed}
    return Plan(config, of, share, predicted, candidates, curve, settings)


def _check(budget: object, of: object, parts: object, tokens: object) -> float:
    faults = []
    share = math.nan
    if isinstance(budget, str) and (times := re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*[xX×]\s*", budget)):
        share = 1 / float(times[1]) if float(times[1]) else math.nan
    elif isinstance(budget, (int, float)) and not isinstance(budget, bool):
        share = float(budget)
    if not 0 < share < 1:
        faults.append(
            f"budget is {repr(budget)[:100]}; expected a factor above 1 such as '2x', or the share of the cost that "
            f"may remain, between 0 and 1, such as 0.5{_meant(budget)}"
        )
    if of not in OF:
        close = closest(of, OF) if isinstance(of, str) else None
        faults.append(
            f"of is {of!r}; expected one of {', '.join(OF)}" + (f". Did you mean {close!r}?" if close else "")
        )
    if parts is not None and not (
        isinstance(parts, Sequence) and parts and all(isinstance(part, Part) for part in parts)
    ):
        shown = f"[{', '.join(map(in_words, parts))}]" if isinstance(parts, (list, tuple)) else in_words(parts)
        faults.append(f"parts is {shown}; expected a list of parts such as [FFNPart(num_features=64)], or None")
    if type(tokens) is not int or tokens < 1:
        faults.append(f"tokens is {tokens!r}; expected an integer >= 1")
    if faults:
        raise ConfigError(faults)
    return share


def _meant(budget: object) -> str:
    """A question about a number above 1, or nothing."""
    try:
        factor = float(budget)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return ""
    return f". Did you mean '{factor:g}x'?" if 1 < factor < math.inf else ""


def _length(inputs: Mapping[str, Any]) -> int:
    main = next((value for value in inputs.values() if isinstance(value, torch.Tensor)), None)
    return IMAGE_TOKENS if main is None or main.ndim != 2 else main.shape[1]


def _worth_it(
    templates: Sequence[Template], saved: Sequence[dict[int | None, float]]
) -> tuple[list[Template], list[dict[int | None, float]]]:
    """The templates that save something somewhere; the others need not be fitted."""
    kept = [number for number, each in enumerate(saved) if any(share > 0 for share in each.values())]
    for number in kept:
        for key in [key for key in templates[number].groups if saved[number].get(key, 0.0) <= 0]:
            del templates[number].groups[key]
    return [templates[number] for number in kept], [saved[number] for number in kept]


def _check_reach(by_place: Places, saved: Sequence[Mapping[int | None, float]], share: float, of: str) -> None:
    """ConfigError if the cheapest candidates of all places are not enough, which is known before they are fitted."""
    most = sum(max(saved[number].get(key, 0.0) for number in members) for key, members in by_place)
    if 1 - most > share * (ROOM if of == "latency" else 1):
        raise _unreachable(1 - most, share, of, "each measured alone")


def _unreachable(nearest: float, share: float, of: str, how: str) -> ConfigError:
    # What is named has to be reachable when it is given back.
    nearest = math.ceil(nearest * 1000) / 1000
    met = math.floor(100 / nearest) / 100
    if met > 1:
        told = f"leaves {nearest:.3f}, so the nearest that can be met is '{met:.2f}x'. Give that"
    else:
        told = "saves nothing measurable. Give larger inputs"
    return ConfigError(
        f"budget leaves {share:.3f} of the {of} ({1 / share:.2f}x); the cheapest choice of the candidates, {how}, "
        f"{told}, smaller candidates as parts=[...], or another unit (latency, macs, bytes)"
    )


def _errors(templates: Sequence[Template], sample: Sample, progress: bool) -> tuple[Errors, Errors]:
    """Measure fit and output errors, by template index and layer; templates of a kind share their passes."""
    fits: Errors = {}
    outputs: Errors = {}
    kinds: dict[type, list[int]] = {}
    for number, template in enumerate(templates):
        kinds.setdefault(type(template.part), []).append(number)
    held_out = sum(out for out, _ in sample.batches)
    total = sum(len(template.groups) for template in templates) * (1 + held_out)
    with tqdm(total=total, desc="plan", unit="step", disable=not progress) as bar:
        for indices in kinds.values():
            kind = [templates[number] for number in indices]
            for into, measured in (
                (fits, fit_all(kind, sample, bar.update)),
                (outputs, measure_damage(kind, sample, bar.update)),
            ):
                into.update({(indices[number], key): error for (number, key), error in measured.items()})
    return fits, outputs


def _settle(
    templates: Sequence[Template], by_place: Places, points: Sequence[Point], share: float, seed: int, measure: Measure
) -> tuple[int, SNNKConfig, float]:
    """Return the first point whose parts together meet the budget; those of the point before do not.

    What parts cost together is near to what they cost alone, and more where less is converted: where the first choice
    costs too much or too little, the next one is where it would be right in proportion, and then halfway between.
    """
    last = len(points) - 1
    dear, fits, nearest = 0, last + 1, 1.0  # nothing is known to fit
    fitting: dict[int, float] = {}
    near, attempt = _first(points, share), 0
    while True:
        if fits - dear < 2:
            if fits > last:
                raise _unreachable(nearest, share, measure.of, "measured in the model")
            near, times = fits, AGAIN  # what a plan rests on is measured as often as what it rules out
        else:
            near, times = min(max(near, dear + 1), fits - 1), 1
        config = _config(templates, by_place, points[near], seed)
        measured = measure.remaining(config, times)
        if measured > share:  # one timing may be wrong, and all that follows from it
            measured = measure.remaining(config, AGAIN)
        nearest = min(nearest, measured)
        if measured <= share and times == AGAIN:
            return near, config, measured
        if measured <= share:
            fitting[near] = measured
        else:
            dear = near
        fits = min((index for index in fitting if index > dear), default=last + 1)
        attempt += 1
        near = _first(points, points[near].cost * share / measured) if attempt < ATTEMPTS else (dear + fits) // 2


def _first(points: Sequence[Point], cost: float) -> int:
    """The first point that costs no more, or else the last."""
    return next((index for index, point in enumerate(points) if point.cost <= cost + 1e-9), len(points) - 1)


def _config(templates: Sequence[Template], by_place: Places, point: Point, seed: int) -> SNNKConfig:
    layers: dict[int, list[int | None]] = {}
    for (key, members), chosen in zip(by_place, point.chosen, strict=True):
        if chosen >= 0:
            layers.setdefault(members[chosen], []).append(key)
    parts = [templates[number].of_layers(layers[number]) for number in sorted(layers)]
    return SNNKConfig(parts=parts, seed=seed, modules_to_save=[])
