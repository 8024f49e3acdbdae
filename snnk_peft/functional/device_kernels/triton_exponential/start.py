"""Launches of compiled kernels at a fraction of what Triton's own path asks of the host (Python, some 80 µs each).

Triton finds out at every launch what kind each argument is, which of the compiled kernels these want, and how they are
passed. Here the arguments themselves lead to the compiled kernel, which is launched as Triton documents it.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

MOST = 4096  # compiled kernels by arguments; texts of ever new lengths would fill the memory
TAKES_ALL = tuple(int(part) for part in triton.__version__.split(".")[:2]) >= (3, 6)  # constants too, in their places
_READY: dict[Any, tuple[Any, tuple[Any, ...]]] = {}


def start(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
    """`kernel[grid](*args, **options)` on the device of the first argument, a tensor.

    Args:
        kernel: a `triton.jit` function whose parameters are `args`, then constants.
        grid: programs, in one or two dimensions.
        *args: tensors, whole numbers and floats, in their places.
        **options: the constants by name, and what the compiler is told.
    """
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
            kinds += [x.dtype, address % 16]  # what is aligned is loaded in wider pieces
            given.append(address)
        else:
            kinds += [type(x), x]
            given.append(x)
    key = kernel, device, tuple(kinds), *options, *options.values()
    if (ready := _READY.get(key)) is None:
        if len(_READY) >= MOST:
            _READY.clear()
        compiled, names = kernel[grid](*args, **options), kernel.arg_names[len(args) :]
        _READY[key] = compiled, tuple(options[name] for name in names)
        return
    compiled, constants = ready
    compiled[(*grid, 1, 1)[:3]](*given, *constants)
