"""Components of the exponential kernels: E[φ(x)·ψ(y)] = e^{x·y}, or with kernel="gaussian" e^{−‖x−y‖²/2}.

Shapes: x and y (..., dim), the kernel (...). What the members have in common is in `functional/exponential.py`.
"""

from __future__ import annotations

import torch

from snnk_peft.components.base import Component
from snnk_peft.functional.exponential import check_kernel, exact_kernel


class Exponential(Component):
    """A component that estimates either kernel.

    Args:
        kernel: "softmax" (default) or "gaussian".

    Raises:
        ConfigError: another kernel.
    """

    kernel_formula = "e^{x·y} or e^{−‖x−y‖²/2}"

    def __init__(self, kernel: str = "softmax"):
        super().__init__()
        self.kernel_name, self.params = check_kernel(kernel), {"kernel": kernel}

    def kernel(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """e^{x·y} or e^{−‖x−y‖²/2}."""
        return exact_kernel(x, y, self.kernel_name)
