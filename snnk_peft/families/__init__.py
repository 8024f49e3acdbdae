"""Model families: where attention, FFN, pooler and classifier of an architecture live; `table.py` has all of them."""

from typing import Any

from torch import nn

from snnk_peft.errors import UnsupportedError
from snnk_peft.families.base import ModelFamily, module_at, unwrap
from snnk_peft.registry import Registry

FAMILIES: Registry[ModelFamily] = Registry("model family", __name__)


def register_family(family: ModelFamily) -> ModelFamily:
    """Make an architecture known; its key is `family.name`, the `model_type` of its transformers config.

    Args:
        family: where the parts of the architecture live.

    Raises:
        ConfigError: another family is registered under this name.

    Example:
        >>> from snnk_peft import FAMILIES, ModelFamily, register_family
        >>> import dataclasses
        >>> mine = register_family(dataclasses.replace(FAMILIES["bert"], name="my-bert"))
        >>> FAMILIES["my-bert"].ffn_in
        'intermediate.dense'
    """
    FAMILIES.register(family.name, family)
    return family


def family_of(model: nn.Module) -> ModelFamily:
    """The family of a transformers model, by its config's model_type.

    Raises:
        UnsupportedError: not a transformers model, or an unknown architecture; says how to describe it.
    """
    if (family := known_family(model)) is not None:
        return family
    model_type = getattr(getattr(model, "config", None), "model_type", None)
    if model_type is None:
        raise UnsupportedError(
            f"{type(model).__name__} has no config.model_type; expected a transformers model of one of the families "
            f"{', '.join(FAMILIES.names())}"
        )
    # A model_type is never a slip of the pen: no "did you mean".
    name, known = type(model).__name__, ", ".join(FAMILIES.names())
    if not getattr(model.config, "is_encoder_decoder", False):
        raise UnsupportedError(
            f"unknown model family {model_type!r}. Available: {known}. To add {name}, describe its module paths with "
            "snnk_peft.ModelFamily and snnk_peft.register_family"
        )
    encoder: Any = getattr(model, "get_encoder", lambda: model)()
    raise UnsupportedError(
        f"{name} (model_type {model_type!r}) is an encoder-decoder or a part of one, and these are not supported; "
        f"expected one stack of layers, of one of the families {known}. "
        + (
            f"Describe the module paths of its {type(encoder).__name__} (model.get_encoder()) with "
            "snnk_peft.ModelFamily and snnk_peft.register_family, and patch that alone"
            if (family := known_family(encoder)) is None
            else f"Its encoder is a {type(encoder).__name__} of the family {family.name!r}; patch that alone: "
            "get_snnk_model(model.get_encoder(), config)"
        )
    )


def known_family(model: nn.Module) -> ModelFamily | None:
    """The family of a model, or None for an unknown architecture."""
    model_type = getattr(getattr(model, "config", None), "model_type", None)
    return FAMILIES[str(model_type)] if model_type in FAMILIES else None


__all__ = ["FAMILIES", "ModelFamily", "family_of", "known_family", "module_at", "register_family", "unwrap"]
