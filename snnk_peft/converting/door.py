"""A model as it was given, taken apart: what every door of `convert` makes of what stands before it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from snnk_peft.calibrating.answers import Pooling


class Opened(NamedTuple):
    """The transformers model inside of what was given, and how what was given is made again around another.

    Args:
        model: the transformers model.
        reader: its tokenizer or image processor; None if there is none.
        pooling: how the states of its tokens become one vector.
        close: makes of a plain transformers model what the user gave: a SentenceTransformer around it, say.
        max_length: tokens that it reads of a text, where what was given says so.
        missing: why there is no reader, and what to do; empty if there is one.
        prompts: that texts come with, in turn.
    """

    model: Any
    reader: Any
    pooling: Pooling
    close: Callable[[Any], Any]
    max_length: int | None = None
    missing: str = ""
    prompts: Sequence[str] = ("",)
