"""`save_pretrained` of a patched transformers model: it raises, and says where to save instead.

The model inside a PeftModel would write its wrapped modules under names that no transformers class has; reading them
back gives random weights in the places that matter. With an adapter that transformers itself added (`add_adapter`,
`load_adapter`) the method writes an adapter folder, which gets its digests here: PEFT's config comes first there.
"""

from __future__ import annotations

from typing import Any

from snnk_peft.errors import ConfigError
from snnk_peft.tuner.saving import saved_adapters


class PatchedSave:
    """Stands in for a patched model's `save_pretrained`.

    Args:
        model: the transformers model.
    """

    def __init__(self, model: Any):
        self.model = model

    def __call__(self, save_directory: Any, *args: Any, **kwargs: Any) -> Any:
        """Save an adapter of transformers as the model's own method does.

        Raises:
            ConfigError: the adapter belongs to a PeftModel.
        """
        if not getattr(self.model, "_hf_peft_config_loaded", False):
            raise ConfigError(
                f"this {type(self.model).__name__} is the inside of a PeftModel: saved alone, it could not be loaded "
                "again. Save the adapter with the PeftModel's save_pretrained, the whole as a plain model with "
                "snnk_peft.bundle(model).save_pretrained(folder), or the base model after model.unload()"
            )
        save = type(self.model).save_pretrained
        if not (args[0] if args else kwargs.get("is_main_process", True)):
            return save(self.model, save_directory, *args, **kwargs)
        with saved_adapters(save_directory) as staged:
            return save(self.model, staged, *args, **kwargs)


def guard_save(model: Any) -> None:
    """Install the replacement of `save_pretrained`."""
    if hasattr(model, "save_pretrained"):
        model.save_pretrained = PatchedSave(model)


def release_save(model: Any) -> None:
    """Undo what `guard_save` did."""
    if isinstance(vars(model).get("save_pretrained"), PatchedSave):
        del model.save_pretrained
