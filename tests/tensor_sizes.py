"""How large the tensors are that a computation makes: what "memory grows linearly" is tested with."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class LargestTensor(TorchDispatchMode):
    """Within this context, `numel` is the size of the largest tensor made so far.

    Args:
        limit: a larger tensor is an AssertionError at once, before more of its size are made.
        meta: whether tensors on the meta device count, which take no memory and stand for those that do.
    """

    def __init__(self, limit: float = float("inf"), meta: bool = False):
        super().__init__()
        self.numel, self.limit, self.meta = 0, limit, meta

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation and look at what it gives."""
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(tensor, torch.Tensor) and (self.meta or not tensor.is_meta):
                self.numel = max(self.numel, tensor.numel())
                assert self.numel < self.limit, f"a tensor of shape {tuple(tensor.shape)}"
        return out
