"""How large the tensors are that a computation makes: what "memory grows linearly" is tested with."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class LargestTensor(TorchDispatchMode):
    """Within this context, `numel` is the size of the largest tensor made so far.

    Args:
        limit: a larger tensor is an AssertionError at once, before more of its size are made.
    """

    def __init__(self, limit: float = float("inf")):
        super().__init__()
        self.numel, self.limit = 0, limit

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation and look at what it gives."""
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(tensor, torch.Tensor) and not tensor.is_meta:  # which takes no memory
                self.numel = max(self.numel, tensor.numel())
                assert self.numel < self.limit, f"a tensor of shape {tuple(tensor.shape)}"
        return out
