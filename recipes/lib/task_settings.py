"""Which task the settings name, whether they fit it, and what it adds to their record."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, fields, replace
from typing import TYPE_CHECKING, Any

from lib.settings import PoolingSection

if TYPE_CHECKING:
    from lib.settings import DataSection, EvaluateConfig, FinetuneConfig

# What an example of a task is -> the recipe that reads such.
RECIPE_OF = {
    "text": "recipes/finetune.py",
    "image": "recipes/finetune.py",
    "sequence": "recipes/papers/programs/train_lra.py",
    "columns": "recipes/papers/programs/train_mlp.py",
}


def modality_fault(name: str, recipe: str) -> str | None:
    """An unknown task, or one that another recipe reads; None for one of this recipe."""
    from data import TASKS

    from snnk_peft.registry import did_you_mean

    known = [other for other in TASKS if RECIPE_OF[TASKS[other].modality] == recipe]
    if name in known:
        return None
    if name not in TASKS:
        return f"task: {did_you_mean('task', name, known)}"
    found = TASKS[name].modality
    return (
        f"task is {name}, whose examples are of modality {found}: use {RECIPE_OF[found]}; expected one of "
        f"{', '.join(known)}"
    )


def is_sequence_run(settings: Mapping[str, Any]) -> bool:
    """Whether settings, as config.yaml of a run holds them, are of a task whose examples are long sequences."""
    from data import TASKS

    name = settings.get("task")
    return name in TASKS and TASKS[name].modality == "sequence"


def task_faults(name: str, data: DataSection) -> list[str]:
    """An unknown task, one of another recipe, and data settings that do not fit it."""
    from data import TASKS

    from snnk_peft.tasks.table import TableSettings

    if (fault := modality_fault(name, RECIPE_OF["text"])) is not None:
        return [fault]
    settings = {key.name: getattr(data, key.name) for key in fields(TableSettings)}
    return [f"data.{fault}" for fault in TASKS[name].check(settings)]


def find_task(config: FinetuneConfig | EvaluateConfig, model: Mapping[str, Any] | None = None) -> Any:
    """The task of the settings; a table's kind and labels, where not given, are those of the model or of its rows.

    Args:
        config: task and data.
        model: config.json of a model that was trained on the task.
    """
    from data import TASKS

    return TASKS[config.task].with_settings(asdict(config.data), model)


def completed(config: FinetuneConfig, task: Any) -> FinetuneConfig:
    """The settings with what the task inferred, as the record of the run must have it."""
    return replace(config, data=replace(config.data, **task.inferred))


def with_pooling(config: Any, task: Any) -> Any:
    """The settings with what the pooler reads, as the record of the run must have it.

    Args:
        config: with the sections model and method.
        task: what the examples are; pictures have no tokens to take means of.
    """
    method = config.method
    is_asked = isinstance(method, PoolingSection) and method.pooling == "auto" and method.moves_pooler
    if not is_asked or task.modality != "text":
        return config
    from lib.models import resolve_model, trained_on_means

    means = trained_on_means(resolve_model(config.model.name_or_path))
    return replace(config, method=replace(method, pooling="mean" if means else "first"))
