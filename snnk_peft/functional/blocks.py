"""How sequences are cut into blocks, in eager mode and in graphs that are exported for every length."""

from __future__ import annotations

import torch


def exporting() -> bool:
    """Whether a graph is traced for export; if it asks how long its input is, it fits that length only."""
    return getattr(torch.compiler, "is_exporting", torch.compiler.is_compiling)()


def block_count(length: int, size: int) -> int:
    """How many blocks of `size` hold `length` tokens.

    When exporting there is room for one token more: a sample whose length is a multiple of `size` would otherwise leave
    the graph with the condition that all lengths are.
    """
    return length // size + 1 if exporting() else (length + size - 1) // size
