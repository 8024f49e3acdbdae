"""The copy task: a word of random symbols after a mark, twice; the second copy, or pieces of it, must be predicted.

    0 w₁ w₂ … wₙ 0 w₁ w₂ … wₙ          wᵢ uniform on 1 … symbols, 0 the mark, length 2 (n + 1)

The first copy cannot be predicted, so only the second counts (Katharopoulos et al. 2020; FMMformer, Nguyen et al.
2021). The token to copy is n tokens before the position at which it is predicted (`distance`): a band no wider than
that cannot see it. A sequence is a pure function of (seed, split, index). Shapes: ids (batch, length).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from snnk_cli.data import ExampleSet
from snnk_cli.evaluation import predict
from snnk_peft.tasks.base import IGNORED

MARK = 0
KNOWN = 4  # tokens that identify a piece
SPLITS = ("train", "validation", "test")


class Copies(ExampleSet):
    """Sequences of one split, generated on demand.

    Args:
        count: number of sequences.
        length: tokens per sequence, even and at least 4.
        symbols: number of symbols, besides the mark.
        seed: seed of the run.
        split: a name in `SPLITS`; sequences of different splits are independent.
    """

    def __init__(self, count: int, length: int, symbols: int, seed: int, split: str):
        self.symbols, self.seed, self.split = symbols, seed, split
        self.lengths = [length] * count

    @property
    def distance(self) -> int:
        """The number of positions from a prediction back to the token to copy."""
        return self.lengths[0] // 2 - 1

    def word(self, index: int) -> np.ndarray:
        """Return w, (n,)."""
        generator = np.random.default_rng((self.seed, SPLITS.index(self.split), index))
        return generator.integers(MARK + 1, self.symbols + 1, self.lengths[0] // 2 - 1)

    def row(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """Return tokens and labels, (length,); labels are `IGNORED` before the second copy."""
        word = self.word(index)
        half = np.concatenate(([MARK], word))
        return np.concatenate((half, half)), np.concatenate((np.full(len(half) + 1, IGNORED), word))

    def batch(self, indices: Sequence[int], device: torch.device | str = "cpu") -> dict[str, Any]:
        """Return model inputs: input_ids and labels (batch, length)."""
        ids, labels = (
            torch.from_numpy(np.stack(rows)).to(device) for rows in zip(*map(self.row, indices), strict=True)
        )
        return {"input_ids": ids, "labels": labels, "use_cache": False}

    def describe(self) -> str:
        return f"{len(self):,} sequences of {self.lengths[0]} tokens"

    def fingerprint(self) -> str:
        given = (len(self), self.lengths[0], self.symbols, self.seed, self.split)
        return hashlib.sha256(f"{given}".encode() + self.word(0).tobytes()).hexdigest()


class Pieces(Copies):
    """Random symbols, then pieces of them in any order, each to be found by its first `KNOWN` tokens, not by position.

    Args:
        count, length, symbols, seed, split: as in `Copies`.
        piece: tokens per piece; must divide half the length.
    """

    def __init__(self, count: int, length: int, symbols: int, seed: int, split: str, piece: int):
        super().__init__(count, length, symbols, seed, split)
        self.piece = piece

    @property
    def distance(self) -> int:
        """The mean number of positions from a prediction back to the token to copy."""
        return self.lengths[0] // 2

    def starts(self, index: int) -> np.ndarray:
        """Return the starts of the pieces in the first half, (length / 2 piece,)."""
        half = self.lengths[0] // 2
        generator = np.random.default_rng((self.seed, SPLITS.index(self.split), index, self.piece))
        return generator.integers(0, half - self.piece + 1, half // self.piece)

    def row(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """Return tokens and labels, (length,); `IGNORED` where nothing determines the next token."""
        first = np.concatenate((self.word(index), [MARK]))
        found = [first[start : start + self.piece] for start in self.starts(index)]
        labels = [np.concatenate((np.full(KNOWN, IGNORED), piece[KNOWN:])) for piece in found]
        return np.concatenate((first, *found)), np.concatenate((np.full(len(first), IGNORED), *labels))

    def fingerprint(self) -> str:
        return hashlib.sha256(f"{super().fingerprint()}, pieces of {self.piece}".encode()).hexdigest()


def copy_scores(
    model: torch.nn.Module,
    splits: Mapping[str, ExampleSet],
    batch_size: int,
    accelerator: Any,
    stopped: Callable[[], bool],
) -> dict[str, float] | None:
    """Compute the shares of correct tokens in the second copy ("score", "accuracy") and of flawless copies ("whole").

    Each token is predicted from the true ones before it. None if `stopped` became true meanwhile.
    """
    (examples,) = splits.values()
    found = predict(model, examples, batch_size, accelerator, stopped)
    if found is None:
        return None
    logits, labels = found
    counts = labels[:, 1:] != IGNORED
    right = logits[:, :-1].argmax(-1) == labels[:, 1:]
    accuracy = right[counts].float().mean().item()
    return {"score": accuracy, "accuracy": accuracy, "whole": (right | ~counts).all(1).float().mean().item()}
