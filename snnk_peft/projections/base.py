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
from snnk_peft.functional.normalized_projection import EPSILON, normalized_linear


def slot_generator(seed: int, slot: str = "") -> torch.Generator:
    """A CPU generator whose stream depends on `seed` and the slot name only."""
    digest = hashlib.sha256(f"{int(seed)}:{slot}".encode()).digest()
    return torch.Generator(device="cpu").manual_seed(int.from_bytes(digest[:7], "little"))


def tensor_checksum(tensor: torch.Tensor) -> torch.Tensor:
    """32 bytes (uint8) that identify the fp32 values of a tensor; survives moves between devices, not casts."""
    data = tensor.detach().to("cpu", torch.float32).contiguous().numpy().tobytes()
    return torch.tensor(list(hashlib.sha256(data).digest()), dtype=torch.uint8, device="cpu")


class Projection(nn.Module):
    """Base class of the weight matrices.

    Args:
        dim: length of the input vectors, >= 1.
        num_features: number of rows of W, >= 1. Cost grows linearly with it, the error falls as its square root.
        seed: together with `slot` decides the draw.
        slot: name of the place in the model that this matrix serves.
        save: True keeps W in checkpoints. False keeps 32 bytes of checksum instead; W is drawn again on loading and
            loading fails if the checksum differs.

    Attributes:
        distribution: what the rows are drawn from ("gaussian", ...); a component states which one it needs.
        unbiased: whether averages over the rows are unbiased for the component's kernel. False for deterministic
            designs, and for rows that are only nearly Gaussian.
        uniform: whether all feature weights are equal.
        redrawable: whether W follows from the seed alone, so that `save=False` is possible.
        trainable: whether W is learned.
        params: the member's own keyword arguments, from which it can be built again.
    """

    distribution = "gaussian"
    unbiased = True
    uniform = True
    redrawable = True
    trainable = False

    params: Mapping[str, Any] = MappingProxyType({})
    weight: torch.Tensor
    bias: torch.Tensor | None

    def __init__(self, dim: int, num_features: int, *, seed: int = 0, slot: str = "", save: bool = True):
        super().__init__()
        faults = [
            f"{name} is {value!r}; expected an integer >= 1"
            for name, value in (("dim", dim), ("num_features", num_features))
            if not isinstance(value, int) or isinstance(value, bool) or value < 1
        ]
        if not save and not self.redrawable:
            faults.append(
                f"save_projection=False with projection {type(self).__name__.lower()!r}: this matrix depends on the "
                "pretrained weights and cannot be drawn again from a seed; use save_projection=True"
            )
        if faults:
            raise ConfigError(faults)
        self.dim, self.num_features, self.seed, self.slot, self.save = dim, num_features, seed, slot, save
        if save and torch.get_default_device().type == "meta":
            # A loader builds the model's shape first and brings W from the checkpoint.
            weight = torch.empty(num_features, dim, dtype=torch.float32)
        else:
            # Explicit device: under a meta context the draw must still be made.
            weight = self.draw(slot_generator(seed, slot)).to("cpu", torch.float32)
        self.register_buffer("weight", weight, persistent=save)
        self.register_buffer("bias", None)
        if not save:
            self.register_buffer("checksum", tensor_checksum(weight))
            self.register_load_state_dict_pre_hook(_verify_checksum)

    def draw(self, generator: torch.Generator) -> torch.Tensor:
        """A fresh W (num_features, dim) on the CPU, fp32 or finer, from `generator` alone."""
        raise TypeError(f"{type(self).__name__} does not define draw(); see Projection")

    def redraw(self) -> None:
        """Draw W again from (seed, slot), in place. Needed where a loader left non-persistent buffers undefined."""
        weight = self.draw(slot_generator(self.seed, self.slot)).to("cpu", torch.float32)
        target = self.weight if self.weight.device.type != "meta" else weight
        self.weight = weight.to(target.device, target.dtype)

    def verify(self, checksum: torch.Tensor) -> None:
        """Refuse a checkpoint whose matrix differs from the one this machine draws from (seed, slot).

        Args:
            checksum: (32,) uint8, from the checkpoint.

        Raises:
            ConfigError: they differ.
        """
        if checksum.device.type == "meta":
            return
        drawn = tensor_checksum(self.draw(slot_generator(self.seed, self.slot)))
        if not torch.equal(checksum.cpu(), drawn):
            raise ConfigError(
                f"checksum of the redrawn projection of {self.slot!r} differs from the checkpoint: this machine draws "
                f"another matrix from seed {self.seed} (torch {torch.__version__}), or the config's seed was changed. "
                "Use the torch version the checkpoint was made with, or save with save_projection=True"
            )

    def __setattr__(self, name: str, value: Any) -> None:
        # The loader of transformers assigns buffers one by one, without the hooks of load_state_dict.
        if name == "checksum" and isinstance(value, torch.Tensor):
            self.verify(value)
        super().__setattr__(name, value)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x Wᵀ + c for x (..., dim); result (..., num_features) in the dtype of x."""
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return nn.functional.linear(x, self.weight.to(x.dtype), bias)

    def normalized(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        """scale · LN(x) Wᵀ + c, LN without weights over the last axis; the normalised vectors are never formed."""
        if self.trainable:
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
        return torch.full_like(self.weight[:, 0], 1.0 / self.num_features)

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


def _verify_checksum(module: nn.Module, state_dict: dict, prefix: str, *args: object) -> None:
    """The check for everything that goes through load_state_dict; see `Projection.__setattr__` for the rest."""
    assert isinstance(module, Projection)
    if (saved := state_dict.get(prefix + "checksum")) is not None:
        module.verify(saved)
