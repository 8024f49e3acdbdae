"""The padding token of classifiers whose config names none: decoders look for the last token that is not padding.

transformers refuses more than one example then. What the tokenizer padded with stands in the batches, where the mask
leaves it out; it is named in the config as long as the model runs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from snnk_peft.errors import ConfigError

NONE = -1  # no token: nothing is padding


def masked_tokens(batch: Mapping[str, Any]) -> set[int]:
    """Return the tokens at positions where the mask is 0."""
    ids, mask = batch.get("input_ids"), batch.get("attention_mask")
    if not isinstance(ids, torch.Tensor) or not isinstance(mask, torch.Tensor) or ids.shape != mask.shape:
        return set()
    return set(ids[mask.to(ids.device) == 0].unique().tolist())


@contextlib.contextmanager
def named_padding(model: Any, tokens: set[int]) -> Iterator[None]:
    """Inside, the config of a classifier of texts names a padding token.

    Args:
        model: any; only classifiers of texts without such a token are changed.
        tokens: those that stand where the mask is 0, of all batches that will be run.

    Raises:
        ConfigError: several.
    """
    root = model.get_base_model() if hasattr(model, "get_base_model") else model
    config: Any = getattr(root, "config", None)
    if "ForSequenceClassification" not in type(root).__name__ or getattr(config, "pad_token_id", 0) is not None:
        yield
        return
    if len(tokens) > 1:
        raise ConfigError(
            f"the config of {type(root).__name__} names no padding token, and the batches hold tokens "
            f"{', '.join(map(str, sorted(tokens)[:4]))} where attention_mask is 0; expected one. Set "
            "model.config.pad_token_id = tokenizer.pad_token_id"
        )
    configs = list({id(each): each for each in (config, config.get_text_config())}.values())
    for each in configs:
        each.pad_token_id = next(iter(tokens), NONE)
    try:
        yield
    finally:
        for each in configs:
            each.pad_token_id = None
