"""32 bytes that identify a draw of tensors, independently of the last bits of its values.

A hash of all bits would tell apart what two LAPACKs make of the same matrix. So only what is exact is hashed:

    4 bytes   the mark and the number of the method by which draws are made
    4 bytes   of the SHA-256 of names, shapes and whole numbers (permutations)
    24 bytes  six sums Σ_i ±w_i over all other numbers in fp32, the signs fixed and random

Two draws agree if the exact parts are equal and every sum is within 1e-5 ‖w‖. Another draw differs by about ‖w‖ in each
of the six; one changed entry of a matrix of N entries shows from a change of about 1e-5 √N on.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping

import numpy as np
import torch

DRAW_METHOD = 2  # 1 was torch.randn and a SHA-256 of all bits
DRAW_MARK = b"Snn"
DRAW_SUMS = 6
DRAW_TOLERANCE = 1e-5


def draw_checksum(tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The 32 bytes (uint8, on the CPU) of a draw; they survive moves between devices, not casts."""
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
    # A sum that is not a number is near nothing.
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
    """Σ_i ±w_i for each of the fixed rows of signs."""
    stream = np.random.Philox(key=DRAW_METHOD)
    sums = []
    for _ in range(DRAW_SUMS):
        words = stream.random_raw(-(-len(numbers) // 64)).astype("<u8")
        plus = np.unpackbits(words.view(np.uint8), count=len(numbers))
        sums.append(numbers @ (2.0 * plus - 1.0))
    return np.array(sums)
