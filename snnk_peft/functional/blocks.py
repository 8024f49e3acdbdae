"""How sequences are cut into blocks, in eager mode and in graphs that are exported for every length."""

from __future__ import annotations

import torch


def exporting() -> bool:
    """Whether a graph is traced for export; if it asks how long its input is, it fits that length only."""
    return getattr(torch.compiler, "is_exporting", torch.compiler.is_compiling)()


def block_count(length: int, size: int) -> int:
    """How many blocks of `size` hold `length` tokens.

    When exporting there are always two or more, with room for one token more: a sample of one block would leave the
    graph with the condition that all inputs have one, and a sample that fills its blocks that all lengths do.
    """
    return length // size + 2 if exporting() else (length + size - 1) // size
