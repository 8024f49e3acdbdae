"""plan: choose parts, layers and sizes for a budget.

Every candidate is measured alone: its saving, and its effect on the answers of the model when everything else is the
original. Both are then added up, also for sizes between the measured ones. Both sums are checked at the end: the chosen
parts are measured together, and if they miss the budget, the choice is repeated for a larger or smaller one; and they
are fitted together to measure their effect on the answers.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from tqdm.auto import tqdm

from snnk_peft.arguments import in_words, path_of
from snnk_peft.calibrating.answers import Answers, Pooling
from snnk_peft.calibrating.batches import IMAGE_TOKENS, Batches, checked_one, model_inputs
from snnk_peft.calibrating.guards import named_padding, refuse_not_finite
from snnk_peft.config_parts import part_name
from snnk_peft.errors import ConfigError
from snnk_peft.families import family_of
from snnk_peft.options import closest
from snnk_peft.parts import Part
from snnk_peft.planning.candidates import Places, Template, default_templates, places
from snnk_peft.planning.choices import Candidate, Choices, named
from snnk_peft.planning.costs import OF, Measure
from snnk_peft.planning.damage import joint_error, measure_damage
from snnk_peft.planning.fits import Errors, fit_all, sense
from snnk_peft.planning.result import POINTS, Plan, share_of
from snnk_peft.planning.sample import Sample
from snnk_peft.planning.settle import check_reach, settle
from snnk_peft.planning.sizes import kind_of
from snnk_peft.planning.timing import LIMIT
from snnk_peft.tuner.given_model import refuse_patched, refuse_prepared, takes_model


@takes_model
def plan(
    model: nn.Module,
    batches: Batches,
    budget: str | float = "2x",
    *,
    of: str = "latency",
    parts: Sequence[Part] | None = None,
    inputs: Mapping[str, Any] | None = None,
    tokens: int = 4096,
    pooling: Pooling = "mean",
    seed: int = 0,
    timings: str | os.PathLike[str] | None = None,
    check: bool = True,
    progress: bool = True,
) -> Plan:
    """Choose parts, layers and sizes that meet a cost budget with the least error.

    Each candidate is measured in each layer: its saving, and its error on held-out batches with only this layer
    converted and fitted. The error is the distance of the answers from the original's, to second order, by the
    gradients of the answers at the layer's output (see `measure_damage`): the Kullback-Leibler divergence for logits,
    1 − cosine for embeddings (pooled by `pooling`), the squared error relative to the variance for anything else. Sizes
    in between are interpolated. The choice of least total error for each cost is exact (a knapsack). Its parts are then
    measured together; the plan is the choice of least error that meets the budget and uses at least 97% of it, if there
    is one, and is finally fitted to measure the joint effect of its parts.

    MACs and bytes are exact, so the same arguments give the same plan. Timings vary. Each is the minimum of several
    that alternate with the original's; savings are rounded to steps of 0.5%, and choices are about 1% of the budget
    apart, so that only a timing at the border of two steps changes a plan, to one that is as close to the budget. On a
    busy machine, give torch one thread; its CPU time is then measured. Timings end after `timing_limit` seconds (in the
    plan's settings) and the minimum number of rounds, whatever the load. Measurements are cached while the process
    lives, and with `timings` while that file exists, which gives the same plan in any case.

    Args:
        model: a transformers model of a known family, without adapters; it is not changed.
        batches: model-input dicts without labels, as for `calibrate`; at least three.
        budget: "2x" for half of the original's cost, or the share of it to keep, in (0, 1).
        of: "latency" (seconds of a forward pass, measured on this machine), "macs" (its multiply-accumulate operations)
            or "bytes" (size of the saved model).
        parts: the candidates, `FFNPart(num_features=64)` for example, each tried in its `layers`. If parts differ in
            size alone, sizes in between may be chosen as well. None: FFN, heads, pooler and, for encoders and long
            sequences, linear attention.
        inputs: model inputs on which latency and MACs are measured; None for the batch of median size.
        tokens: approximate number of tokens used; more is slower and more accurate.
        pooling: pooling of an encoder without a head, as in `calibrate`.
        seed: seed of all random draws, and of the config.
        timings: a JSON file that caches measured seconds. It is specific to a machine; delete it to measure again.
        check: finally fit all chosen parts to the sample and report their error; `convert` skips this, since it fits
            them to all of the data and compares the result.
        progress: show a progress bar.

    Returns:
        A Plan: `get_snnk_model(model, plan.config)`, then `calibrate`, then `bundle`. Print it for a table.

    Raises:
        ConfigError: all bad arguments; a budget that cannot be met, with the nearest that can.
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
        given = model_inputs(model, sample.middle if inputs is None else checked_one(model, inputs, "inputs"))
        answers = Answers(model, pooling)
        found = _planned(model, sample, answers, given, share, of, parts, seed, timings, tokens, progress)
        if not check:
            return found
        error = joint_error(model, found.config, sample, answers)
        return replace(found, predicted={**found.predicted, "measured_error": error})


def _planned(
    model: nn.Module,
    sample: Sample,
    answers: Answers,
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
    most = sum(max(saved[number].get(key, 0.0) for number in members) for key, members in by_place)
    check_reach(most, share, of)
    kinds, candidates = _candidates(templates, by_place, saved, *_errors(templates, sample, answers, seed, progress))
    choices = Choices(candidates, kinds, seed)
    point, measured = settle(choices, share, measure)
    every = max(1, len(choices.points) // POINTS)
    shown = [p for i, p in enumerate(choices.points) if i % every == 0 or p in (point, choices.points[-1])]
    return Plan(
        choices.config(point),
        of,
        share,
        {
            "cost": point.cost,
            "speed_up": 1 / point.cost,
            "error": point.error,
            "measured": measured,
        },
        choices.marked(point),
        [{"cost": each.cost, "error": each.error} for each in shown],
        {**measure.where, "tokens": tokens, "seed": seed, **({"timing_limit": LIMIT} if of == "latency" else {})},
        [named(kind) for kind in kinds],
    )


def _candidates(
    templates: Sequence[Template],
    by_place: Places,
    saved: Sequence[Mapping[int | None, float]],
    fit_errors: Errors,
    output_errors: Errors,
) -> tuple[list[Part], list[Candidate]]:
    """Return the kinds, and all measurements by place, kind and size."""
    by_kind: dict[Any, list[int]] = {}
    for number, template in enumerate(templates):
        by_kind.setdefault(kind_of(template.part), []).append(number)
    candidates = []
    for place, (key, members) in enumerate(by_place):
        for kind, numbers in enumerate(by_kind.values()):
            for number in (number for number in numbers if number in members):
                part = templates[number].part
                candidates.append(
                    Candidate(
                        key,
                        part_name(type(part)),
                        part.size_in_words(),
                        saved[number].get(key, 0.0),
                        fit_errors.get((number, key)),
                        output_errors[number, key],
                        False,
                        place,
                        kind,
                    )
                )
    return [templates[numbers[0]].part for numbers in by_kind.values()], candidates


def _check(budget: object, of: object, parts: object, tokens: object) -> float:
    share, fault = share_of(budget)
    faults = [] if fault is None else [fault]
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


def _length(inputs: Mapping[str, Any]) -> int:
    main = next((value for value in inputs.values() if isinstance(value, torch.Tensor)), None)
    return IMAGE_TOKENS if main is None or main.ndim != 2 else main.shape[1]


def _worth_it(
    templates: Sequence[Template], saved: Sequence[dict[int | None, float]]
) -> tuple[list[Template], list[dict[int | None, float]]]:
    """Return the templates that save something somewhere; the others need not be fitted."""
    kept = [number for number, each in enumerate(saved) if any(share > 0 for share in each.values())]
    for number in kept:
        for key in [key for key in templates[number].groups if saved[number].get(key, 0.0) <= 0]:
            del templates[number].groups[key]
    return [templates[number] for number in kept], [saved[number] for number in kept]


def _errors(
    templates: Sequence[Template], sample: Sample, answers: Answers, seed: int, progress: bool
) -> tuple[Errors, Errors]:
    """Measure fit and output errors, by template index and layer; templates of a kind are fitted together."""
    fits: Errors = {}
    kinds: dict[type, list[int]] = {}
    for number, template in enumerate(templates):
        kinds.setdefault(type(template.part), []).append(number)
    held_out = sum(out for out, _ in sample.batches)
    total = sum(len(template.groups) for template in templates) * (1 + held_out) + len(sample.batches)
    with tqdm(total=total, desc="plan", unit="step", disable=not progress) as bar:
        sensed = sense(templates, sample, answers, bar.update)
        for indices in kinds.values():
            measured = fit_all([templates[number] for number in indices], sample, sensed, bar.update)
            fits.update({(indices[number], key): error for (number, key), error in measured.items()})
        return fits, measure_damage(templates, sample, answers, seed, bar.update)
