"""Bands (sliding windows) that a model passes to its attention function, and layers that cannot honour them.

A query sees keys at a distance below the width of the band. A softmax layer keeps to it; a linear layer attends to all
keys, unless a near field says that this is wanted.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from snnk_peft.errors import UnsupportedError


def band_width(module: nn.Module, options: dict[str, Any], keys: int) -> int | None:
    """The width of the band that a call asks for, or None for all keys.

    Args:
        module: the attention module.
        options: of the attention function.
        keys: how many there are; a band as wide as that is none.

    Raises:
        UnsupportedError: the model has a window that it does not pass on; its masks know of it, linear ones do not.
    """
    if "sliding_window" in options:
        return options["sliding_window"]
    configured = getattr(getattr(module, "config", None), "sliding_window", None)
    if configured and configured < keys:
        raise UnsupportedError(
            f"{type(module).__name__} has a window of {configured} tokens (config.sliding_window), which it does not "
            f"pass to its attention function, and there are {keys} keys; it would be ignored. Give inputs of at most "
            f"{configured} tokens, set config.sliding_window = None, or leave `attention` out for this model"
        )
    return None


def refuse_narrow_band(module: nn.Module, near_field: int | None, window: int | None, keys: int) -> None:
    """UnsupportedError if a linear layer would see beyond a band without having been asked to.

    Args:
        module: the attention module.
        near_field: of its linear attention; with one, attention beyond the band is wanted.
        window: width of the band, or None.
        keys: how many there are.
    """
    if window is not None and near_field is None and window < keys:
        raise UnsupportedError(
            f"{type(module).__name__} asks for a window of {window} tokens and there are {keys} keys, but this layer "
            f"has linear attention, which sees all of them. Set near_field={window} in the AttentionPart to keep the "
            f"window and add linear attention beyond it, leave the layer out (layers=[...]), give inputs of at most "
            f"{window} tokens, or set model.config.sliding_window = None before patching"
        )
