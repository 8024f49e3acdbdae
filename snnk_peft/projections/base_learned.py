"""Weight matrices that are trained: W is a function of parameters and, mostly, of saved noise.

Shapes: W is (num_features, dim), the noise has the shape that the member draws. Initially W is a draw from N(0, I).
"""

from __future__ import annotations

import torch
from torch import nn

from snnk_peft.functional.precision import full_precision
from snnk_peft.functional.random_numbers import normal_numbers
from snnk_peft.projections.base import Projection
from snnk_peft.projections.base_drawn import construction_device, site_generator


class Learned(Projection):
    """Base class of the matrices that are trained: W is a function of parameters and, mostly, of saved noise.

    Initially W is a draw from N(0, I), so that a model starts with the kernel that it would have without learning.
    After that the kernel is learned, so `unbiased` is False and W must be saved. The noise does not
    change unless `redraw_every` is set. W is computed in every forward pass, in train and eval from the same noise.

    A member defines `initial` and `rows`; the noise is N(0, I) unless it overrides `draw` or `draw_buffers`.
    One object serves one matrix: for kernels per head use one per head; for one that a layer's heads share, one
    that all of them call.
    """

    unbiased = False
    redrawable = False
    trainable = True

    noise: torch.Tensor

    def register_draw(self) -> None:
        """Register the noise as buffers and the initial values as parameters."""
        generator, device = site_generator(self.seed, self.site), construction_device()
        drawn = self.draw_buffers(generator)
        self._drawn = tuple(drawn)
        for name, value in drawn.items():
            self.register_buffer(name, value.to(device))
        for name, value in self.initial(generator).items():
            self._buffers.pop(name, None)  # a learned bias replaces the absent one
            self.register_parameter(name, nn.Parameter(value.to(device, torch.float32)))

    def draw(self, generator: torch.Generator) -> torch.Tensor:
        """Draw the noise that W is made of, initially W itself: (num_features, dim) standard normal numbers."""
        return normal_numbers(self.num_features, self.dim, generator=generator)

    def draw_buffers(self, generator: torch.Generator) -> dict[str, torch.Tensor]:
        return {"noise": self.draw(generator).to("cpu", torch.float32)}

    def initial(self, generator: torch.Generator) -> dict[str, torch.Tensor]:
        """Return the initial values of the learned parameters by name, on the CPU and rounded to fp32."""
        raise TypeError(f"{type(self).__name__} does not define initial(); see Learned")

    def rows(self) -> torch.Tensor:
        """Compute W (num_features, dim) from noise and parameters, differentiable in the latter."""
        raise TypeError(f"{type(self).__name__} does not define rows(); see Learned")

    def materialize(self) -> torch.Tensor:
        """Return W as a dense (num_features, dim) tensor, differentiable in the learned parameters."""
        with full_precision(self.state_tensors()[0]):
            return self.rows()

    def state_tensors(self) -> list[torch.Tensor]:
        return [
            *(parameter.detach() for parameter in self.parameters()),
            *(getattr(self, name) for name in self._drawn),
        ]
