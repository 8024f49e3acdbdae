"""Base class of the weight matrices W of feature maps: rows ω_i, applied as x -> x Wᵀ + c.

Shapes: W is (num_features, dim), c is (num_features,) or absent, x is (..., dim), the result (..., num_features).
A kernel is estimated by Σ_i a_i f(ω_i·x) f(ω_i·y); the weights a_i are 1/num_features, except for quadratures.
This file holds the map; how W is drawn, saved and checked is in base_drawn.py.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any

import torch
from torch import nn

from snnk_peft.errors import ConfigError, NumericalError
from snnk_peft.functional.normalized_projection import EPSILON, normalized_linear
from snnk_peft.options import MOST, Option, argument_faults, documented
from snnk_peft.projections.base_drawn import Drawn

# Checking every input costs time, and synchronises with a GPU: only with SNNK_DEBUG=1 in the environment.
DEBUG = os.environ.get("SNNK_DEBUG", "") not in ("", "0")


class Projection(Drawn):
    """Base class of the weight matrices.

    A member declares its arguments as options, `Annotated[int, Option("help", low=1)]`, and keeps them in `params`
    before it calls this constructor, which checks them.

    Attributes:
        distribution: what the rows are drawn from ("gaussian", ...), or "none" for rows that represent no
            distribution; a component states which one it needs.
        unbiased: whether averages over the rows are unbiased for the component's kernel. False for deterministic
            designs, and for rows that are only nearly Gaussian.
        uniform: whether all feature weights are equal.
        sampled_lengths: whether row lengths are a sample of those of Gaussian vectors, so that e^{a‖ω‖²} has
            the correct mean over them. False for rows of one length, and for quadratures, which integrate polynomials.
        fast: whether W is applied through its structure, without being formed.
        trainable: whether W is learned.
        needs_layer: whether the rows are taken from a pretrained layer, by `from_layer`; there are at most as many as
            the layer has, and they expect its inputs unchanged.
        selects_rows: whether the rows are chosen from those of that layer, by `select`, whatever these are.
        takes_rows: whether W is an unconstrained tensor that `take` may set.
        mixture: whether rows are drawn from Gaussians with their own means and covariances, by `gaussians`.
        of_attention: whether it is for attention only, with rows of queries and of keys for every head.
        layer_arguments: the member's arguments that are tensors of that layer, and so are in no config.
        formula: the rows in one line, for tables.
        source: where they are from.
        cost: MACs (multiply-accumulate operations) per vector, in m = num_features and d = dim.
        params: the member's own keyword arguments, from which it can be built again.
        redrawable, seeded, resamplable: see `Drawn`.
    """

    formula = source = cost = ""
    distribution = "gaussian"
    unbiased = True
    uniform = True
    sampled_lengths = True
    fast = False
    trainable = False
    needs_layer = selects_rows = takes_rows = mixture = of_attention = False
    layer_arguments: tuple[str, ...] = ()

    params: Mapping[str, Any] = MappingProxyType({})
    weight: torch.Tensor
    bias: torch.Tensor | None

    def __init__(
        self,
        dim: Annotated[int, Option("length of the input vectors.", low=1, high=MOST)],
        num_features: Annotated[
            int,
            Option("rows of W. Cost grows linearly with it, the error falls as its square root.", low=1, high=MOST),
        ],
        *,
        seed: Annotated[int, Option("together with `site` decides the draw.", checked=False)] = 0,
        site: Annotated[str, Option("name of the place in the model that this matrix serves.", checked=False)] = "",
        save: Annotated[
            bool,
            Option(
                "True keeps W in checkpoints. False keeps 32 bytes of checksum instead; W is drawn again on loading "
                "and loading fails if the checksum differs.",
                checked=False,
            ),
        ] = True,
        redraw_every: Annotated[
            int | None,
            Option(
                "draw anew after this many training steps (see `advance`; the paper on learned kernels takes 100), or "
                "None for never. For features that meet features, as in attention: a readout that was trained on one "
                "draw does not fit the next. The current draw is saved, and how many steps have passed.",
                low=1,
                high=MOST,
            ),
        ] = None,
    ):
        super().__init__(seed=seed, site=site, save=save, redraw_every=redraw_every)
        self.dim, self.num_features = dim, num_features
        given = {"dim": dim, "num_features": num_features, **self.params, "redraw_every": redraw_every}
        faults = argument_faults(type(self).__name__.lower(), type(self), given) + self.draw_faults()
        # Checks of sizes and arguments together require both to be valid.
        faults = faults or self.settle()
        if faults:
            raise ConfigError(faults)
        self.register_buffer("bias", None)
        self.build()
        if redraw_every is not None:
            self.params = {**self.params, "redraw_every": redraw_every}

    def __init_subclass__(cls, **kwargs: Any):
        super().__init_subclass__(**kwargs)
        documented(cls)

    @classmethod
    def nearest_size(cls, dim: int, num_features: int, **params: Any) -> int:
        """Return the possible `num_features` nearest to the given one, for the member's own `params`."""
        return num_features

    @classmethod
    def from_layer(
        cls, layer: nn.Linear, num_features: int, *, importance: torch.Tensor | None = None, **kwargs: Any
    ) -> Projection:
        """Create W for features that replace a pretrained layer: by default a draw for its inputs, independent of its
        weights.

        `importance` (rows of the layer,) is the weight of each of them, if known; `kwargs` as in the
        constructor.
        """
        return cls(layer.in_features, num_features, **kwargs)

    def select(self, weight: torch.Tensor, bias: torch.Tensor | None, importance: torch.Tensor) -> torch.Tensor:
        """Select the `num_features` most important rows of a layer, in index order; for members with `selects_rows`.

        Takes weight (rows, dim), bias (rows,) or None and importance (rows,); returns the chosen row indices,
        (num_features,).
        """
        raise TypeError(f"{type(self).__name__} takes no rows of a layer")

    def take(self, rows: torch.Tensor) -> None:
        """Set W to these rows (num_features, dim); for members with `takes_rows`."""
        raise TypeError(f"{type(self).__name__} makes its own rows")

    def gaussians(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return shares of rows (C,), means (C, dim) and covariances (C, dim, dim) of pairs ½ N(μ, Σ) + ½ N(−μ, Σ);
        for members with `mixture`, differentiable in their learned parameters."""
        raise TypeError(f"{type(self).__name__} is no mixture of Gaussians")

    def squares(self, x: torch.Tensor) -> torch.Tensor:
        """Compute xᵀΣx, (..., num_features), with the covariance of each row; for members with `mixture`."""
        raise TypeError(f"{type(self).__name__} is no mixture of Gaussians")

    def settle(self) -> list[str]:
        """Set what depends on the sizes, before the draw; return messages about invalid sizes."""
        return []

    def draw(self, generator: torch.Generator) -> torch.Tensor:
        """Draw W (num_features, dim) on the CPU, fp32 or finer, from `generator` alone, by the functions of
        `functional/random_numbers.py`, so that every machine draws the same."""
        raise TypeError(f"{type(self).__name__} does not define draw(); see Projection")

    def draw_buffers(self, generator: torch.Generator) -> dict[str, torch.Tensor]:
        """Return the buffers of a draw by name; on the CPU (under a meta context too), floats in fp32."""
        return {"weight": self.draw(generator).to("cpu", torch.float32)}

    def blank(self) -> dict[str, torch.Tensor]:
        """Return tensors like those of `draw_buffers`, on the default device, with undefined values."""
        return {"weight": torch.empty(self.num_features, self.dim, dtype=torch.float32)}

    def absorb(self, factor: float) -> bool:
        """Multiply W by a number if W is a parameter; return whether that was possible. The rows are then no longer
        a draw."""
        return False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute x Wᵀ + c for x (..., dim); result (..., num_features) in the dtype of x; callers may overwrite it."""
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return nn.functional.linear(x, self.materialize().to(x.dtype), bias)

    def normalized(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        """Compute scale · LN(x) Wᵀ + c, LN without weights over the last axis; normalised vectors are never formed."""
        if self.trainable or self.fast:
            return self(nn.functional.layer_norm(x, x.shape[-1:], eps=EPSILON) * scale)
        z = normalized_linear(x, self.materialize())
        z = z if scale == 1.0 else z * scale
        return z if self.bias is None else z + self.bias.to(z.dtype)

    def materialize(self) -> torch.Tensor:
        """Return W as a dense (num_features, dim) tensor."""
        return self.weight

    @property
    def feature_weights(self) -> torch.Tensor:
        """Return row weights a_i in the average that estimates the kernel, (num_features,), sum 1; uniform here."""
        return torch.full((self.num_features,), 1.0 / self.num_features, dtype=self.dtype, device=self.device)

    def amplitudes(self, signed: bool = False, copies: int = 1) -> torch.Tensor | float:
        """Return √|a_i|, each tower's factors on its features, (copies · num_features,) or one number for all.

        Args:
            signed: include the sign of a_i; for the second tower (psi) only, so that the product of both carries a_i.
            copies: number of features per row; they share its weight.
        """
        if self.uniform:
            return (copies * self.num_features) ** -0.5
        weights = self.feature_weights / copies
        root = weights.abs().sqrt()
        return (root * weights.sign() if signed else root).repeat(copies)

    def squared_row_norms(self) -> torch.Tensor:
        return self.materialize().square().sum(-1)

    def extra_repr(self) -> str:
        return f"dim={self.dim}, num_features={self.num_features}, seed={self.seed}, site={self.site!r}"


documented(Projection)


def check_finite(tower: str, x: torch.Tensor, projection: Projection) -> None:
    """Raise NumericalError for infinities and NaNs in x, the input of a tower ("phi" or "psi"), in debug mode."""
    if not DEBUG:
        return
    bad = ~torch.isfinite(x)
    if bool(bad.any()):
        first = tuple(bad.nonzero()[0].tolist())
        raise NumericalError(
            f"input of {tower} at site {projection.site!r}, shape {tuple(x.shape)} {x.dtype}: {int(bad.sum())} entries "
            f"are not finite, the first at {first}; expected finite numbers. Look at what computes this input (a loss "
            "that diverged, fp16 that overflowed, a mask filled with -inf)"
        )
