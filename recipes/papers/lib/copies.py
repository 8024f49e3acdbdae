"""The copy task: a word of random symbols after a mark, twice; the second copy must be predicted.

    0 w₁ w₂ … wₙ 0 w₁ w₂ … wₙ          wᵢ uniform on 1 … symbols, 0 the mark, length 2 (n + 1)

The first copy cannot be predicted, so only the second counts (Katharopoulos et al. 2020; FMMformer, Nguyen et al.
2021). The token to copy is n tokens before the position at which it is predicted (`distance`): a band that
is no wider does not see it. A sequence is a pure function of (seed, split, index). Shapes: ids (batch, length).
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
        """Number of positions from a prediction back to the token to copy."""
        return self.lengths[0] // 2 - 1

    def word(self, index: int) -> np.ndarray:
        """Return w, (n,)."""
        generator = np.random.default_rng((self.seed, SPLITS.index(self.split), index))
        return generator.integers(MARK + 1, self.symbols + 1, self.lengths[0] // 2 - 1)

    def batch(self, indices: Sequence[int], device: torch.device | str = "cpu") -> dict[str, Any]:
        """Return model inputs: input_ids and labels (batch, length); labels are `IGNORED` before the second copy."""
        words = torch.from_numpy(np.stack([self.word(index) for index in indices])).to(device)
        half = torch.nn.functional.pad(words, (1, 0), value=MARK)
        labels = torch.cat((torch.full_like(half, IGNORED), torch.nn.functional.pad(words, (1, 0), value=IGNORED)), 1)
        return {"input_ids": torch.cat((half, half), 1), "labels": labels, "use_cache": False}

    def describe(self) -> str:
        return f"{len(self):,} sequences of {self.lengths[0]} tokens"

    def fingerprint(self) -> str:
        given = (len(self), self.lengths[0], self.symbols, self.seed, self.split)
        return hashlib.sha256(f"{given}".encode() + self.word(0).tobytes()).hexdigest()


def copy_scores(
    model: torch.nn.Module,
    splits: Mapping[str, ExampleSet],
    batch_size: int,
    accelerator: Any,
    stopped: Callable[[], bool],
) -> dict[str, float] | None:
    """Compute the shares of right tokens of the second copy ("score", "accuracy") and of flawless copies ("whole").

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
