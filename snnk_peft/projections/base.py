"""What every weight matrix W of a feature map is: rows ω_i, applied as x -> x Wᵀ + c.

Shapes: W is (num_features, dim), c is (num_features,) or absent, x is (..., dim), the result (..., num_features).
A kernel is estimated by Σ_i a_i f(ω_i·x) f(ω_i·y); the weights a_i are 1/num_features but for quadratures.
W is drawn once, on the CPU, from a generator seeded by (seed, slot): two layers with different slots get independent
matrices, the order of patching never matters, and the global random state is not touched.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from snnk_peft.errors import ConfigError
from snnk_peft.functional.draw_checksum import checksum_fault, draw_checksum
from snnk_peft.functional.normalized_projection import EPSILON, normalized_linear


def slot_generator(seed: int, slot: str = "", number: int = 0) -> torch.Generator:
    """A CPU generator whose stream depends on `seed`, the slot name and the number of the draw only."""
    again = f"\0{number}" if number else ""
    digest = hashlib.sha256(f"{int(seed)}:{slot}{again}".encode()).digest()
    return torch.Generator(device="cpu").manual_seed(int.from_bytes(digest[:7], "little"))


def choice_faults(kind: str, given: Mapping[str, tuple[object, tuple[object, ...]]]) -> list[str]:
    """Messages for arguments outside their choices.

    Args:
        kind: the member's name.
        given: argument name -> (value, choices).
    """
    # By type as well: 1 == True, but 1 is no answer to a yes-or-no question.
    return [
        f"{kind} {name} is {value!r}; expected {', '.join(map(repr, choices[:-1]))} or {choices[-1]!r}"
        for name, (value, choices) in given.items()
        if not any(type(value) is type(choice) and value == choice for choice in choices)
    ]


class Projection(nn.Module):
    """Base class of the weight matrices.

    Args:
        dim: length of the input vectors, >= 1.
        num_features: number of rows of W, >= 1. Cost grows linearly with it, the error falls as its square root.
        seed: together with `slot` decides the draw.
        slot: name of the place in the model that this matrix serves.
        save: True keeps W in checkpoints. False keeps 32 bytes of checksum instead; W is drawn again on loading and
            loading fails if the checksum differs.
        redraw_every: draw anew after this many training steps (see `advance`; the paper on learned kernels takes 100),
            or None for never. For features that meet features, as in attention: a readout that was trained on one
            draw does not fit the next. The current draw is saved, and how many steps have passed.

    Attributes:
        distribution: what the rows are drawn from ("gaussian", ...), or "none" for rows that stand for no
            distribution; a component states which one it needs.
        unbiased: whether averages over the rows are unbiased for the component's kernel. False for deterministic
            designs, and for rows that are only nearly Gaussian.
        uniform: whether all feature weights are equal.
        sampled_lengths: whether lengths of rows are a sample of those that Gaussian vectors have, so that e^{a‖ω‖²} has
            the right mean over them. False for rows of one length, and for quadratures, which integrate polynomials.
        redrawable: whether W follows from the seed alone, so that `save=False` is possible.
        seeded: whether W depends on the seed at all; False for deterministic designs, the same in every slot.
        fast: whether W is applied by its structure, without ever being formed.
        resamplable: whether something in W is random, so that `redraw_every` is possible.
        trainable: whether W is learned.
        formula: the rows in a line, for tables.
        source: where they come from.
        cost: multiply-adds per vector, in m = num_features and d = dim.
        params: the member's own keyword arguments, from which it can be built again.
    """

    formula = source = cost = ""
    distribution = "gaussian"
    unbiased = True
    uniform = True
    sampled_lengths = True
    redrawable = True
    seeded = True
    fast = False
    resamplable = True
    trainable = False

    params: Mapping[str, Any] = MappingProxyType({})
    weight: torch.Tensor
    bias: torch.Tensor | None
    steps: torch.Tensor

    def __init__(
        self,
        dim: int,
        num_features: int,
        *,
        seed: int = 0,
        slot: str = "",
        save: bool = True,
        redraw_every: int | None = None,
    ):
        super().__init__()
        self.redraw_every = redraw_every
        sizes = (("dim", dim), ("num_features", num_features))
        faults = [
            f"{name} is {value!r}; expected an integer >= 1"
            for name, value in sizes
            if not isinstance(value, int) or isinstance(value, bool) or value < 1
        ]
        self.dim, self.num_features, self.seed, self.slot, self.save = dim, num_features, seed, slot, save
        if not save and not self.redrawable:
            faults.append(
                f"save_projection=False with projection {type(self).__name__.lower()!r}: this matrix is learned, or "
                "depends on the pretrained weights, and cannot be drawn again from a seed; use save_projection=True"
            )
        faults += self._redraw_faults()
        wrong_arguments = self.argument_faults()
        # What follows from sizes and arguments together can be asked only of valid ones.
        faults += wrong_arguments or ([] if faults else self.settle())
        if faults:
            raise ConfigError(faults)
        self.register_buffer("bias", None)
        self.build()
        if redraw_every is not None:
            self.params = {**self.params, "redraw_every": redraw_every}
            self.register_buffer("steps", torch.zeros((), dtype=torch.int64, device=construction_device()))

    def _redraw_faults(self) -> list[str]:
        every, name = self.redraw_every, type(self).__name__.lower()
        if every is None:
            return []
        if not isinstance(every, int) or isinstance(every, bool) or every < 1:
            return [f"redraw_every is {every!r}; expected a number of training steps >= 1, or None for never"]
        if not (self.resamplable and self.seeded):
            return [f"redraw_every={every} with projection {name!r}, in which nothing is random; leave it None"]
        if not self.save:
            return [
                f"redraw_every={every} with save_projection=False: a matrix drawn anew during training must be saved; "
                "use save_projection=True"
            ]
        return []

    def build(self) -> None:
        """Register what W is made of: here what `draw_buffers` keeps of the draw, as buffers."""
        if self.save and torch.get_default_device().type == "meta":
            # A loader builds the model's shape first and brings W from the checkpoint.
            drawn = self.blank()
        else:
            drawn = self.draw_buffers(slot_generator(self.seed, self.slot))
        self._drawn = tuple(drawn)
        for name, tensor in drawn.items():
            self.register_buffer(name, tensor, persistent=self.save)
        if not self.save:
            self.register_buffer("checksum", draw_checksum(drawn))
            self.register_load_state_dict_pre_hook(_verify_checksum)

    @classmethod
    def nearest_size(cls, dim: int, num_features: int, **params: Any) -> int:
        """The `num_features` nearest to the wanted one that this matrix can have; itself, where any will do.

        Args:
            dim: length of the input vectors.
            num_features: the wanted number of rows.
            **params: the member's own keyword arguments.
        """
        return num_features

    def argument_faults(self) -> list[str]:
        """Messages for wrong arguments of the member's own; they are attributes by now."""
        return []

    def settle(self) -> list[str]:
        """Decide what depends on the sizes, before the draw; messages for sizes the member cannot have."""
        return []

    def draw(self, generator: torch.Generator) -> torch.Tensor:
        """A fresh W (num_features, dim) on the CPU, fp32 or finer, from `generator` alone; by the functions of
        `functional/random_numbers.py`, so that every machine draws the same."""
        raise TypeError(f"{type(self).__name__} does not define draw(); see Projection")

    def draw_buffers(self, generator: torch.Generator) -> dict[str, torch.Tensor]:
        """What is kept of a draw, by buffer name; on the CPU (under a meta context too), numbers in fp32."""
        return {"weight": self.draw(generator).to("cpu", torch.float32)}

    def blank(self) -> dict[str, torch.Tensor]:
        """Tensors like those of `draw_buffers`, on the default device, with undefined values."""
        return {"weight": torch.empty(self.num_features, self.dim, dtype=torch.float32)}

    @torch.no_grad()
    def redraw(self, device: torch.device | None = None) -> None:
        """Draw again from (seed, slot) and the number of draws that `advance` has made; learned parameters stay.

        Needed where a loader left non-persistent buffers undefined.

        Args:
            device: where it is put; None for where it was, or the CPU if that was "meta".
        """
        number = 0 if self.redraw_every is None else int(self.steps) // self.redraw_every
        for name, drawn in self.draw_buffers(slot_generator(self.seed, self.slot, number)).items():
            old = getattr(self, name)
            blank = old.device.type == "meta"
            target = device or (drawn.device if blank else old.device)
            setattr(self, name, drawn.to(target, drawn.dtype if blank else old.dtype))

    @property
    def dtype(self) -> torch.dtype:
        """Floating-point type in which W, or what it is made of, is stored."""
        return next(tensor.dtype for tensor in self.state_tensors() if tensor.is_floating_point())

    @property
    def device(self) -> torch.device:
        """Where W is."""
        return self.state_tensors()[0].device

    def state_tensors(self) -> list[torch.Tensor]:
        """W, or what it is made of, as stored."""
        return [getattr(self, name) for name in self._drawn]

    def is_blank(self) -> bool:
        """Whether something that W is made of has no values yet: a loader will bring it."""
        return any(tensor.is_meta for tensor in self.state_tensors())

    @torch.no_grad()
    def advance(self) -> None:
        """One training step has passed: every `redraw_every`-th one draws anew. Does nothing in eval.

        Never called by a forward pass, of which gradient checkpointing makes two per step.
        """
        if self.redraw_every is None or not self.training:
            return
        self.steps.add_(1)
        if int(self.steps) % self.redraw_every == 0:
            self.redraw()

    def absorb(self, factor: float) -> bool:
        """Multiply W by a number where W is parameters; whether that was possible. The rows are then no draw any more.

        Args:
            factor: the number.
        """
        return False

    def verify(self, checksum: torch.Tensor) -> None:
        """Refuse a checkpoint whose matrix differs from the one this machine draws from (seed, slot).

        Args:
            checksum: (32,) uint8, from the checkpoint.

        Raises:
            ConfigError: they differ.
        """
        if checksum.device.type == "meta":
            return
        fault = checksum_fault(checksum, self.draw_buffers(slot_generator(self.seed, self.slot)))
        if fault is not None:
            raise ConfigError(f"checksum of the redrawn projection of {self.slot!r} (seed {self.seed}) {fault}")

    def __setattr__(self, name: str, value: Any) -> None:
        # The loader of transformers assigns buffers one by one, without the hooks of load_state_dict.
        if name == "checksum" and isinstance(value, torch.Tensor):
            self.verify(value)
        super().__setattr__(name, value)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x Wᵀ + c for x (..., dim); result (..., num_features) in the dtype of x; callers may overwrite it."""
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return nn.functional.linear(x, self.materialize().to(x.dtype), bias)

    def normalized(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        """scale · LN(x) Wᵀ + c, LN without weights over the last axis; the normalised vectors are never formed."""
        if self.trainable or self.fast:
            return self(nn.functional.layer_norm(x, x.shape[-1:], eps=EPSILON) * scale)
        z = normalized_linear(x, self.materialize())
        z = z if scale == 1.0 else z * scale
        return z if self.bias is None else z + self.bias.to(z.dtype)

    def materialize(self) -> torch.Tensor:
        """W as a dense (num_features, dim) tensor."""
        return self.weight

    @property
    def feature_weights(self) -> torch.Tensor:
        """Weight a_i of each row in the average that estimates the kernel, (num_features,), sum 1; uniform here."""
        return torch.full((self.num_features,), 1.0 / self.num_features, dtype=self.dtype, device=self.device)

    def amplitudes(self, signed: bool = False, copies: int = 1) -> torch.Tensor | float:
        """√|a_i|, which each tower multiplies its features with, (copies · num_features,) or one number for all.

        Args:
            signed: times the sign of a_i; for the second tower (psi) only, so that the product of both carries a_i.
            copies: how many features each row makes; they share its weight.
        """
        if self.uniform:
            return (copies * self.num_features) ** -0.5
        weights = self.feature_weights / copies
        root = weights.abs().sqrt()
        return (root * weights.sign() if signed else root).repeat(copies)

    def squared_row_norms(self) -> torch.Tensor:
        """‖ω_i‖², (num_features,)."""
        return self.materialize().square().sum(-1)

    def extra_repr(self) -> str:
        """The arguments, for printing."""
        return f"dim={self.dim}, num_features={self.num_features}, seed={self.seed}, slot={self.slot!r}"


def construction_device() -> str:
    """Where new tensors belong: the CPU, unless a loader builds shapes only and brings the values afterwards."""
    return "meta" if torch.get_default_device().type == "meta" else "cpu"


def _verify_checksum(module: nn.Module, state_dict: dict, prefix: str, *args: object) -> None:
    """The check for everything that goes through load_state_dict; see `Projection.__setattr__` for the rest."""
    assert isinstance(module, Projection)
    if (saved := state_dict.get(prefix + "checksum")) is not None:
        module.verify(saved)
