"""get_snnk_model: turn a transformers model into a PeftModel with SNNK parts, in one call."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import peft
from torch import nn

from snnk_peft.arguments import in_words, takes_declared
from snnk_peft.config import SNNKConfig
from snnk_peft.config_parts import config_with
from snnk_peft.errors import ConfigError, UnsupportedError
from snnk_peft.parts import Part
from snnk_peft.tuner.given_model import (
    as_floating_point,
    as_usual,
    is_compiled,
    plain_model,
    refuse_patched,
    refuse_prepared,
)


@takes_declared
def get_snnk_model(
    model: nn.Module, config: SNNKConfig, adapter_name: str = "default", revision: str | None = None
) -> peft.PeftModel:
    """Put SNNK layers into a transformers model.

    The same as `peft.get_peft_model(model, config, adapter_name)`, but all faults are found before any change.

    Args:
        model: a transformers model of a known family (`FAMILIES.names()`), on any device, in any floating dtype.
        config: which parts, with which feature maps.
        adapter_name: name of the new parameters.
        revision: revision of the base model on the Hub, if it was loaded with one; written to the adapter's config, and
            loaded by AutoPeftModel. None for the config's.

    Returns:
        A `peft.PeftModel`: train it with any loop or Trainer; `save_pretrained` writes only the new parameters.

    Raises:
        ConfigError: sizes or layers that do not fit the model; lists all of them.
        UnsupportedError: the model has no such part, is of an unknown family, is wrapped for data parallelism, already
            holds adapters, is a bundle, is quantized (unless the parts are adapters and norms), is compiled, or was
            loaded inside torch.inference_mode.

    Example:
        >>> from transformers import BertConfig, BertForSequenceClassification
        >>> from snnk_peft import AdapterPart, SNNKConfig, get_snnk_model
        >>> tiny = BertConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64)
        >>> model = get_snnk_model(BertForSequenceClassification(tiny), SNNKConfig(adapter=AdapterPart(num_features=8)))
        >>> model.print_trainable_parameters()
        trainable params: 1,090 || all params: 1,012,516 || trainable%: 0.1077
    """
    faults = [] if isinstance(config, SNNKConfig) else [f"config is {in_words(config)}; expected {_instead_of(config)}"]
    faults += [
        f"{name} is {in_words(value)}; expected a text"
        for name, value in (("adapter_name", adapter_name), ("revision", revision))
        if not isinstance(value, str) and (name, value) != ("revision", None)
    ]
    if faults:
        raise ConfigError(faults)
    if is_compiled(model):
        warnings.warn(
            "the model is compiled (torch.compile): the layers go into the plain model inside, and what is returned is "
            "not compiled. Calibrate and train it, and compile last",
            UserWarning,
            stacklevel=3,
        )
        model = plain_model(model)
    refuse_prepared(model, config.named_parts().values())
    if getattr(model, "_hf_peft_config_loaded", False):
        raise UnsupportedError(
            f"this {type(model).__name__} was loaded with an adapter in it ({', '.join(model.peft_config)}), beside "  # type: ignore[arg-type]
            "which a second one would be trained. Load the base model for a fresh adapter, or go on training the one "
            "there is: PeftModel.from_pretrained(base, folder, is_trainable=True)"
        )
    refuse_patched(model)
    as_floating_point(model)
    # PEFT writes into the config; a copy lets callers use theirs for other models. Entries left by an earlier model
    # apply to a checkpoint, not to a new adapter.
    fresh = copy.deepcopy(config)
    fresh.target_modules = fresh.trained_within = fresh.made_for = fresh.saved_embeddings = None
    fresh.base_digests = fresh.id2label = fresh.problem_type = None
    fresh.revision = revision or fresh.revision
    with warnings.catch_warnings(), as_usual(model):
        # PEFT 0.21 uses a name that transformers 5.23 deprecates, which our users cannot change.
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
        return peft.get_peft_model(model, fresh, adapter_name=adapter_name)


def _instead_of(given: Any) -> str:
    """Describe how to get a config from the object that was given instead."""
    if isinstance(getattr(given, "config", None), SNNKConfig):
        return "SNNKConfig, such as its .config"
    if isinstance(given, Part):
        return f"SNNKConfig, such as {config_with(type(given))}"
    return "SNNKConfig"
