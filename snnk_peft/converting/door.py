"""A model as given to `convert`, taken apart in one form for all kinds of models."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from snnk_peft.calibrating.answers import Pooling


class Opened(NamedTuple):
    """The transformers model inside the given object, and a function that rebuilds the object around another model.

    Args:
        model: the transformers model.
        reader: its tokenizer or image processor; None if there is none.
        pooling: how its token states become one vector.
        close: wraps a plain transformers model into the kind of object given, such as a SentenceTransformer.
        max_length: maximum number of tokens per text, if the given object specifies it.
        missing: why there is no reader, and what to do; empty if there is one.
        prompts: prompts that precede the texts, used in turn.
    """

    model: Any
    reader: Any
    pooling: Pooling
    close: Callable[[Any], Any]
    max_length: int | None = None
    missing: str = ""
    prompts: Sequence[str] = ("",)
