"""The task that the settings name, checks that they fit it, and what it adds to their record."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, fields, replace
from importlib import import_module
from typing import TYPE_CHECKING, Any

from snnk_peft.registry import Registry, did_you_mean

if TYPE_CHECKING:
    from snnk_cli.settings import DataSection, EvaluateConfig, FinetuneConfig
    from snnk_peft.tasks import Task

# Modality of a task -> the recipe that reads it.
RECIPE_OF = {
    "text": "recipes/finetune.py",
    "image": "recipes/finetune.py",
    "sequence": "recipes/papers/programs/train_lra.py",
    "columns": "recipes/papers/programs/train_mlp.py",
}


# Packages whose import registers tasks besides the library's own; `data` in a clone.
TASK_PACKAGES: list[str] = []


def tasks() -> Registry[Task]:
    """Return the tasks by name; importing them needs torch, unlike describing settings."""
    for package in TASK_PACKAGES:
        import_module(package)
    from snnk_peft.tasks import TASKS

    return TASKS


def task_modality(name: str) -> str | None:
    """Return the modality of a task, a key of `RECIPE_OF`; None if there is no such task."""
    return tasks()[name].modality if name in tasks() else None


def modality_fault(name: str, recipe: str) -> str | None:
    """Return a fault for an unknown task or that of another recipe; None for one of this recipe."""
    known = [other for other in tasks() if RECIPE_OF[tasks()[other].modality] == recipe]
    if name in known:
        return None
    modality = task_modality(name)
    if modality is None:
        return f"task: {did_you_mean('task', name, known)}"
    return (
        f"task is {name}, whose examples are of modality {modality}: use {RECIPE_OF[modality]}; expected one of "
        f"{', '.join(known)}"
    )


def is_sequence_run(settings: Mapping[str, Any]) -> bool:
    """Return True if the settings in a run's config.yaml are those of a task of long sequences."""
    return task_modality(settings.get("task", "")) == "sequence"


def task_faults(name: str, data: DataSection) -> list[str]:
    """List the faults: an unknown task, one of another recipe, or data settings that do not fit it."""
    if (fault := modality_fault(name, RECIPE_OF["text"])) is not None:
        return [fault]
    table: Any = tasks()["table"]
    settings = {key.name: getattr(data, key.name) for key in fields(table.settings)}
    if task_modality(name) == "image" or not data.max_unreadable:  # images may be unreadable in any task
        del settings["max_unreadable"]
    return [f"data.{fault}" for fault in tasks()[name].check(settings)]


def find_task(config: FinetuneConfig | EvaluateConfig, model: Mapping[str, Any] | None = None) -> Any:
    """Return the task of the settings; a table's kind and labels default to those of the model or of its rows.

    Args:
        config: task and data.
        model: config.json of a model that was trained on the task.
    """
    return tasks()[config.task].with_settings(asdict(config.data), model)


def completed(config: FinetuneConfig, task: Any) -> FinetuneConfig:
    """Return the settings completed with what the task inferred, for the record of the run."""
    return replace(config, data=replace(config.data, **task.inferred))
