"""fit_attention: fit learned linear attention to the softmax it replaces, on the layer's own queries and keys.

Function approximation at initialisation for linear attention (Definition 10.2 of "Efficiently learning low-rank
networks"), with these choices where the definition is open or wrong. The parameters of the feature maps (and of the
blend, if there are several fields) are fitted, not new queries and keys, which are known for a pretrained model. The
definition draws Gaussian values V independently of Q and K, but a layer computes all three from the same tokens; so
real queries, keys and values are used. The squared error for such V still has a closed form, ‖Â − A‖²_F of the
attention weights: loss="weights".

All layers are fitted at once: in each forward pass every layer computes softmax, so that the inputs of the next one do
not change, and alongside it the loss of its linear attention, whose gradient stops at the queries and keys.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import time
from collections.abc import Iterator

import torch
from torch import nn
from tqdm.auto import tqdm

from snnk_peft.arguments import number_faults
from snnk_peft.calibrating.batches import Batches, Survey, is_held_out, model_inputs
from snnk_peft.calibrating.guards import all_or_nothing, common_faults, evaluating, named_padding, refuse_not_finite
from snnk_peft.calibrating.report import CalibrationReport, SlotReport
from snnk_peft.errors import ConfigError, NumericalError
from snnk_peft.families.base import unwrap
from snnk_peft.functional.at_hand import offloaded
from snnk_peft.layers.kernel_attention import KernelAttention
from snnk_peft.parts.attention.recording import Observer
from snnk_peft.parts.attention.slots import Attend
from snnk_peft.solvers.reduce import processes
from snnk_peft.tuner.given_model import no_adapter, takes_model
from snnk_peft.tuner.slot_layer import SlotLayer

LOSSES = ("cross_entropy", "output", "weights")


@takes_model
def fit_attention(
    model: nn.Module,
    batches: Batches,
    *,
    steps: int = 200,
    learning_rate: float = 1e-2,
    loss: str = "cross_entropy",
    held_out: float = 0.2,
    progress: bool = True,
) -> CalibrationReport:
    """Fit learned feature maps of linear attention to the softmax attention that they replace, without labels.

    Layers that attend to a band keep their maps, since there is no softmax beyond the band to fit; so do layers whose
    maps have no parameters. The rest of the model does not change. Call it before training, after `calibrate`.

    All or nothing: an error or Ctrl-C at any moment leaves the model bit for bit as it was.

    Args:
        model: a model from `get_snnk_model` whose active adapter has an AttentionPart with a learned projection
            ("free", "gmm" and so on), not yet wrapped by DDP or FSDP.
        batches: model-input dicts, as for `calibrate`: a list, a DataLoader or a function that returns an iterator,
            always in the same order. Labels are ignored. Read repeatedly until all steps are done.
        steps: number of Adam steps, one batch each; the learning rate decays linearly to zero.
        learning_rate: learning rate of the first step.
        loss: per query and head, "cross_entropy" of the attention weights (as Kullback-Leibler divergence; for positive
            features), "output", the squared error of the heads' outputs, or "weights", that of the weights. The first
            and the last materialise the weights, O(L²) memory, for at most 2048 keys.
        held_out: fraction of the batches that is not fitted, in (0, 1); errors are reported on these.
        progress: show a progress bar with an estimate.

    Returns:
        A CalibrationReport with a row per layer; errors are squared errors of the heads' outputs relative to their
        variance on held-out tokens, whatever the loss; seconds are the layer's share.

    Raises:
        ConfigError: nothing to fit, too few batches, bad arguments, several processes; all faults at once.
        ValueError: a weight is NaN or infinite; names the parameter.
        NumericalError: the loss is no longer finite.

    Example:
        >>> import torch
        >>> from transformers import BertConfig, BertForSequenceClassification
        >>> from snnk_peft import AttentionPart, SNNKConfig, get_snnk_model
        >>> from snnk_peft.calibrating.attention import fit_attention
        >>> tiny = BertConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64)
        >>> part = AttentionPart(component="softmax_pm", projection="free", num_features=8)
        >>> model = get_snnk_model(BertForSequenceClassification(tiny), SNNKConfig(attention=part))
        >>> batches = [{"input_ids": torch.randint(0, 1000, (8, 16))} for _ in range(5)]
        >>> report = fit_attention(model, batches, steps=20, progress=False)
        >>> report.slots[0].error_after < report.slots[0].error_before
        True
    """
    observers = _observers(model, loss)
    faults = _faults(model, observers, steps, learning_rate, loss, held_out)
    if not faults:
        survey = Survey(model, batches, held_out)
        faults = survey.faults
    if faults:
        raise ConfigError(faults)
    start = time.perf_counter()
    refuse_not_finite(model)
    with all_or_nothing(model), evaluating(model), _observed(observers), named_padding(model, survey.padding):
        before = _errors(model, observers, survey, held_out)
        _descend(model, observers, survey, held_out, steps, learning_rate, progress)
        fitted_tokens = [observer.tokens for observer in observers]
        after = _errors(model, observers, survey, held_out)
        tokens = [observer.tokens for observer in observers]
    seconds = (time.perf_counter() - start) / len(observers)
    slots = []
    for observer, *counts, first, last in zip(observers, fitted_tokens, tokens, before, after, strict=True):
        path, size = observer.path.removeprefix("base_model.model."), observer.kernel.maps()[0].projection.num_features
        slots.append(SlotReport(path, size, counts[0], counts[1], None, first, last, seconds))
    settings = {"steps": steps, "learning_rate": learning_rate, "loss": loss, "held_out": held_out}
    return CalibrationReport(slots, {**settings, "batches": survey.total, "processes": 1})


def learned_kernels(model: nn.Module) -> list[KernelAttention]:
    """Return the active linear attention of a model that replaces softmax over all tokens and is trainable."""
    return [observer.kernel for observer in _observers(model, LOSSES[0])]


def loss_of(model: nn.Module) -> str:
    """Return the loss that the features of a model's linear attention allow: the divergence for positive ones."""
    components = [one.component for kernel in learned_kernels(model) for one in kernel.maps()]
    return "cross_entropy" if all(component.positive for component in components) else "output"


def _observers(model: nn.Module, loss: str) -> list[Observer]:
    """Create an observer per attention module with active, trainable linear attention in place of full softmax."""
    observers = []
    for path, layer in model.named_modules():
        if not isinstance(layer, SlotLayer):
            continue
        kernels = [slot.kernel for slot in layer.active_slots() if isinstance(slot, Attend)]
        module = unwrap(layer.base_layer)
        if kernels and getattr(module, "sliding_window", None) is None and _learned(kernels[-1]):
            observers.append(Observer(path, module, kernels[-1], loss))
    return observers


def _learned(kernel: KernelAttention) -> list[nn.Parameter]:
    return [parameter for parameter in kernel.parameters() if parameter.requires_grad]


def _faults(
    model: nn.Module, observers: list[Observer], steps: object, learning_rate: object, loss: str, held_out: float
) -> list[str]:
    faults = []
    if type(steps) is not int or steps < 1:
        faults.append(f"steps is {steps!r}; expected an integer >= 1")
    faults += number_faults("learning_rate", learning_rate, above=0, below=math.inf)
    if loss not in LOSSES:
        faults.append(f"loss is {loss!r}; expected one of {', '.join(LOSSES)}")
    if not observers:
        faults.append(
            "the model has no active linear attention over all tokens with something to learn: "
            + (
                no_adapter(model)
                or "expected a model from get_snnk_model with an AttentionPart whose projection is learned, such as "
                "AttentionPart(component='softmax_pm', projection='free', separate_maps=True), that is trainable"
            )
        )
    components = [one.component for observer in observers for one in observer.kernel.maps()]
    signed = sorted({type(component).__name__ for component in components if not component.positive})
    if loss == "cross_entropy" and signed:
        faults.append(
            f"loss is 'cross_entropy' with {', '.join(signed)}, whose features can be negative, and so can attention "
            "weights be; expected positive features. Use loss='output'"
        )
    away = [observer.path for observer in observers if offloaded(observer.kernel)]
    faults += common_faults(model, held_out, "feature maps", away)
    if processes() > 1:
        faults.append(
            f"there are {processes()} processes, each with its own share of the data, and the fit is not shared; "
            "expected one. Fit in one process, save the adapter and load it in all"
        )
    return faults


@contextlib.contextmanager
def _observed(observers: list[Observer]) -> Iterator[None]:
    owners = [vars(observer.module)["snnk_owner"] for observer in observers]
    try:
        for observer in observers:
            observer.module.snnk_owner = lambda observer=observer: observer  # type: ignore[assignment]
        yield
    finally:
        for observer, owner in zip(observers, owners, strict=True):
            observer.module.snnk_owner = owner
            observer.clear()


@torch.no_grad()
def _errors(model: nn.Module, observers: list[Observer], batches: Survey, held_out: float) -> list[float]:
    """Return the relative error of each layer's outputs on the held-out batches."""
    for observer in observers:
        observer.clear()
        observer.fitting = False
    for index, batch in batches:
        if is_held_out(index, held_out):
            model(**model_inputs(model, batch))
    return [observer.error() for observer in observers]


def _descend(
    model: nn.Module,
    observers: list[Observer],
    batches: Survey,
    held_out: float,
    steps: int,
    learning_rate: float,
    progress: bool,
) -> None:
    """Minimise the summed loss of all layers by Adam; layers share no parameters, so each is fitted independently."""
    parameters = list(dict.fromkeys(p for observer in observers for p in _learned(observer.kernel)))
    before = [parameter.grad for parameter in parameters]
    optimizer = torch.optim.Adam(parameters, lr=learning_rate)
    for observer in observers:
        observer.clear()
        observer.fitting = True
    epochs = (batch for _ in itertools.count() for batch in batches)
    feed = (batch for index, batch in epochs if not is_held_out(index, held_out))
    try:
        for step, batch in enumerate(itertools.islice(tqdm(feed, "fit_attention", steps, disable=not progress), steps)):
            with torch.no_grad():
                model(**model_inputs(model, batch))
            loss = torch.stack([torch.stack(observer.losses).mean() for observer in observers]).sum()
            if not loss.isfinite():
                worst = [observer.path for observer in observers if not torch.stack(observer.losses).isfinite().all()]
                raise NumericalError(
                    f"the loss of {', '.join(worst)} is {loss.item()} at step {step} of {steps}; expected a finite "
                    f"number. Use a learning_rate below {learning_rate}, or look for NaN in the inputs"
                )
            for group in optimizer.param_groups:
                group["lr"] = learning_rate * (1 - step / steps)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            for observer in observers:
                observer.losses.clear()
    finally:
        for parameter, gradient in zip(parameters, before, strict=True):
            parameter.grad = gradient
