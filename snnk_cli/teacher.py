"""The fine-tuned classifier that is converted: loading it, and distillation from it."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.functional import kl_div, mse_loss
from transformers import AutoConfig, PreTrainedModel
from transformers.modeling_outputs import SequenceClassifierOutput

from snnk_cli.convert_settings import UptrainSection
from snnk_cli.modality import modality_of
from snnk_cli.models import nowhere, resolve_model
from snnk_peft.errors import ConfigError


def load_teacher(name_or_path: str, task: Any) -> tuple[PreTrainedModel, Any]:
    """Load the classifier in eval mode and float32, and its preprocessor.

    Raises:
        ConfigError: there is no such model, it is not fine-tuned, or its labels differ from the task's.
    """
    config, modality = _config(name_or_path), modality_of(task)
    if fault := _label_fault(config, task):
        raise ConfigError(f"model.name_or_path is {name_or_path}: {fault}")
    folder = resolve_model(name_or_path)
    try:
        model, report = modality.auto_class(task).from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    except (OSError, ValueError) as error:
        raise ConfigError(f"no classifier could be read from {folder!r}{nowhere(folder)}: {error}") from error
    if fresh := sorted(report["missing_keys"]):
        raise ConfigError(
            f"model.name_or_path is {name_or_path}: not a fine-tuned classifier (it has no {', '.join(fresh[:4])}); "
            "fine-tune it first. An encoder for embeddings needs no task: give data.texts alone"
        )
    return model.eval(), modality.reader(folder, task)


def stored_dtype(name_or_path: str) -> torch.dtype:
    """Return the floating-point dtype of a model's files; float32 if its config does not say."""
    return _config(name_or_path).dtype or torch.float32


def _config(name_or_path: str) -> Any:
    folder = resolve_model(name_or_path)
    try:
        return AutoConfig.from_pretrained(folder)
    except (OSError, ValueError) as error:
        raise ConfigError(f"no model configuration could be read from {folder!r}{nowhere(folder)}: {error}") from error


def _label_fault(config: Any, task: Any) -> str | None:
    """Return a fault if the outputs differ from the task's labels in number, or in the order of the same names."""
    if config.num_labels != task.num_labels:
        return f"it has {config.num_labels} outputs; expected {task.num_labels}, the labels of task {task.name}"
    if task.label_names is None:
        return None
    mine = [str(config.id2label[index]).lower() for index in range(config.num_labels)]
    theirs = [str(name).lower() for name in task.label_names]
    if mine == theirs or set(mine) != set(theirs):  # other names may mean the same; the score will tell
        return None
    return (
        f"its labels are {', '.join(mine)}; task {task.name} has {', '.join(theirs)}. Expected the same order: give "
        "the examples as task=table with data.labels in the model's order"
    )


class Distilled(nn.Module):
    """A converted classifier whose training loss compares it with the original; in eval mode just the classifier.

    The loss is the sum, weighted by the settings, of

    - labels: the classifier's own loss,
    - logits: T² KL(softmax(z/T) ‖ softmax(z'/T)) of the original's logits z and its own z' (Hinton et al. 2015), or,
      with one output, their squared difference,
    - layers: the mean over layers of ‖h - h'‖² / ‖h - mean h‖², over the tokens of an example that are not padding.

    Each is a mean over examples, so that a step does not depend on how its examples are split into batches.

    Args:
        student: the patched model.
        teacher: the original; not a submodule, so that checkpoints hold only the student.
        train: weights and temperature.
    """

    def __init__(self, student: nn.Module, teacher: nn.Module, train: UptrainSection):
        super().__init__()
        self.student, self._teacher, self._train = student, (teacher,), train

    def forward(self, labels: torch.Tensor | None = None, **inputs: Any) -> Any:
        """Return the student's output, in training with `loss`.

        Args:
            labels: (batch,), read if train.labels is above 0.
            **inputs: inputs of the model.
        """
        if not self.training:
            return self.student(**inputs) if labels is None else self.student(**inputs, labels=labels)
        train, hidden = self._train, {"output_hidden_states": self._train.layers > 0}
        with torch.no_grad():
            wanted = self._teacher[0](**inputs, **hidden)
        given = self.student(**inputs, **hidden, labels=labels if train.labels else None)
        loss = train.labels * given.loss.float() if train.labels else torch.zeros((), device=given.logits.device)
        if train.logits:
            loss = loss + train.logits * logit_loss(wanted.logits.float(), given.logits.float(), train.temperature)
        if train.layers:
            mask = inputs.get("attention_mask")
            loss = loss + train.layers * layer_loss(wanted.hidden_states, given.hidden_states, mask)
        return SequenceClassifierOutput(loss=loss, logits=given.logits)


def logit_loss(wanted: torch.Tensor, given: torch.Tensor, temperature: float) -> torch.Tensor:
    """Compute the second term, a mean over the batch.

    Args:
        wanted: the original's logits, (batch, outputs).
        given: the student's logits, likewise.
        temperature: T.
    """
    if wanted.shape[-1] == 1:
        return mse_loss(given, wanted)
    target, mine = (wanted / temperature).log_softmax(-1), (given / temperature).log_softmax(-1)
    return temperature**2 * kl_div(mine, target, log_target=True, reduction="batchmean")


def layer_loss(
    wanted: tuple[torch.Tensor, ...], given: tuple[torch.Tensor, ...], mask: torch.Tensor | None
) -> torch.Tensor:
    """Compute the third term, a mean over the batch; an example of one token has no spread and counts as 0.

    Args:
        wanted: outputs of the original's embeddings and layers, (batch, length, dim) each; embeddings are not compared.
        given: those of the student.
        mask: (batch, length), 0 at padding; None for no padding.
    """
    errors = []
    for target, mine in zip(wanted[1:], given[1:], strict=True):
        target, mine = (values.float().flatten(1, -2) for values in (target, mine))
        padding = torch.zeros_like(target[..., :1], dtype=torch.bool) if mask is None else ~mask.bool()[..., None]
        mean = target.masked_fill(padding, 0).sum(1, keepdim=True) / (~padding).sum(1, keepdim=True)
        missed, spread = (
            values.masked_fill(padding, 0).square().sum((1, 2)) for values in (mine - target, target - mean)
        )
        errors.append((missed / spread.masked_fill(spread == 0, torch.inf)).mean())
    return torch.stack(errors).mean()
