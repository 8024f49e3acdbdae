"""A bundle made of any model's encoder and a `PooledHead`: the original pooler and head are left out.

BertModel, BertForMaskedLM, a bundle of a converted BERT, ...  ->  SnnkPooledBertForSequenceClassification

With a fitted head (`ClosedFormHead.bundle`), or with a new one to be trained (`with_head`).
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

from snnk_peft.arguments import in_words
from snnk_peft.bundling.bundle import REMOVED_FIELDS, filled, size_of
from snnk_peft.bundling.classes import POOLED_PREFIX, SavedBundle, bundle_model_class, original_class
from snnk_peft.bundling.pooled_head import PooledHead
from snnk_peft.bundling.report import BundleReport, Folded
from snnk_peft.errors import ConfigError, UnsupportedError
from snnk_peft.heads.features import HEAD, HeadFeatures, HeadReader
from snnk_peft.model_card import hub_id
from snnk_peft.tuner.given_model import of_transformers, plain_model, takes_model
from snnk_peft.tuner.slot_layer import is_of_an_adapter

# Kind of targets -> `problem_type` of transformers' configs.
PROBLEMS = {
    "classes": "single_label_classification",
    "labels": "multi_label_classification",
    "numbers": "regression",
}


def classifier_class(model: PreTrainedModel) -> type[PreTrainedModel]:
    """Return transformers' classifier class for this model's encoder.

    Raises:
        UnsupportedError: transformers has none.
    """
    config: Any = original_class(type(model)).config_class if isinstance(model, SavedBundle) else type(model.config)
    images = of_images(model)
    mapping: Any = MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING if images else MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING
    if config not in mapping:
        raise UnsupportedError(
            f"transformers has no {'image' if images else 'sequence'} classifier for {type(model).__name__}; expected "
            "an architecture with one, such as BERT or ViT"
        )
    classes = mapping[config]
    return classes[0] if isinstance(classes, (tuple, list)) else classes


@takes_model
def with_head(model: nn.Module, features: HeadFeatures | None = None) -> Any:
    """Give a classifier a new task head that reads hidden states of several layers, for training with any PEFT method.

    The head is at `snnk_head`: SNNKConfig trains it by default; other configs need `modules_to_save=["snnk_head"]`.
    `fit_closed_form` fits its initial value. To load an adapter trained with it, call `with_head` on the same model
    first.

    Args:
        model: a transformers model, with or without a task head; its config gives the number of outputs (`num_labels`).
            Not changed.
        features: what the head reads; the means of all layers if None. See `HeadFeatures.means` for pairs of texts.

    Returns:
        A `PreTrainedModel` in eval mode, sharing no memory with `model`: transformers' classifier of this architecture,
            except for its head, whose weights are random as in a new classifier.

    Raises:
        ConfigError: a layer that the model does not have.
        UnsupportedError: not a transformers model, a patched one, one without one vector per token, or one whose
            architecture has no classifier in transformers.

    Example:
        >>> from transformers import BertConfig, BertModel
        >>> from snnk_peft import AdapterPart, SNNKConfig, get_snnk_model, with_head
        >>> tiny = BertConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64)
        >>> model = with_head(BertModel(tiny))
        >>> model.snnk_head.linear
        Linear(in_features=64, out_features=2, bias=True)
        >>> model = get_snnk_model(model, SNNKConfig(adapter=AdapterPart(num_features=8)))
    """
    given, reader = encoder_and_reader(model, features, every=True)
    config: Any = given.config
    head = PooledHead(reader, config.num_labels, standardized=True).to(given.device)
    nn.init.normal_(head.linear.weight, std=getattr(config, "initializer_range", 0.02))
    nn.init.zeros_(head.linear.bias)
    made = classifier_with(given, head, list(config.id2label.values()), config.problem_type)
    made.config.snnk_plan["report"] = head_report(given, made, 0.0, 0.0).to_dict()
    return made


def encoder_and_reader(
    model: nn.Module, features: HeadFeatures | None, *, every: bool = False
) -> tuple[PreTrainedModel, HeadReader]:
    """Return the transformers model and the reader of its hidden states.

    Args:
        model: as in `with_head`.
        features: None for the mean of the last layer, or of every layer if `every`.
        every: see `features`.

    Raises:
        ConfigError, UnsupportedError: as in `with_head`.
    """
    given = plain_model(model)
    if any(is_of_an_adapter(module) for module in given.modules()):
        raise UnsupportedError(
            f"{type(given).__name__} holds an adapter; expected a plain encoder, or a model with a head. A model "
            "from get_snnk_model becomes one by snnk_peft.bundle, others by merge_and_unload()"
        )
    given = of_transformers(given, "expected an encoder, or a model with a head")
    if not isinstance(features, (HeadFeatures, type(None))):
        raise ConfigError(
            f"features is {in_words(features)}; expected HeadFeatures or None. Give HeadFeatures([(-1, 'mean')])"
        )
    config: Any = given.config
    sizes = getattr(config, "vision_config", config) if of_images(given) else config.get_text_config()
    if getattr(sizes, "is_encoder_decoder", False) or not hasattr(sizes, "hidden_size"):
        raise UnsupportedError(
            f"{type(given).__name__} is no stack of Transformer layers with one vector for each token "
            "(config.hidden_size); expected an encoder or a decoder. Of an encoder-decoder give model.get_encoder()"
        )
    chosen = features or (HeadFeatures.means(sizes.num_hidden_layers) if every else HeadFeatures())
    reader = HeadReader(chosen, sizes.hidden_size, sizes.num_hidden_layers + 1)
    return given, reader.to(given.device).eval()


def of_images(model: PreTrainedModel) -> bool:
    """Return whether the model accepts images."""
    return model.main_input_name == "pixel_values"


def classifier_with(model: PreTrainedModel, head: PooledHead, names: list[str], problem: str | None) -> Any:
    """Return a bundle with copies of the encoder of `model` and of this head, in eval mode.

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
    """Return the paths of modules whose weights a pooled head leaves unused: pooler and head of the original."""
    unread = [name for name, part in built.named_children() if f"{name}." != inside and list(part.parameters())]
    pooler = getattr(built.base_model, "pooler", None)
    return unread + ([f"{inside}pooler"] if isinstance(pooler, nn.Module) and list(pooler.parameters()) else [])


def _volatile(prefix: str, part: nn.Module) -> dict[str, torch.Tensor]:
    """Copy the non-persistent buffers, by path."""
    kept = part.state_dict().keys()
    return {prefix + name: value.clone() for name, value in part.named_buffers() if name not in kept}


def head_report(model: PreTrainedModel, made: Any, error: float, tolerance: float) -> BundleReport:
    """Create the report of `classifier_with`, for config and model card."""
    head: PooledHead = made.snnk_head
    before, after, encoder, new = (size_of(each.state_dict()) for each in (model, made, model.base_model, head))
    views = ", ".join(f"{pool} of {layer}" for layer, pool in head.reader.features.views)
    through = "" if head.reader.stage is None else f" and {head.reader.stage.in_words()}"
    replaced = [path for path, spec in made.config.snnk_plan["modules"].items() if spec["kind"] == "identity"]
    folded = Folded(
        paths=[*replaced, HEAD],
        before="pooler and head of the original",
        after=f"{views}{through} + Linear {head.reader.out_dim}→{head.linear.out_features}",
        bytes_before=before[1] - encoder[1],
        bytes_after=new[1],
    )
    return BundleReport(
        model_class=type(made).__name__,
        base_model=hub_id(model.config._name_or_path),
        parts={},
        folded=[folded],
        remarks=["views are hidden states, 0 the embeddings"],
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
