"""Model families: where attention, FFN, pooler and classifier of an architecture live. One data file each."""

from torch import nn

from snnk_peft.errors import UnsupportedError
from snnk_peft.families.base import ModelFamily, module_at, unwrap
from snnk_peft.registry import Registry, did_you_mean

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
    raise UnsupportedError(
        f"{did_you_mean('model family', model_type, FAMILIES.names())}. To add {type(model).__name__}, describe "
        "its module paths with snnk_peft.ModelFamily and snnk_peft.register_family"
    )


def known_family(model: nn.Module) -> ModelFamily | None:
    """The family of a model, or None for an architecture that nobody has described."""
    model_type = getattr(getattr(model, "config", None), "model_type", None)
    return FAMILIES[str(model_type)] if model_type in FAMILIES else None


__all__ = ["FAMILIES", "ModelFamily", "family_of", "known_family", "module_at", "register_family", "unwrap"]
