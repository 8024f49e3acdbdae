"""The fine-tuned classifier that is converted: loaded, and compared with what its conversion predicts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from data import TASKS
from transformers import AutoConfig, PreTrainedModel

from lib.modality import modality_of
from lib.models import nowhere, resolve_model
from snnk_peft.errors import ConfigError


def teacher_task(name_or_path: str) -> Any:
    """The task "predict what this model predicts": a table of texts whose labels will be the model's own.

    Raises:
        ConfigError: there is no such model.
    """
    config = _config(name_or_path)
    settings: dict[str, Any] = {"kind": "regression"}
    if config.num_labels > 1:
        names = [str(config.id2label[index]) for index in range(config.num_labels)]
        settings = {"kind": "classification", "labels": names}
    task: Any = TASKS["table"].with_settings(settings)
    return replace(task, metrics=task.metrics[:1])  # accuracy, or the correlation


def load_teacher(name_or_path: str, task: Any) -> tuple[PreTrainedModel, Any]:
    """The classifier in eval mode and float32, and what prepares its inputs.

    Raises:
        ConfigError: no such model, none that is fine-tuned, or one with other labels than the task.
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
            f"model.name_or_path is {name_or_path}: no fine-tuned classifier, it has no {', '.join(fresh[:4])}; "
            "fine-tune it, for example by recipes/finetune.py with method.name=full, and give the model/ of that run"
        )
    return model.eval(), modality.reader(folder, task)


def agreement(original: torch.Tensor, converted: torch.Tensor) -> dict[str, float]:
    """How near one model's logits are to another's, both (examples, outputs).

    Classes: `agreement`, the share of examples with the same class, and `divergence`, the mean of
    Σ p log(p / q) in nats. One output, a number: `correlation` (Pearson) and `difference`, the root of the mean square.
    """
    if original.shape[-1] == 1:
        first, second = original.double().flatten(), converted.double().flatten()
        correlation = torch.corrcoef(torch.stack((first, second)))[0, 1].item()
        return {"correlation": correlation, "difference": (first - second).square().mean().sqrt().item()}
    same = (original.argmax(-1) == converted.argmax(-1)).double().mean().item()
    log_p, log_q = original.double().log_softmax(-1), converted.double().log_softmax(-1)
    return {"agreement": same, "divergence": (log_p.exp() * (log_p - log_q)).sum(-1).mean().item()}


def _config(name_or_path: str) -> Any:
    folder = resolve_model(name_or_path)
    try:
        return AutoConfig.from_pretrained(folder)
    except (OSError, ValueError) as error:
        raise ConfigError(f"no model configuration could be read from {folder!r}{nowhere(folder)}: {error}") from error


def _label_fault(config: Any, task: Any) -> str | None:
    """Outputs that are not the task's labels: another number of them, or the same names in another order."""
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
        "the examples as task=table with data.labels in the order of the model"
    )
