"""Block sizes, warps and pipeline stages of each kernel, and parts of a sequence; `@triton.autotune` needs a driver."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
import triton.language as tl

MOST_PARTS = 128  # of a sequence: `combine` holds one number per pair of them
PROGRAMS = 512  # that fill a card
NEWER = 9  # compute capability from which on operands of products lie in shared memory


class Launch(NamedTuple):
    """Return rows per block, and the compiler options."""

    block: int
    warps: int
    stages: int


# The fastest of recipes/benchmarks/kernel_sizes.py on an H200: 12 heads of 64, 64 features, 4k and 64k tokens, bf16.
TABLE = {
    "key_pass": Launch(64, 4, 3),
    "key_back": Launch(64, 4, 3),
    "query_pass": Launch(64, 4, 3),
    "query_back": Launch(64, 4, 3),
    "causal_sums": Launch(128, 4, 3),
    "causal_forward": Launch(32, 4, 1),
    "causal_query_back": Launch(32, 4, 1),
    "causal_key_back": Launch(32, 4, 1),
    "causal_key_back_rows": Launch(32, 8, 1),  # with the gradient of rows four warps spill
    "near_forward": Launch(64, 4, 2),
    "near_query_back": Launch(64, 4, 2),
    "near_key_back": Launch(64, 4, 2),
}
# On compute capability 8 operands of products lie in registers: what spills the least there (tests/compile_kernels.py).
OLDER = {
    **TABLE,
    "key_back": Launch(64, 8, 2),
    "query_back": Launch(64, 4, 2),
    "causal_forward": Launch(16, 4, 1),
    "causal_query_back": Launch(16, 4, 1),
    "causal_key_back": Launch(16, 4, 1),
    "causal_key_back_rows": Launch(16, 4, 1),
}
FEWEST = {"causal": 256, "plain": 128}  # tokens of a part
LONGEST = {"causal": 1024, "plain": 1024}


def padded(size: int) -> int:
    """Tiles are powers of two, of 16 or more."""
    return max(16, power_of_two(size))


def power_of_two(size: int) -> int:
    """The next one; triton's own takes as long as a launch."""
    return 1 << (size - 1).bit_length()


@functools.cache
def dimensions(m: int, d: int, D: int) -> dict[str, int]:
    """The constants that every kernel takes."""
    return {"m": m, "M": padded(m), "d": d, "Dk": padded(d), "D": D, "Dv": padded(D)}


def part_tokens(length: int, heads: int, kind: str) -> int:
    """Tokens of a part: enough parts to fill a card, not more than `combine` takes."""
    wanted = length * heads // PROGRAMS
    tokens = power_of_two(max(1, wanted))
    tokens = min(max(tokens, FEWEST[kind]), LONGEST[kind])
    return max(tokens, power_of_two(-(-length // MOST_PARTS)))


def launch(kernel: str, T: Any, most: int) -> tuple[int, dict[str, int]]:
    """Rows per block and the options of a launch.

    Args:
        kernel: its name in TABLE.
        T: dtype of the operands.
        most: the largest of m, d and D, padded.
    """
    block, warps, stages = (TABLE if capability() >= NEWER else OLDER)[kernel]
    if T != tl.bfloat16 or most > 64:
        narrow = kernel.startswith("causal") and kernel != "causal_sums"
        block, warps, stages = 16 if narrow else 32, 8, 1
    return block, {"num_warps": warps, "num_stages": stages}


@functools.cache
def capability() -> int:
    """Major compute capability of the cards here; NEWER without one, as in the interpreter."""
    return torch.cuda.get_device_capability()[0] if torch.cuda.is_available() else NEWER


def operand(dtype: torch.dtype) -> Any:
    """The dtype of operands of products for inputs of this one."""
    return {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}[dtype]
