"""An adapter's record of its base model: sizes, a digest of the weights, and the labels of a classifier.

The digest covers a sample of the weights in memory, for every precision, and takes milliseconds: the files under a
name may change, and so may a model after loading. Embeddings, which grow with the vocabulary, are excluded, and so are
the modules that the adapter saves in full. Labels are saved because a base model on the Hub does not have them: it
would get a new classifier with two labels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from snnk_peft.config import SNNKConfig
from snnk_peft.digests import Layout, notes, tensor_digest
from snnk_peft.errors import ConfigError
from snnk_peft.families.base import ModelFamily, module_at
from snnk_peft.tuner.slot_layer import original_path, root_of

SAMPLE = 16  # values per tensor: training changes nearly all of them
INSIDE = (".snnk_slots.", ".modules_to_save.")
# Precisions that a model of this precision may have been rounded to.
COARSER = {
    torch.float64: (torch.float32, torch.bfloat16, torch.float16),
    torch.float32: (torch.float32, torch.bfloat16, torch.float16),
    torch.bfloat16: (torch.bfloat16,),
    torch.float16: (torch.float16,),
}


def base_digests(model: nn.Module, saved: Sequence[str] | None) -> dict[str, str] | None:
    """Compute digests of a sample of the base model, by the precision it is first rounded to.

    Returns:
        None for a model whose weights are unavailable or quantized.
    """
    if getattr(root_of(model), "is_quantized", False):
        return None
    embeddings = {id(weight) for weight in _embeddings(model)}
    chosen = {
        original_path(name).replace(".original_module.", "."): parameter
        for name, parameter in model.named_parameters()
        if not any(mark in f".{name}" for mark in INSIDE) and id(parameter) not in embeddings and parameter.numel()
    }
    chosen = {name: p for name, p in chosen.items() if not any(f".{own}." in f".{name}" for own in saved or ())}
    dtypes = {parameter.dtype for parameter in chosen.values()}
    if not chosen or not dtypes <= COARSER.keys() or any(parameter.is_meta for parameter in chosen.values()):
        return None
    sample = torch.cat([_sample(chosen[name]) for name in sorted(chosen)])
    coarsest = min((COARSER[dtype] for dtype in dtypes), key=len)
    return {str(dtype).removeprefix("torch."): tensor_digest(sample.to(dtype)) for dtype in coarsest}


@torch.no_grad()
def _sample(parameter: torch.Tensor) -> torch.Tensor:
    flat = parameter.detach().reshape(-1)
    count = min(SAMPLE, flat.numel())
    places = torch.arange(count, device=flat.device) * (flat.numel() // count)
    return flat[places].float().cpu()


def _embeddings(model: Any) -> list[nn.Parameter]:
    weights: list[nn.Parameter] = []
    for getter in (model.get_input_embeddings, model.get_output_embeddings) if hasattr(model, "config") else ():
        try:
            embedding = getter()
        except (NotImplementedError, AttributeError):  # transformers' way of saying that a model has none
            continue
        weights += [] if embedding is None else list(embedding.parameters())
    return weights


def note_another_base(config: SNNKConfig, present: dict[str, str] | None, model: nn.Module) -> None:
    """Warn if an adapter is loaded into a base model other than the one it was trained on."""
    saved = config.base_digests
    comparable = [name for name in present or () if name in (saved or ())]
    if saved is None or present is None or not comparable or saved[comparable[0]] == present[comparable[0]]:
        return
    name = config.base_model_name_or_path or "its base model"
    known = f"at revision {config.revision!r}" if config.revision else "as it was then (no revision was recorded)"
    notes.warning(
        "the adapter was trained on other weights than this %s has: on %s %s. What it computes here was never trained. "
        "Load that base, from_pretrained(name, revision=...), or train the adapter again",
        type(model).__name__,
        name,
        known,
    )


def note_labels(config: SNNKConfig, model: Any) -> None:
    """Write the labels of a model, if it has any, into the config of its adapter."""
    model = root_of(model)
    number = _number(model)
    names = model.config.id2label or {} if number else {}
    known = bool(names) and len(names) == number
    config.id2label = {int(key): str(name) for key, name in names.items()} if known else None
    config.problem_type = model.config.problem_type if known else None


def take_labels(config: SNNKConfig, model: Any) -> None:
    """Copy the label names of an adapter to a model with transformers' placeholder names."""
    number = _number(model)
    if number and config.id2label and model.config.id2label == {index: f"LABEL_{index}" for index in range(number)}:
        given = {} if model.config.problem_type is None else {"problem_type": model.config.problem_type}
        for name, value in label_options(config, given).items():
            setattr(model.config, name, value)


def label_options(config: SNNKConfig, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options with which `from_pretrained` creates a model for an adapter; the user's options win."""
    options: dict[str, Any] = {}
    names = config.id2label
    if names and "id2label" not in given and given.get("num_labels") in (None, len(names)):
        options["id2label"] = names
        if "label2id" not in given:
            options["label2id"] = {name: index for index, name in names.items()}
    if config.problem_type is not None and "problem_type" not in given:
        options["problem_type"] = config.problem_type
    return options


def check_labels(config: SNNKConfig, model: nn.Module, layout: Layout, expected: Layout) -> None:
    """Raise ConfigError if the classifiers of adapter and model differ in their number of labels."""
    if (own := _number(model)) is None:
        return
    saved = len(config.id2label or ())
    if not saved:
        rows = {
            layout[key][0][0]
            for key in layout.keys() & expected.keys()
            if layout[key][0] and expected[key][0][:1] == (own,) and layout[key][0][1:] == expected[key][0][1:]
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


def measurements(model: nn.Module, family: ModelFamily | None) -> dict[str, str | int]:
    """Return what determines the shapes of an adapter: the architecture and its sizes."""
    if family is None:
        return {"model_class": type(model).__name__, "parameters": sum(p.numel() for p in model.parameters())}
    layers = family.layer_paths(model)
    expansion = module_at(model, f"{layers[0]}.{family.ffn_in}", "the FFN expansion")
    sizes: dict[str, str | int] = {"model_type": family.name, "layers": len(layers)}
    if isinstance(expansion, nn.Linear):
        return sizes | {"hidden_size": expansion.in_features, "ffn_size": expansion.out_features}
    # A family with another kind of FFN; no part that depends on its size supports such a model.
    config = family.config_of(model)
    return sizes | {"hidden_size": config.hidden_size, "heads": config.num_attention_heads}


def check_measurements(config: SNNKConfig, sizes: Mapping[str, str | int]) -> None:
    """Raise ConfigError, naming the sizes, if the adapter was made for a model with other sizes."""
    made_for = config.made_for
    if made_for is None or dict(made_for) == dict(sizes):
        return
    differing = [
        f"{key} is {sizes.get(key)!r}, the adapter's is {made_for.get(key)!r}"
        for key in sorted({*made_for, *sizes})
        if made_for.get(key) != sizes.get(key)
    ]
    raise ConfigError(
        f"this adapter belongs to another base model ({config.base_model_name_or_path or 'name unknown'}): "
        f"{'; '.join(differing)}. Load that base model, or make a new SNNKConfig for this one"
    )
