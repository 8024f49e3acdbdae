"""Model families: where attention, FFN, pooler and classifier of an architecture live. One data file each."""

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


__all__ = ["FAMILIES", "ModelFamily", "module_at", "register_family", "unwrap"]
