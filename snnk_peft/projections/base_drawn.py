"""Tensors that are drawn once, on the CPU, from a generator seeded by (seed, site): layers with different sites get
independent ones, the order of patching never matters, and the global random state is not touched.

Draws are kept in buffers. A checkpoint holds these, or a checksum of 32 bytes by which a wrong draw is detected. A
hash of all bits would differ between two LAPACKs for the same matrix, so only exact parts are hashed:

    4 bytes   the mark and the number of the method by which draws are made
    4 bytes   of the SHA-256 of names, shapes and whole numbers (permutations)
    24 bytes  six sums Σ_i ±w_i over all other numbers in fp32, the signs fixed and random

Two draws agree if the exact parts are equal and every sum is within 1e-5 ‖w‖. Another draw differs by about ‖w‖ in each
of the six; one changed entry of a matrix of N entries is detected from a change of about 1e-5 √N on.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

from snnk_peft.errors import ConfigError

DRAW_METHOD = 2  # 1 was torch.randn and a SHA-256 of all bits
DRAW_MARK = b"Snn"
DRAW_SUMS = 6
DRAW_TOLERANCE = 1e-5


def draw_checksum(tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Compute the 32 bytes (uint8, on the CPU) of a draw; they survive moves between devices, not casts."""
    exact = DRAW_MARK + bytes([DRAW_METHOD]) + _exact_part(tensors)
    data = exact + struct.pack(f"<{DRAW_SUMS}f", *_signed_sums(_numbers(tensors)))
    return torch.tensor(list(data), dtype=torch.uint8, device="cpu")


def checksum_fault(saved: torch.Tensor, tensors: Mapping[str, torch.Tensor]) -> str | None:
    """Return what is wrong if a stored checksum (32,) does not match these tensors, None if it matches."""
    whole = saved.dtype == torch.uint8 and tuple(saved.shape) == (8 + 4 * DRAW_SUMS,)
    data = bytes(saved.cpu().tolist()) if whole else b""
    if data[:3] != DRAW_MARK:
        return (
            "is not one of this snnk_peft: either the file is damaged, or it was saved by an earlier version, which "
            "drew its matrices with torch.randn, different on other machines. Load such a file with the version it was "
            "made with (on a machine of the same kind) and save it again with save_projection=True"
        )
    if data[3] != DRAW_METHOD:
        return (
            f"was made by method {data[3]} of drawing matrices; this snnk_peft has method {DRAW_METHOD}. Use the "
            "version the file was made with, or save there with save_projection=True"
        )
    numbers = _numbers(tensors)
    there = np.array(struct.unpack(f"<{DRAW_SUMS}f", data[8:]))
    near = np.abs(there - _signed_sums(numbers)) <= DRAW_TOLERANCE * np.linalg.norm(numbers)
    # A NaN sum matches nothing.
    if data[4:8] == _exact_part(tensors) and near.all():
        return None
    return (
        "differs from the checkpoint: the matrix that follows from the config is not the one that was saved. The seed "
        "or a size in the config was changed, or the file is damaged; restore both as they were saved, or save with "
        "save_projection=True"
    )


def _numbers(tensors: Mapping[str, torch.Tensor]) -> np.ndarray:
    """Concatenate all non-integer entries, rounded to fp32, into one fp64 vector."""
    parts = [t.detach().to("cpu", torch.float32).double().flatten() for t in tensors.values() if t.is_floating_point()]
    return torch.cat(parts).numpy() if parts else np.zeros(0)


def _exact_part(tensors: Mapping[str, torch.Tensor]) -> bytes:
    digest = hashlib.sha256()
    for name, tensor in tensors.items():
        digest.update(f"{name}{tuple(tensor.shape)}".encode())
        if not tensor.is_floating_point():
            digest.update(tensor.detach().to("cpu", torch.int64).numpy().astype("<i8").tobytes())
    return digest.digest()[:4]


def _signed_sums(numbers: np.ndarray) -> np.ndarray:
    """Compute Σ_i ±w_i for each of the fixed rows of signs."""
    stream = np.random.Philox(key=DRAW_METHOD)
    sums = []
    for _ in range(DRAW_SUMS):
        words = stream.random_raw(-(-len(numbers) // 64)).astype("<u8")
        plus = np.unpackbits(words.view(np.uint8), count=len(numbers))
        sums.append(numbers @ (2.0 * plus - 1.0))
    return np.array(sums)


def site_generator(seed: int, site: str = "", number: int = 0) -> torch.Generator:
    """Return a CPU generator whose stream depends on `seed`, the site name and the number of the draw only."""
    again = f"\0{number}" if number else ""
    digest = hashlib.sha256(f"{int(seed)}:{site}{again}".encode()).digest()
    return torch.Generator(device="cpu").manual_seed(int.from_bytes(digest[:7], "little"))


def construction_device() -> str:
    """Return the device for new tensors: the CPU, unless a loader builds shapes only and fills in the values later."""
    return "meta" if torch.get_default_device().type == "meta" else "cpu"


class Drawn(nn.Module):
    """A module whose buffers are determined by a seed. A member defines `draw_buffers` and `blank`, and calls `build`.

    Args:
        seed: determines the draw together with `site`.
        site: name of the place in the model that the draw is for.
        save: True keeps the draw in checkpoints. False keeps 32 bytes of checksum instead; it is drawn again on loading
            and loading fails if the checksum differs.
        redraw_every: redraw after this many training steps (see `advance`), or None for never.

    Attributes:
        redrawable: whether everything is determined by the seed alone, so that `save=False` is possible.
        seeded: whether anything depends on the seed at all; False for deterministic designs, the same at every site.
        resamplable: whether anything is random, so that `redraw_every` is possible.
    """

    redrawable = True
    seeded = True
    resamplable = True

    steps: torch.Tensor

    def __init__(self, *, seed: int = 0, site: str = "", save: bool = True, redraw_every: int | None = None):
        super().__init__()
        self.seed, self.site, self.save, self.redraw_every = seed, site, save, redraw_every

    def draw_faults(self) -> list[str]:
        """Return messages about options of the draw that this class does not support."""
        every, name = self.redraw_every, type(self).__name__.lower()
        found = []
        if not self.save and not self.redrawable:
            found.append(
                f"save_projection=False with projection {name!r}: this matrix is learned, or depends on the pretrained "
                "weights, and cannot be drawn again from a seed; use save_projection=True"
            )
        if every is None:
            return found
        if not (self.resamplable and self.seeded):
            found.append(f"redraw_every={every} with projection {name!r}, in which nothing is random; leave it None")
        elif not self.save:
            found.append(
                f"redraw_every={every} with save_projection=False: a matrix drawn anew during training must be saved; "
                "use save_projection=True"
            )
        return found

    def build(self) -> None:
        """Make the draw, and start to count steps unless it is the last one."""
        self.register_draw()
        if self.redraw_every is not None:
            self.register_buffer("steps", torch.zeros((), dtype=torch.int64, device=construction_device()))

    def register_draw(self) -> None:
        """Register the tensors of `draw_buffers` as buffers."""
        if self.save and construction_device() == "meta":
            # A loader builds the model's shape first and fills in the values from the checkpoint.
            drawn = self.blank()
        else:
            drawn = self.draw_buffers(site_generator(self.seed, self.site))
        self._drawn = tuple(drawn)
        for name, tensor in drawn.items():
            self.register_buffer(name, tensor, persistent=self.save)
        if not self.save:
            self.register_buffer("checksum", draw_checksum(drawn))
            self.register_load_state_dict_pre_hook(_verify_checksum)

    def draw_buffers(self, generator: torch.Generator) -> dict[str, torch.Tensor]:
        """Return the buffers of a draw by name; on the CPU (under a meta context too), floats in fp32."""
        raise TypeError(f"{type(self).__name__} does not define draw_buffers(); see Drawn")

    def blank(self) -> dict[str, torch.Tensor]:
        """Return tensors like those of `draw_buffers`, on the default device, with undefined values."""
        raise TypeError(f"{type(self).__name__} does not define blank(); see Drawn")

    @torch.no_grad()
    def redraw(self, device: torch.device | None = None) -> None:
        """Draw again from (seed, site) and the number of draws that `advance` has made; learned parameters stay.

        Needed if a loader left non-persistent buffers undefined. `device` None keeps the device, or uses the CPU if it
        was "meta".
        """
        number = 0 if self.redraw_every is None else int(self.steps) // self.redraw_every
        for name, drawn in self.draw_buffers(site_generator(self.seed, self.site, number)).items():
            old = getattr(self, name)
            blank = old.device.type == "meta"
            target = device or (drawn.device if blank else old.device)
            setattr(self, name, drawn.to(target, drawn.dtype if blank else old.dtype))

    @torch.no_grad()
    def advance(self) -> None:
        """Count a training step, and redraw after every `redraw_every`-th. Does nothing in eval.

        Never called by a forward pass, since gradient checkpointing runs two per step.
        """
        if self.redraw_every is None or not self.training:
            return
        self.steps.add_(1)
        if int(self.steps) % self.redraw_every == 0:
            self.redraw()

    def state_tensors(self) -> list[torch.Tensor]:
        """Return the buffers of the draw, as stored."""
        return [getattr(self, name) for name in self._drawn]

    @property
    def dtype(self) -> torch.dtype:
        """Return the floating-point type in which the draw is stored."""
        return next(tensor.dtype for tensor in self.state_tensors() if tensor.is_floating_point())

    @property
    def device(self) -> torch.device:
        return self.state_tensors()[0].device

    def is_blank(self) -> bool:
        """Return True if part of the draw has no values yet and is left to a loader."""
        return any(tensor.is_meta for tensor in self.state_tensors())

    def verify(self, checksum: torch.Tensor) -> None:
        """Raise ConfigError for a checkpoint whose checksum differs from that of the draw from (seed, site)."""
        if checksum.device.type == "meta":
            return
        fault = checksum_fault(checksum, self.draw_buffers(site_generator(self.seed, self.site)))
        if fault is not None:
            raise ConfigError(f"checksum of the redrawn projection of {self.site!r} (seed {self.seed}) {fault}")

    def __setattr__(self, name: str, value: Any) -> None:
        # The loader of transformers assigns buffers one by one, without the hooks of load_state_dict.
        if name == "checksum" and isinstance(value, torch.Tensor):
            self.verify(value)
        super().__setattr__(name, value)


def _verify_checksum(module: nn.Module, state_dict: dict, prefix: str, *args: object) -> None:
    """Check everything that goes through load_state_dict; see `Drawn.__setattr__` for the rest."""
    assert isinstance(module, Drawn)
    if (saved := state_dict.get(prefix + "checksum")) is not None:
        module.verify(saved)
