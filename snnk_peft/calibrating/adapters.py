"""calibrate_adapters: rows of adapters from the gradients of one labelled pass, before training.

Sixteen random directions out of a few hundred give only a small part of the loss reduction that an adapter can reach;
the gradient of the loss shows the best ones (solvers/gradient_rows.py). Nothing is trained: adapters are zero before
and after, so one set of forward and backward passes serves all of them.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from tqdm.auto import tqdm

from snnk_peft.arguments import numbers_faults
from snnk_peft.calibrating.batches import Batch, Batches, Survey, is_held_out, placed
from snnk_peft.calibrating.guards import all_or_nothing, common_faults, evaluating, named_padding, refuse_not_finite
from snnk_peft.calibrating.report import AdapterReport, AdapterSlotReport
from snnk_peft.errors import ConfigError, NumericalError
from snnk_peft.functional.at_hand import offloaded
from snnk_peft.layers.adapter import GatedReadout
from snnk_peft.layers.feature_stage import FeatureStage
from snnk_peft.layers.slots import Slot, real_tokens
from snnk_peft.repeats import LABELS
from snnk_peft.solvers.gradient_rows import RIDGES, GradientMoments, gradient_rows
from snnk_peft.solvers.reduce import process, processes, same_everywhere
from snnk_peft.tuner.given_model import no_adapter, takes_model
from snnk_peft.tuner.slot_layer import SlotLayer, original_path, root_of

ROOM = 1 << 28  # bytes of statistics at a time; beyond that, adapters need further passes
TIE = 1e-6  # new rows must be better by this share; otherwise rounding would choose between equally good ones
FP16_SCALE = 1024.0  # gradients of a loss in fp16 vanish otherwise


@dataclass(frozen=True)
class _Adapter:
    """An adapter whose rows can be computed."""

    path: str
    stage: FeatureStage
    readout: GatedReadout

    @property
    def shape(self) -> tuple[int, int]:
        """Input and output dimensions."""
        return self.stage.dim, self.readout.A.shape[0]

    @property
    def room(self) -> int:
        return 8 * GradientMoments.numbers(*self.shape)


@takes_model
def calibrate_adapters(
    model: nn.Module,
    batches: Batches,
    *,
    held_out: float = 0.5,
    ridges: Sequence[float] = RIDGES,
    refit: bool = True,
    progress: bool = True,
) -> AdapterReport:
    """Set the rows of untrained adapters to the directions that reduce the loss most, from one labelled pass.

    Applies to adapters over the projections "free" (whose rows are then trained) and "informed" (whose rows are fixed).
    The model's outputs do not change. A new task head should start at the labels' mean or frequencies, as in
    recipes/finetune.py; otherwise the gradients mostly correct the head.

    All or nothing: an error or Ctrl-C at any moment leaves the model bit for bit as it was. With several processes,
    each passes its own share of the batches, as for `calibrate`.

    Args:
        model: a model from `get_snnk_model` with an adapter that has not been trained.
        batches: model-input dicts with labels, from which the model computes a loss; a list, a DataLoader or a function
            that returns an iterator, always in the same order. A few hundred examples in a dozen batches are enough.
        held_out: fraction of the batches that chooses the regularisation and evaluates the rows.
        ridges: candidates for the regularisation, as fractions of the mean square of an input.
        refit: once the regularisation is chosen, compute the rows from all batches.
        progress: show a progress bar with an estimate.

    Returns:
        An AdapterReport; print it for a table.

    Raises:
        ConfigError: no such adapter, a trained one, too few batches, batches without labels, bad arguments.
        ValueError: a weight, the loss or a gradient is not finite; names the parameter or the batch.
        NumericalError: no gradient arrives at an adapter.

    Example:
        >>> import torch
        >>> from transformers import BertConfig, BertForSequenceClassification
        >>> from snnk_peft import AdapterPart, SNNKConfig, calibrate_adapters, get_snnk_model
        >>> tiny = BertConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64)
        >>> part = AdapterPart("gelu", "free", num_features=4, placement="query_value")
        >>> model = get_snnk_model(BertForSequenceClassification(tiny), SNNKConfig(adapter=part))
        >>> ids = torch.randint(0, 1000, (12, 8, 16))
        >>> batches = [{"input_ids": each, "labels": (each[:, 0] > 500).long()} for each in ids]
        >>> len(calibrate_adapters(model, batches, progress=False).slots)
        4
    """
    start = time.perf_counter()
    adapters, faults, away = _adapters(model)
    faults += common_faults(model, held_out, "adapters", away)
    faults += numbers_faults("ridges", ridges, above=0)
    if not faults:
        survey = Survey(model, batches, held_out)
        faults = survey.faults
    if faults:
        raise ConfigError(faults)
    refuse_not_finite(model)
    with all_or_nothing(model), named_padding(model, survey.padding), evaluating(model), torch.enable_grad():
        slots = []
        groups = _groups(adapters)
        with tqdm(
            total=len(groups) * survey.total, desc="rows", unit="batch", disable=not progress or process() > 0
        ) as bar:
            for group in groups:
                moments = _one_pass(model, group, survey, held_out, bar)
                slots += [_settle(adapter, sums, ridges, refit) for adapter, sums in zip(group, moments, strict=True)]
    settings = {
        "held_out": held_out,
        "ridges": list(ridges),
        "refit": refit,
        "batches": survey.total,
        "processes": processes(),
    }
    return AdapterReport(slots, time.perf_counter() - start, settings)


def adapters_with_rows(model: nn.Module) -> bool:
    """Return True if there are active adapters whose rows can be computed."""
    return bool(_adapters(model)[0])


def _adapters(model: nn.Module) -> tuple[list[_Adapter], list[str], list[str]]:
    """Collect the adapters whose rows can be computed, what is wrong, and where adapters are offloaded."""
    root = root_of(model)

    def slots_at(path: str) -> list[Slot]:
        return root.get_submodule(path).active_slots()

    adapters, fixed, away = [], set(), []
    for name, layer in model.named_modules():
        if not isinstance(layer, SlotLayer):
            continue
        for slot in layer.active_slots():
            if (pair := slot.reads_out(slots_at)) is None:
                continue
            projection = pair[0].feature_map.projection
            if not projection.takes_rows:
                fixed.add(type(projection).__name__.lower())
            elif offloaded(slot):
                away.append(name)
            else:
                adapters.append(_Adapter(original_path(name), *pair))
    faults = []
    if not adapters and not away:
        have = f"the adapter's projection is {', '.join(sorted(fixed))}" if fixed else "the model has no active adapter"
        faults.append(
            f"{have}, so there are no rows to make: "
            + (
                no_adapter(model)
                or 'expected a model from get_snnk_model with AdapterPart(projection="free") for rows that are '
                'trained, or "informed" for rows that stay'
            )
        )
    if trained := [adapter.path for adapter in adapters if bool(adapter.readout.matrix().any())]:
        faults.append(
            f"the adapters of {', '.join(trained)} have been trained, and new rows would change what the model "
            "computes; calibrate before training"
        )
    return adapters, faults, away


def _groups(adapters: Sequence[_Adapter]) -> list[list[_Adapter]]:
    """Group adapters so that the statistics of each group fit into memory."""
    groups: list[list[_Adapter]] = []
    left = 0
    for adapter in adapters:
        if not groups or adapter.room > left:
            groups.append([])
            left = ROOM
        groups[-1].append(adapter)
        left -= adapter.room
    return groups


def _one_pass(
    model: nn.Module, adapters: Sequence[_Adapter], survey: Survey, held_out: float, bar: Any
) -> list[GradientMoments]:
    moments = [GradientMoments(*adapter.shape, adapter.readout.A.device) for adapter in adapters]
    inputs: list[list[torch.Tensor]] = [[] for _ in adapters]
    outputs: list[list[torch.Tensor]] = [[] for _ in adapters]
    with contextlib.ExitStack() as hooks:
        for adapter, seen, given in zip(adapters, inputs, outputs, strict=True):
            hooks.enter_context(adapter.stage.register_forward_pre_hook(_keeping(seen, adapter.stage)))
            hooks.enter_context(adapter.readout.register_forward_hook(_differentiable(given)))
        for index, batch in survey:
            judges = is_held_out(index, held_out)
            gradients = _gradients(model, index, batch, outputs)
            mask = batch.get("attention_mask")
            examples = len(next(value for value in batch.values() if isinstance(value, torch.Tensor)))
            for sums, seen, wanted in zip(moments, inputs, gradients, strict=True):
                for x, g in zip(seen, wanted, strict=True):
                    real = None if mask is None else mask.to(x.device)
                    sums.add(real_tokens(x, real), real_tokens(g, real) * examples, judges)
                sums.examples[int(judges)] += examples
            for kept in (*inputs, *outputs):
                kept.clear()
            bar.update()
    for sums in moments:
        sums.reduce()
    return moments


def _keeping(kept: list[torch.Tensor], stage: FeatureStage) -> Any:
    def keep(module: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        with torch.no_grad():
            kept.append(stage.seen(args[0].detach()))

    return keep


def _differentiable(kept: list[torch.Tensor]) -> Any:
    """Return a hook that keeps an output and makes it require a gradient, even if nothing is trained."""

    def keep(module: nn.Module, args: object, output: torch.Tensor) -> torch.Tensor:
        output = output if output.requires_grad else output.detach().requires_grad_()
        kept.append(output)
        return output

    return keep


def _gradients(
    model: nn.Module, index: int, batch: Batch, outputs: Sequence[Sequence[torch.Tensor]]
) -> list[list[torch.Tensor]]:
    """Compute the gradient of the loss with respect to each output that a forward pass leaves in `outputs`.

    Raises:
        ConfigError: the model returns no loss for the batch.
        ValueError: loss or gradient is not finite.
    """
    words = [key for key in LABELS if key in batch and not isinstance(batch[key], torch.Tensor)]
    if words:
        raise ConfigError(
            f"batch {index} holds {words[0]} as a {type(batch[words[0]]).__name__}, which are no numbers; expected a "
            "tensor of class indices, or of numbers"
        )
    loss = getattr(model(**placed(model, batch)), "loss", None)
    if not isinstance(loss, torch.Tensor):
        raise ConfigError(
            f"batch {index} holds {', '.join(batch)}, of which {type(root_of(model)).__name__} makes no loss; expected "
            "labels as well: rows are chosen by the loss's gradient"
        )
    flat = [output for several in outputs for output in several]
    scale = FP16_SCALE if any(output.dtype == torch.float16 for output in flat) else 1.0
    gradients: Sequence[torch.Tensor | None] = [None] * len(flat)
    if loss.requires_grad:
        gradients = torch.autograd.grad(loss.float() * scale, flat, allow_unused=True)
    if not bool(torch.isfinite(loss)) or any(g is not None and not bool(torch.isfinite(g).all()) for g in gradients):
        raise ValueError(
            f"batch {index}: the loss is {loss.item():g}, and it or a gradient is not finite; expected finite numbers. "
            "Look at this batch and its labels, or run the model in fp32 or bf16"
        )
    plain = iter(
        [torch.zeros_like(o) if g is None else g.double() / scale for o, g in zip(flat, gradients, strict=True)]
    )
    return [[next(plain) for _ in several] for several in outputs]


@torch.no_grad()
def _settle(adapter: _Adapter, moments: GradientMoments, ridges: Sequence[float], refit: bool) -> AdapterSlotReport:
    """Install the rows, scaled so that their projections of the inputs have the same mean square as the old ones."""
    projection = adapter.stage.feature_map.projection
    before = projection.materialize().detach().double()
    try:
        fit = gradient_rows(moments, before, ridges, refit)
    except NumericalError as error:
        raise NumericalError(f"{adapter.path}: {error}") from error
    taken = fit.slope > max(fit.slope_before, 0.0) * (1 + TIE)
    if taken:
        C = moments.moment
        wanted, squares = (((rows @ C) * rows).sum(-1) for rows in (before, fit.rows))
        # If the gradient has fewer directions than there are rows, the remaining rows stay as they are.
        made = fit.rows.any(1)
        factors = (wanted.mean() / squares.where(made, 1.0)).sqrt()
        rows = torch.where(made[:, None], fit.rows * factors[:, None], before)
        projection.take(rows)
        mean = rows @ moments.mean
        adapter.stage.recenter(mean, (((rows @ C) * rows).sum(-1) - mean.square()).clamp_min(0).sqrt())
        same_everywhere(adapter.stage)
    slopes = fit.slope_before, fit.slope, fit.slope_of_all
    return AdapterSlotReport(adapter.path, len(before), *slopes, taken, fit.ridge, moments.tokens)
