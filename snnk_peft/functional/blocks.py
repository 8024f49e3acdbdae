"""Splitting sequences into blocks, in eager mode and in graphs exported for every length."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

import torch

from snnk_peft.functional.backend import exporting, traced

BLOCK = 2**19  # values in a block of features: a few such blocks fit into the cache of a CPU
FEWEST = 256  # minimum number of tokens in a block
LONGEST = 8192  # tokens in a block of causal attention on an accelerator: its prefixes take memory ∝ length²


def takes_blocks(x: torch.Tensor) -> bool:
    """Return True if blocks are used: on a CPU, except in a traced graph, whose memory is planned as a whole."""
    return not traced() and x.device.type == "cpu"


def block_tokens(x: torch.Tensor, columns: int) -> int | None:
    """Return the tokens per block of x (B, H, L, d), for `columns` values per token and head; None for all at once."""
    if not takes_blocks(x):
        return None
    return max(FEWEST, BLOCK // (x.shape[0] * x.shape[1] * columns) // FEWEST * FEWEST)


def causal_tokens(x: torch.Tensor, columns: int) -> int | None:
    """Like `block_tokens`, for causal attention, which passes its state from block to block on accelerators too."""
    size = block_tokens(x, columns)
    return LONGEST if size is None and not traced() else size


def split_tokens(size: int | None, *tensors: torch.Tensor | None) -> Iterator[tuple[Any, ...]]:
    """Zip the blocks of tensors (B, H, L, d) and masks (B, L); None stays None; one block if `size` is
    None."""
    first = tensors[0]
    if size is None or first is None or first.shape[-2] <= size:
        yield tensors
        return
    count = -(-first.shape[-2] // size)
    # split instead of slices: the gradient of each slice would be as long as the whole.
    pieces = [[None] * count if t is None else t.split(size, -2 if t.dim() == 4 else -1) for t in tensors]
    yield from zip(*pieces, strict=True)


def joined(blocks: Iterator[torch.Tensor], size: int | None, length: int) -> torch.Tensor:
    """Join blocks of `size` tokens (B, H, l, D), created on demand, into one tensor (B, H, length, D).

    Without gradients each is written to its place at once, so that the next block can reuse its memory.
    """
    first = next(blocks)
    if size is None or length <= size:
        return first
    if torch.is_grad_enabled():
        return torch.cat((first, *blocks), -2)
    out, place = first.new_empty(*first.shape[:-2], length, first.shape[-1]), 0
    for block in itertools.chain((first,), blocks):
        out[..., place : place + block.shape[-2], :] = block
        place += block.shape[-2]
    return out


class BlockMemory:
    """Memory shared by the steps of a loop over blocks: allocating each time would cost more than the computation."""

    def __init__(self, like: torch.Tensor):
        self._like = like
        self._used = takes_blocks(like) and not torch.is_grad_enabled()  # a gradient needs all steps
        self._memory: torch.Tensor | None = None

    def of(self, *shape: int) -> torch.Tensor | None:
        """Return a tensor of this shape for `out=` that overwrites the previous one; None for fresh memory."""
        if not self._used:
            return None
        count = math.prod(shape)
        if self._memory is None or len(self._memory) < count:
            self._memory = self._like.new_empty(count)
        return self._memory[:count].view(shape)


def block_count(length: int, size: int) -> int:
    """Return the number of blocks of `size` tokens for a sequence of `length`.

    When exporting, there are at least two, with room for one more token: a sample of one block would bake into the
    graph that all inputs have one block, and a sample that fills its blocks that all lengths do.
    """
    return length // size + 2 if exporting() else (length + size - 1) // size
