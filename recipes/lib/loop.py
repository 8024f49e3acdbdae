"""The arithmetic of one optimizer step, and what a run remembers between steps."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from lib.data import share
from lib.evaluation import DivergedError
from lib.processes import clip_gradients
from lib.settings import StepSettings
from snnk_peft.feature_map import advance
from snnk_peft.tasks.base import IGNORED

_CAUSAL = frozenset(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values())


@dataclass
class RunState:
    """Position and results of a run; saved in every checkpoint.

    Args:
        step: optimizer steps done.
        evaluated_step: the last step after which the model was evaluated.
        best: score, metrics, step and epoch of the best evaluation.
        evaluations_without_gain: since the best one.
        train_seconds: time spent training, without evaluations.
        cpu_seconds: processor time of the optimizer steps, over all threads of the process.
    """

    step: int = 0
    evaluated_step: int = 0
    best: dict[str, Any] | None = None
    evaluations_without_gain: int = 0
    train_seconds: float = 0.0
    cpu_seconds: float = 0.0


def make_optimizer(model: torch.nn.Module, train: StepSettings, beta2: float = 0.999) -> torch.optim.AdamW:
    """AdamW over the trained parameters; vectors (biases, norms, gates) are not decayed."""
    trained = [value for value in model.parameters() if value.requires_grad]
    groups = [
        {"params": [value for value in trained if value.dim() >= 2], "weight_decay": train.weight_decay},
        {"params": [value for value in trained if value.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW([group for group in groups if group["params"]], lr=train.learning_rate, betas=(0.9, beta2))


def train_step(
    accelerator: Any,
    model: torch.nn.Module,
    optimizer: Any,
    feed: Iterator[dict[str, torch.Tensor]],
    batches: Sequence[Sequence[int]],
    rate: float,
    max_grad_norm: float | None,
) -> torch.Tensor:
    """One optimizer step over `batches` (each split among the processes); returns [loss, gradient norm] on the device.

    `feed` yields the inputs of this process's `share` of each.

    The loss is the mean over everything that has a label in the whole step, whatever the sizes of its batches and the
    number of processes: over examples, or, where words have labels, over these words.
    """
    rank, world = accelerator.process_index, accelerator.num_processes
    shares = [share(batch, rank, world)[1] for batch in batches]
    inputs = [next(feed) for _ in batches]
    counts = torch.tensor(shares, device=accelerator.device)
    total: Any = sum(map(len, batches))
    # All processes' batches have labels of one kind, so that all of them take part in this or none.
    if found := [terms for values in inputs if (terms := loss_terms(model, values)) is not None]:
        counts = torch.stack(found) * counts.sign()
        total = accelerator.reduce(counts.sum(), "sum").clamp_min(1)
    weights = (counts * world).double() / total  # gradients are averaged over the processes, hence the factor
    loss_sum = torch.zeros((), device=accelerator.device)
    for number, (values, weight) in enumerate(zip(inputs, weights, strict=True)):
        last = number == len(batches) - 1
        with contextlib.nullcontext() if last else accelerator.no_sync(model):
            loss = mean_loss(model, values)
            # The mean over no label is no number.
            weighted = torch.where(weight > 0, loss, 0.0) * weight.to(loss.dtype)
            accelerator.backward(weighted)
        loss_sum += weighted.detach()
    trained = [value for group in optimizer.param_groups for value in group["params"]]
    norm = clip_gradients(accelerator, trained, math.inf if max_grad_norm is None else max_grad_norm)
    for group in optimizer.param_groups:
        group["lr"] = rate
    optimizer.step()
    optimizer.zero_grad()
    advance(model)  # random matrices with redraw_every count steps
    return torch.stack([loss_sum, norm.detach().to(loss_sum)])


def loss_terms(model: torch.nn.Module, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor | None:
    """Over how many terms the loss of a batch is a mean, on its device; None for its examples.

    A causal language model is not asked for the first token of a sequence.
    """
    labels = inputs.get("labels")
    if labels is None or labels.is_floating_point():
        return None
    if labels.dim() > 1 and any(parent.__name__ in _CAUSAL for m in model.modules() for parent in type(m).__mro__):
        labels = labels[..., 1:]
    return (labels != IGNORED).sum()


def mean_loss(model: torch.nn.Module, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The model's own loss, or, of examples with soft_labels (batch, classes), the cross-entropy with these."""
    if "soft_labels" not in inputs:
        loss: torch.Tensor = model(**inputs).loss
        return loss
    logits = model(**{name: values for name, values in inputs.items() if name != "soft_labels"}).logits
    return torch.nn.functional.cross_entropy(logits.float(), inputs["soft_labels"])


class FiniteWatch:
    """Collects [loss, norm] pairs and reads them seldom: reading waits for a GPU.

    Args:
        accelerator: averages over processes.
        allow_infinite_norm: fp16 skips such steps by itself.
    """

    def __init__(self, accelerator: Any, allow_infinite_norm: bool):
        self._accelerator, self._allow = accelerator, allow_infinite_norm
        self._pending: list[tuple[int, float, torch.Tensor]] = []
        self._losses: list[float] = []
        self.norm = 0.0

    def add(self, step: int, rate: float, values: torch.Tensor) -> None:
        """Note the result of `train_step` for step number `step` (from 1)."""
        self._pending.append((step, rate, values))
        if self._accelerator.device.type == "cpu" and self._accelerator.num_processes == 1:
            self.check()

    def check(self) -> None:
        """Raise DivergedError naming the first step whose loss or gradient was not finite."""
        if not self._pending:
            return
        table = self._accelerator.reduce(torch.stack([values for _, _, values in self._pending]), "mean").tolist()
        for (step, rate, _), (loss, norm) in zip(self._pending, table, strict=True):
            if not math.isfinite(loss) or not (self._allow or math.isfinite(norm)):
                what = f"the loss is {loss}" if not math.isfinite(loss) else f"the gradient norm is {norm}"
                raise DivergedError(f"{what} at step {step} (learning rate {rate:.3g})")
            self._losses.append(loss)
            self.norm = norm if math.isfinite(norm) else 0.0  # fp16 skipped this step
        self._pending.clear()

    def mean_loss(self) -> float:
        """Mean loss since the last call."""
        self.check()
        mean = sum(self._losses) / max(1, len(self._losses))
        self._losses.clear()
        return mean
