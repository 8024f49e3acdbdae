"""Launches: block sizes, warps and pipeline stages of each kernel, parts of a sequence, tensors in and out.

`@triton.autotune` needs a driver, so sizes are in tables. `start` launches a compiled kernel at a fraction of
Triton's own host cost (Python, some 80 µs each): Triton determines at every launch what kind each argument
is, which compiled kernel they need, and how they are passed. Here the arguments themselves are the key to the
compiled kernel, which is launched as Triton documents it.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

MOST_PARTS = 128  # of a sequence: `combine` holds one number per pair of parts
PROGRAMS = 512  # enough to fill a card
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
# On compute capability 8 operands of products lie in registers: sizes that spill the least (tests/compile_kernels.py).
OLDER = {
    **TABLE,
    "key_back": Launch(64, 8, 2),
    "query_back": Launch(64, 4, 2),
    "causal_forward": Launch(16, 4, 1),
    "causal_query_back": Launch(16, 4, 1),
    "causal_key_back": Launch(16, 4, 1),
    "causal_key_back_rows": Launch(16, 4, 1),
}
FEWEST = {"causal": 256, "plain": 128}  # minimum tokens per part
LONGEST = {"causal": 1024, "plain": 1024}


def padded(size: int) -> int:
    """Round up to a tile size, a power of two >= 16."""
    return max(16, power_of_two(size))


def power_of_two(size: int) -> int:
    """Round up to a power of two; triton's own takes as long as a launch."""
    return 1 << (size - 1).bit_length()


@functools.cache
def dimensions(m: int, d: int, D: int) -> dict[str, int]:
    """Return the constants that every kernel accepts."""
    return {"m": m, "M": padded(m), "d": d, "Dk": padded(d), "D": D, "Dv": padded(D)}


def part_tokens(length: int, heads: int, kind: str) -> int:
    """Return the tokens per part: enough parts to fill a card, but no more than `combine` accepts."""
    wanted = length * heads // PROGRAMS
    tokens = power_of_two(max(1, wanted))
    tokens = min(max(tokens, FEWEST[kind]), LONGEST[kind])
    return max(tokens, power_of_two(-(-length // MOST_PARTS)))


def launch(kernel: str, T: Any, most: int) -> tuple[int, dict[str, int]]:
    """Return rows per block and launch options for a kernel in TABLE; `most` is the largest of m, d and D, padded."""
    block, warps, stages = (TABLE if capability() >= NEWER else OLDER)[kernel]
    if T != tl.bfloat16 or most > 64:
        narrow = kernel.startswith("causal") and kernel != "causal_sums"
        block, warps, stages = 16 if narrow else 32, 8, 1
    return block, {"num_warps": warps, "num_stages": stages}


@functools.cache
def capability() -> int:
    """Return the cards' major compute capability; NEWER without a card, as in the interpreter."""
    return torch.cuda.get_device_capability()[0] if torch.cuda.is_available() else NEWER


def operand(dtype: torch.dtype) -> Any:
    """Return the dtype of operands of products for inputs of this dtype."""
    return {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}[dtype]


MOST_KERNELS = 4096  # compiled kernels by arguments; texts of ever new lengths would fill the memory
TAKES_ALL = tuple(int(part) for part in triton.__version__.split(".")[:2]) >= (3, 6)  # including constants, by position
_READY: dict[Any, tuple[Any, tuple[Any, ...]]] = {}


def start(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
    """Run `kernel[grid](*args, **options)` on the device of the first argument, a tensor; options name constants."""
    if not TAKES_ALL or type(kernel) is not triton.JITFunction:  # in the interpreter
        kernel[grid](*args, **options)
        return
    device = args[0].device.index
    if device != torch.cuda.current_device():
        with torch.cuda.device(device):
            start(kernel, grid, *args, **options)
        return
    kinds, given = [], []
    for x in args:
        if isinstance(x, Tensor):
            address = x.data_ptr()
            kinds += [x.dtype, address % 16]  # aligned tensors are loaded in wider pieces
            given.append(address)
        else:
            kinds += [type(x), x]
            given.append(x)
    key = kernel, device, tuple(kinds), *options, *options.values()
    if (ready := _READY.get(key)) is None:
        if len(_READY) >= MOST_KERNELS:
            _READY.clear()
        compiled, names = kernel[grid](*args, **options), kernel.arg_names[len(args) :]
        _READY[key] = compiled, tuple(options[name] for name in names)
        return
    compiled, constants = ready
    compiled[(*grid, 1, 1)[:3]](*given, *constants)


def cdiv(a: int, b: int) -> int:
    """Return a / b, rounded up."""
    return -(-a // b)


def empty(like: Tensor, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Allocate memory on the device of a tensor."""
    return torch.empty(shape, dtype=dtype, device=like.device)


def dense(x: Tensor) -> Tensor:
    """Return x with its last dimension contiguous."""
    return x if x.stride(-1) == 1 else x.contiguous()


def flags(mask: Tensor | None, otherwise: Tensor) -> Tensor:
    """Return the memory of the mask; without a mask, any memory, which is not read."""
    return otherwise if mask is None else mask.contiguous()


def strides(*tensors: Tensor) -> list[int]:
    """Return the strides of batch, head and token, one tensor after another."""
    return [s for t in tensors for s in t.stride()[:3]]
