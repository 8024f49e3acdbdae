"""A bundle made of any model's encoder and a `PooledHead`: the original pooler and head are left out.

BertModel, BertForMaskedLM, a bundle of a converted BERT, ...  ->  SnnkPooledBertForSequenceClassification
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
)

from snnk_peft.bundling.bundle import REMOVED_FIELDS, filled
from snnk_peft.bundling.classes import POOLED_PREFIX, SavedBundle, bundle_model_class, original_class
from snnk_peft.bundling.pooled_head import HEAD, PooledHead
from snnk_peft.bundling.report import BundleReport, Folded
from snnk_peft.errors import UnsupportedError
from snnk_peft.model_card import hub_id

# Kind of targets -> `problem_type` of transformers' configs.
PROBLEMS = {
    "classes": "single_label_classification",
    "labels": "multi_label_classification",
    "numbers": "regression",
}


def classifier_class(model: PreTrainedModel) -> type[PreTrainedModel]:
    """Return transformers' classifier class for this model's encoder.

    Raises:
        UnsupportedError: there is none.
    """
    config: Any = original_class(type(model)).config_class if isinstance(model, SavedBundle) else type(model.config)
    images = model.main_input_name == "pixel_values"
    mapping: Any = MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING if images else MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING
    if config not in mapping:
        raise UnsupportedError(
            f"transformers has no {'image' if images else 'sequence'} classifier for {type(model).__name__}; expected "
            "an architecture with one, such as BERT or ViT"
        )
    classes = mapping[config]
    return classes[0] if isinstance(classes, (tuple, list)) else classes


def with_head(model: PreTrainedModel, head: PooledHead, names: list[str], problem: str) -> Any:
    """A bundle with copies of the encoder of `model` and of this head, in eval mode.

    Raises:
        UnsupportedError: transformers has no classifier of this architecture, or its config does not build the model.
    """
    cls = bundle_model_class(classifier_class(model), pooled=True)
    inside = f"{cls.base_model_prefix}."
    fields = {
        name: value for name, value in copy.deepcopy(model.config.to_dict()).items() if name not in REMOVED_FIELDS
    }
    modules = _encoder_plan(model, (fields.pop("snnk_plan", None) or {}).get("modules", {}), inside)
    fields |= {"id2label": dict(enumerate(names)), "label2id": {name: index for index, name in enumerate(names)}}
    plan = {"model_class": cls.__name__, "modules": modules, "head": None, "pooler": None}
    config = cls.config_class(**{**fields, "problem_type": problem, "snnk_plan": plan})
    config._attn_implementation, config.dtype = model.config._attn_implementation, model.dtype
    with torch.device("meta"):
        built = cls(config)
        if built.base_model is built:
            raise UnsupportedError(
                f"{cls.__name__.removeprefix(POOLED_PREFIX)} has no {cls.base_model_prefix!r}, the name that it gives "
                "its encoder; a head can be put on models that keep their encoder there, such as BERT or ViT"
            )
        modules |= {path: {"kind": "identity"} for path in _unread(built, inside)} | {HEAD: head.spec()}
        made = cls(config)

    unread = tuple(f"{path}." for path, spec in modules.items() if spec["kind"] == "identity")
    state = {f"{inside}{name}": value.detach().clone() for name, value in model.base_model.state_dict().items()}
    state = {name: value for name, value in state.items() if not name.startswith(unread)}
    head = copy.deepcopy(head).to(model.dtype)
    state |= {f"{HEAD}.{name}": value for name, value in head.state_dict().items()}
    volatile = {**_volatile(inside, model.base_model), **_volatile(f"{HEAD}.", head)}
    return filled(made, model, state, volatile)


def _encoder_plan(model: PreTrainedModel, planned: dict[str, Any], inside: str) -> dict[str, Any]:
    """Return the plan of a bundled encoder, with the paths it has inside a classifier."""
    if model.base_model is model:  # its paths have no prefix
        return {inside + path: spec for path, spec in planned.items()}
    own = f"{model.base_model_prefix}."
    return {inside + path.removeprefix(own): spec for path, spec in planned.items() if path.startswith(own)}


def _unread(built: PreTrainedModel, inside: str) -> list[str]:
    """Paths of modules with weights that a pooled head leaves unused: pooler and head of the original."""
    unread = [name for name, part in built.named_children() if f"{name}." != inside and list(part.parameters())]
    pooler = getattr(built.base_model, "pooler", None)
    return unread + ([f"{inside}pooler"] if isinstance(pooler, nn.Module) and list(pooler.parameters()) else [])


def _volatile(prefix: str, part: nn.Module) -> dict[str, torch.Tensor]:
    """Copies of the buffers that checkpoints leave out, by path."""
    kept = part.state_dict().keys()
    return {prefix + name: value.clone() for name, value in part.named_buffers() if name not in kept}


def head_report(model: PreTrainedModel, made: Any, error: float, tolerance: float) -> BundleReport:
    """Report of `with_head`, for config and model card."""
    before, after = _size(model), _size(made)
    head: PooledHead = made.snnk_head
    views = ", ".join(f"{pool} of {layer}" for layer, pool in head.reader.features.views)
    through = "" if head.reader.stage is None else f" and {head.reader.stage.in_words()}"
    replaced = [path for path, spec in made.config.snnk_plan["modules"].items() if spec["kind"] == "identity"]
    folded = Folded(
        paths=[*replaced, HEAD],
        before="pooler and head of the original",
        after=f"{views}{through} + Linear {head.reader.out_dim}→{head.linear.out_features}",
        bytes_before=before[1] - _size(model.base_model)[1],
        bytes_after=_size(head)[1],
    )
    return BundleReport(
        model_class=type(made).__name__,
        base_model=hub_id(model.config._name_or_path),
        parts={},
        folded=[folded],
        remarks=["the head was fitted in closed form (ridge regression); views are hidden states, 0 the embeddings"],
        parameters_base=before[0],
        parameters_patched=before[0],
        parameters_after=after[0],
        bytes_base=before[1],
        bytes_patched=before[1],
        bytes_after=after[1],
        parity_error=error,
        parity_tolerance=tolerance,
        dtype=str(model.dtype).removeprefix("torch."),
    )


def _size(module: nn.Module) -> tuple[int, int]:
    tensors = list(module.state_dict().values())
    return sum(each.numel() for each in tensors), sum(each.numel() * each.element_size() for each in tensors)
