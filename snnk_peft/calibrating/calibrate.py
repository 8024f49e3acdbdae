"""calibrate: fit every slot that can be fitted to the module it replaces, on real activations.

Schedules the passes: front to back, as often as each slot's fitter (`Slot.fitter`, in parts/) reads the batches.
Inputs come from the stack as fitted so far; targets are the original module's outputs for them, plus, with
metric="output", the difference between the residual streams, so that a later layer corrects the errors of earlier ones.
"""

from __future__ import annotations

import contextlib
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from tqdm.auto import tqdm

from snnk_peft.arguments import numbers_faults
from snnk_peft.calibrating.adapters import adapters_with_rows, calibrate_adapters
from snnk_peft.calibrating.answers import Answers, Pooling
from snnk_peft.calibrating.attention import fit_attention, learned_kernels, loss_of
from snnk_peft.calibrating.batches import Batches, Survey, model_inputs
from snnk_peft.calibrating.guards import all_or_nothing, common_faults, evaluating, named_padding, refuse_not_finite
from snnk_peft.calibrating.passes import Behind, SlotInputs, execution_order
from snnk_peft.calibrating.report import (
    AdapterReport,
    CalibrationReport,
    SlotReport,
    warn_of_few_tokens,
    warn_of_poor_attention,
)
from snnk_peft.calibrating.sensitivity import sensitivities
from snnk_peft.calibrating.stored_inputs import StoredInputs
from snnk_peft.calibrating.streams import Place, originals, stands_in, sum_behind
from snnk_peft.errors import ConfigError, NumericalError, UnsupportedError
from snnk_peft.families import family_of
from snnk_peft.families.base import unwrap
from snnk_peft.feature_map import FeatureMap, FeatureMapSpec
from snnk_peft.functional.at_hand import offloaded
from snnk_peft.layers.slots import FitOptions, Fitter, Slot
from snnk_peft.solvers.landmarks import RULES
from snnk_peft.solvers.reduce import process, processes, same_everywhere
from snnk_peft.solvers.ridge import DEFAULT_RIDGES
from snnk_peft.tuner.given_model import no_adapter, takes_model
from snnk_peft.tuner.slot_layer import SlotLayer, active_module, original_path, root_of

HELD_OUT = 0.2
METRICS = ("output", "local")


@takes_model
def calibrate(
    model: nn.Module,
    batches: Batches,
    *,
    landmarks: str = "greedy",
    held_out: float | None = None,
    ridges: Sequence[float] | None = None,
    refit: bool = True,
    steps: int = 0,
    metric: str = "output",
    pooling: Pooling = "mean",
    progress: bool = True,
) -> CalibrationReport | AdapterReport:
    """Fit the replaced FFN blocks, pooler, attention, heads and low-rank layers of a patched model to the originals.

    All or nothing: an error or Ctrl-C at any moment leaves the model bit for bit as it was.

    Adapters, and linear attention over rows other than `centroids`, do not approximate a module's output. In a model
    without other parts they are fitted themselves: learned maps of attention with `steps`, as by `fit_attention`, or
    the rows of adapters from labelled batches, as by `calibrate_adapters`. Next to parts that replace a module they
    stay unchanged, and the fits see their effect in their inputs; use these two functions to fit them.

    With several processes (torch.distributed initialised), each passes its own share of the batches:
    `batches[rank::world_size]` in every process fits what `batches` fits in one, up to the rounding of sums, with the
    same bits in every process. Shares may differ in size; each needs at least one batch. Calibrate before DDP or FSDP.

    Args:
        model: a model from `get_snnk_model` whose active adapter replaces something.
        batches: model-input dicts on any device, as a list, a DataLoader or a function that returns an iterator; read
            once per slot (some low-rank layers: twice), always in the same order. Labels are used for rows of adapters
            only. A few hundred to a few thousand sentences of the kind the model will see are enough.
        landmarks: how landmark projections choose their rows: "greedy" or "importance" (see solvers/landmarks).
        held_out: fraction of the batches that chooses the regularisation and is not fitted, in (0, 1). None: 0.2; for
            rows of adapters 0.5.
        ridges: candidates for the regularisation, as fractions of the mean feature variance; None: `DEFAULT_RIDGES` of
            solvers/ridge.py, and for rows of adapters `RIDGES` of solvers/gradient_rows.py.
        refit: once the regularisation is chosen, fit to all batches, including the held-out ones. The reported error is
            the held-out one from before.
        steps: Adam steps per layer after a closed-form fit; 0 for the closed form alone. For an attention part over
            `centroids`, the first half minimises the divergence of the weights from softmax, the second half the error
            of the output; 200 take a few seconds per layer. For an FFN or pooler whose rows come from the layer
            (`landmark`) or are learned, they are trained to lower the error after the contraction, on a sample of
            16,384 tokens, and kept only if the error on held-out tokens falls; 200 take one to three seconds per layer.
            A narrower FFN trains all of its matrices in the same way.
        metric: how errors are measured. "output": by their effect on the model's outputs (logits, or the pooled
            embedding), whose gradients one pass computes without labels; targets then also correct the errors of
            earlier layers, as far as this helps on held-out tokens. "local": at the output of the replaced module
            alone, whose own outputs are the target; no gradients are needed.
        pooling: how an encoder without a head turns token states into its embedding: "mean" over the mask, "first" or
            "last" token, or a function of states and inputs.
        progress: show a progress bar with an estimate.

    Returns:
        A CalibrationReport, or an AdapterReport for rows of adapters; print it for a table.

    Raises:
        ConfigError: nothing to calibrate, too few batches, an iterator that can be read only once or gives other
            batches when read again, padding without a mask, token ids beyond the vocabulary, bad arguments; all faults
            that can be found before anything runs, at once.
        ValueError: a weight or activation is NaN or infinite; names the parameter, or slot and batch.

    Warns:
        NumericalWarning: too few tokens to determine a slot, with the number needed; held-out texts that are also
            fitted; batches whose order changes between reads.
        UserWarning: attention whose error stays above a quarter; a far field fitted to short sequences.

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
    slots = {name: module for name, module in model.named_modules() if isinstance(module, SlotLayer)}
    slots = {name: layer for name, layer in slots.items() if slot_to_fit(layer) is not None}
    if not slots and steps and learned_kernels(model):
        share = HELD_OUT if held_out is None else held_out
        return fit_attention(model, batches, steps=steps, loss=loss_of(model), held_out=share, progress=progress)
    if not slots and adapters_with_rows(model):
        given = {"held_out": held_out, "ridges": ridges}
        given = {name: value for name, value in given.items() if value is not None}
        return calibrate_adapters(model, batches, refit=refit, progress=progress, **given)  # type: ignore[arg-type]
    held_out = HELD_OUT if held_out is None else held_out
    ridges = DEFAULT_RIDGES if ridges is None else ridges
    faults = []
    if landmarks not in RULES:
        faults.append(f"landmarks is {landmarks!r}; expected one of {', '.join(RULES)}")
    if type(steps) is not int or steps < 0:
        faults.append(f"steps is {steps!r}; expected an integer >= 0")
    if metric not in METRICS:
        faults.append(f"metric is {metric!r}; expected one of {', '.join(METRICS)}")
    faults += numbers_faults("ridges", ridges, low=0)
    options = FitOptions(landmarks, ridges, refit, steps)
    answers = Answers(model, pooling) if metric == "output" else None
    if not slots:
        faults.append(
            "the model has no active part that can be calibrated: "
            + (
                no_adapter(model)
                or "expected a model from get_snnk_model with ffn=, pooler=, low_rank=, attention over projection "
                "'centroids' or a part such as NarrowHeadsPart; or linear attention over a learned projection with "
                "steps=200, or adapters over 'free' or 'informed'"
            )
        )
    away = [name for name, layer in slots.items() if offloaded(layer.snnk_slots)]
    faults += common_faults(model, held_out, "readouts", away)
    if not faults:
        survey = Survey(model, batches, held_out)
        faults = survey.faults
    if faults:
        raise ConfigError(faults)
    refuse_not_finite(model)
    with all_or_nothing(model), named_padding(model, survey.padding):
        reports, remarks = _fit_all(model, slots, survey, held_out, options, answers, progress)
        settings = {
            "landmarks": landmarks,
            "held_out": held_out,
            "ridges": list(ridges),
            "refit": refit,
            "steps": steps,
            "metric": metric,
            "batches": survey.total,
            "processes": processes(),
        }
        warn_of_few_tokens(reports)
        warn_of_poor_attention(reports)
        for remark in remarks:
            warnings.warn(remark, UserWarning, stacklevel=3)
        for layer in slots.values():
            if (slot := slot_to_fit(layer)) is not None:
                slot.after_fit()
        return CalibrationReport(reports, settings)


def _fit_all(
    model: nn.Module,
    slots: Mapping[str, SlotLayer],
    survey: Survey,
    held_out: float,
    options: FitOptions,
    answers: Answers | None,
    progress: bool,
) -> tuple[list[SlotReport], list[str]]:
    with evaluating(model):
        fitters = {name: fitter_of(model, layer, options) for name, layer in slots.items()}
        standing = {name: each for name, each in model.named_modules() if isinstance(each, SlotLayer)}
        standing = {name: each for name, each in standing.items() if any(map(stands_in, each.active_slots()))}
        first = model_inputs(model, next(iter(survey))[1])
        reached = execution_order(model, standing, first)
        order = {name: runs for name, runs in reached.items() if name in slots}
        fitters = {name: fitters[name] for name in order}
        if processes() > 1 and (alone := [name for name in order if not fitters[name].reduces]):
            kinds = sorted({type(fitters[name]).__name__ for name in alone})
            raise ConfigError(
                f"{', '.join(kinds)} (of {', '.join(alone)}) reads one process's share of the data only, and there are "
                f"{processes()}; expected a Fitter with reduces = True. Calibrate in one process and load the result"
            )
        judged = {name: each.counted for name, each in fitters.items() if answers and each.counted is not None}
        passes = sum(fitter.reads for fitter in fitters.values()) + bool(judged)
        quiet = not progress or process() > 0
        root = root_of(model)
        with (
            StoredInputs(root) as stored,
            tqdm(total=passes * survey.total, desc="calibrate", unit="batch", disable=quiet) as bar,
        ):
            sensed = {}
            if answers and judged:
                with originals(standing):
                    places = {path: root.get_submodule(path) for path in judged.values()}
                    sensed = sensitivities(model, places, survey, answers, bar.update)
            reports = []
            names = list(reached)
            for number, (name, runs) in enumerate(order.items()):
                layer, fitter, weights, behind = slots[name], fitters[name], None, None
                if name in judged:
                    found = sensed[judged[name]]
                    fitter.metric, weights = found.root(), found.weights
                    if number and runs == 1:
                        place = _sum_behind(model, judged[name], standing, first)
                        rest = {each: standing[each] for each in names[names.index(name) :]}
                        whole = partial(stored.one_pass, model, name, layer, runs, "original")
                        behind = Behind(place, rest, standing, whole)
                start = partial(stored.one_pass, model, name, layer, runs)
                data = SlotInputs(model, layer, fitter, runs, survey, held_out, bar, start, weights, behind)
                reports.append(_fit_slot(name, layer, fitter, data))
                same_everywhere(layer.snnk_slots)
                torch.clear_autocast_cache()  # otherwise the caller's autocast keeps copies of the old tensors
    said = [fitter.remark for fitter in fitters.values() if fitter.remark is not None]
    return reports, list(dict.fromkeys(said))


def _sum_behind(model: nn.Module, path: str, standing: Mapping[str, SlotLayer], inputs: Mapping[str, Any]) -> Place:
    """Find where the output at `path`, on which a slot's error is measured, enters the residual stream."""
    root = root_of(model)
    layers: list[str] = []
    with contextlib.suppress(UnsupportedError):
        layers = family_of(root).layer_paths(root)
    inside = next((each for each in layers if f"{path}.".startswith(f"{each}.")), path)
    with originals(standing):
        return sum_behind(root, path, root.get_submodule(inside), lambda: model(**inputs))


@dataclass(frozen=True)
class _FitPlace:
    """A `FitPlace`: one slotted module of a model."""

    root: nn.Module
    layer: SlotLayer

    @property
    def path(self) -> str:
        return original_path(next(name for name, module in self.root.named_modules() if module is self.layer))

    @property
    def original(self) -> nn.Module:
        return unwrap(self.layer.base_layer)

    def original_at(self, path: str) -> nn.Module:
        return unwrap(self.root.get_submodule(path))

    def active_at(self, path: str) -> nn.Module:
        return active_module(self.root.get_submodule(path))


def slot_to_fit(layer: SlotLayer) -> Slot | None:
    """Return the active slot of a layer that can be fitted, or None."""
    return next((slot for slot in layer.active_slots() if type(slot).fitter is not Slot.fitter), None)


def fitter_of(model: nn.Module, layer: SlotLayer, options: FitOptions) -> Fitter:
    """Return the fitter for the slot of a layer that can be fitted."""
    slot = slot_to_fit(layer)
    assert slot is not None
    fitter = slot.fitter(_FitPlace(root_of(model), layer), options)
    assert fitter is not None
    return fitter


@torch.no_grad()
def _fit_slot(name: str, layer: SlotLayer, fitter: Fitter, data: SlotInputs) -> SlotReport:
    start, path = time.perf_counter(), original_path(name)
    try:
        fit = fitter.fit(data)
    except (ValueError, NumericalError) as error:
        if type(error) not in (ValueError, ConfigError, NumericalError):
            raise
        where = path if data.at is None else f"{path}, batch {data.at}"
        raise type(error)(f"{where}{f' of process {process()}' if processes() > 1 else ''}: {error}") from error
    return SlotReport(
        path,
        fit.size,
        fit.tokens,
        fit.held_out_tokens,
        fit.ridge,
        fit.error_before,
        fit.error_after,
        time.perf_counter() - start,
        fit.divergence_before,
        fit.divergence_after,
        fit.unknowns,
        _settings(layer),
        fit.longest,
    )


def _settings(layer: SlotLayer) -> dict[str, Any]:
    """Return the settings of the fitted slot's feature maps, which all share them."""
    slot = slot_to_fit(layer)
    assert slot is not None
    feature_map = next((module for module in slot.modules() if isinstance(module, FeatureMap)), None)
    if feature_map is None:
        return {}
    spec = FeatureMapSpec.of(feature_map).as_dict()
    return {key: spec[key] for key in ("component", "projection", "component_params", "projection_params")}
