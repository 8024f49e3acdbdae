"""The labels of a classifier: saved with its adapter, and used when the base model is loaded for it.

A base model on the Hub knows nothing of them: it would get a new classifier of two labels.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from peft import PeftModel
from torch import nn

from snnk_peft.config import SNNKConfig
from snnk_peft.digests import Layout
from snnk_peft.errors import ConfigError


def note_labels(config: SNNKConfig, model: Any) -> None:
    """Write the labels of a model into the config of its adapter; of one that has none, nothing.

    Args:
        config: is changed.
        model: a PeftModel, or the transformers model.
    """
    model = model.get_base_model() if isinstance(model, PeftModel) else model
    number = _number(model)
    names = model.config.id2label or {} if number else {}
    known = bool(names) and len(names) == number
    config.id2label = {int(key): str(name) for key, name in names.items()} if known else None
    config.problem_type = model.config.problem_type if known else None


def take_labels(config: SNNKConfig, model: Any) -> None:
    """Give a model with transformers' placeholder label names those of an adapter.

    Args:
        config: of an adapter that was loaded.
        model: the transformers model; its config is changed.
    """
    number = _number(model)
    if number and config.id2label and model.config.id2label == {index: f"LABEL_{index}" for index in range(number)}:
        given = {} if model.config.problem_type is None else {"problem_type": model.config.problem_type}
        for name, value in label_options(config, given).items():
            setattr(model.config, name, value)


def label_options(config: SNNKConfig, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options with which `from_pretrained` creates a model for an adapter; the user's options win.

    Args:
        config: of the adapter.
        given: the options of the user.
    """
    found: dict[str, Any] = {}
    names = config.id2label
    if names and "id2label" not in given and given.get("num_labels") in (None, len(names)):
        found["id2label"] = names
        if "label2id" not in given:
            found["label2id"] = {name: index for index, name in names.items()}
    if config.problem_type is not None and "problem_type" not in given:
        found["problem_type"] = config.problem_type
    return found


def check_labels(config: SNNKConfig, model: nn.Module, found: Layout, expected: Layout) -> None:
    """ConfigError if an adapter's classifier has another number of labels than the model.

    Args:
        config: of the adapter; one that was saved without names is judged by its tensors.
        model: the transformers model.
        found: shape and dtype of what was saved.
        expected: of what the model needs.
    """
    if (own := _number(model)) is None:
        return
    saved = len(config.id2label or ())
    if not saved:
        rows = {
            found[key][0][0]
            for key in found.keys() & expected.keys()
            if found[key][0] and expected[key][0][:1] == (own,) and found[key][0][1:] == expected[key][0][1:]
        }
        saved = rows.pop() if len(rows) == 1 else own
    if saved != own:
        names = f" ({', '.join(list((config.id2label or {}).values())[:10])})" if config.id2label else ""
        raise ConfigError(
            f"this adapter was saved with a classifier of {saved} labels{names}; the {type(model).__name__} has {own}. "
            f"Load the base model with num_labels={saved}, or load the adapter through AutoPeftModel"
        )


def _number(model: Any) -> int | None:
    """Return the number of labels of a classifier; None for other models, whose configs list two anyway."""
    names = (cls.__name__ for cls in type(model).__mro__)
    classifies = any("Classif" in name or "Segmentation" in name for name in names)
    number = getattr(model, "num_labels", getattr(getattr(model, "config", None), "num_labels", None))
    return number if classifies and isinstance(number, int) else None
