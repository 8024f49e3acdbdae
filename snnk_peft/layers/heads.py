"""Attention modules of transformers whose head size can be set.

They read the size of a head from an attribute and let the number of heads follow, so that narrower Linears and a
smaller size are all that narrower heads need. The scale of q·k stays that of the original head.

Part of the code file of bundles.
"""

from __future__ import annotations

from torch import nn

HEAD_SIZES = ("attention_head_size", "head_dim")  # names of the attribute


def head_size(attention: nn.Module) -> int | None:
    """Dimension of a head of an attention module, or None where the module does not say."""
    sizes = [getattr(attention, name) for name in HEAD_SIZES if hasattr(attention, name)]
    return int(sizes[0]) if sizes else None


def resize_heads(attention: nn.Module, size: int) -> nn.Module:
    """The attention module, which splits into heads of `size` from now on.

    Raises:
        ValueError: it has no such attribute.
    """
    names = [name for name in HEAD_SIZES if hasattr(attention, name)]
    if not names:
        raise ValueError(
            f"{type(attention).__name__} has none of {', '.join(HEAD_SIZES)}, by which attention modules of "
            "transformers split into heads; use the classes and the transformers version that the bundle was made with"
        )
    for name in names:
        setattr(attention, name, size)
    return attention
