"""Components of the exponential kernels: E[φ(x)·ψ(y)] = e^{x·y}, or with kernel="gaussian" e^{−‖x−y‖²/2}.

Some members have a factor (1−4a)^{d/4} e^{a‖ω‖²} on each tower. The product of both has mean 1 over Gaussian rows, but
not over rows of one length (`sorf`, `rom`, norms "sqrt_dim": for a = −0.03 it is 0.9 at d = 32, 0.08 at d = 768), and
a quadrature (`sgq`, `ssr`), exact for polynomials of low degree, is far off (−4.6 at d = 32). There the factor is
integrated beforehand. It makes N(0, I) a narrower Gaussian, and u = √(1−4a) ω is N(0, I) under that:

    E (1−4a)^{d/2} e^{2a‖ω‖²} g(√(1−4a) ω) = E g(u)

so the rule is applied to g with u for its nodes: the form for a = 0, whatever a was to be. Over such rows `gerf` and
`oprf` are `posrf` (s = −1: `trigrf`), `saderf` is `posrf` on balanced vectors, `derf` on rotated or balanced ones.

Shapes: x and y (..., dim), the kernel (...). What the members have in common is in `functional/exponential.py`.
"""

from __future__ import annotations

from typing import TypeVar

import torch

from snnk_peft.components.base import Component
from snnk_peft.functional.exponential import check_kernel, exact_kernel
from snnk_peft.projections.base import Projection

Tilt = TypeVar("Tilt", float, torch.Tensor)


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

    @staticmethod
    def tilt(a: Tilt, projection: Projection) -> Tilt:
        """The parameter of e^{a‖ω‖²} to use with a matrix: a, or 0 where its mean over the rows would be wrong.

        Args:
            a: a number, or a tensor of them.
            projection: W.
        """
        return a if projection.sampled_lengths else a * 0
