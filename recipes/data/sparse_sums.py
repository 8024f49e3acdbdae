"""Sequences of pairs (v, a) whose relevant values sum to −4 to 4, balanced over the nine sums.

    label = Σ_i v_i a_i,  a_i ~ Bernoulli(p),  v_i = ±1,  no prefix sum leaves [−4, 4]

The coins for v_i are fair except at a bound, where a relevant value can only lead back ("appropriately biased" is all
that Learning the Transformer Kernel, appendix E.1, says); values of irrelevant positions stay fair.

Tokens: 1 + a + 2 · [v = 1], four of them, 0 is padding: (−1, 0), (−1, 1), (1, 0), (1, 1).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import numpy as np

from data import TASKS, Sequences, SequenceTask
from snnk_peft.errors import ConfigError

BOUND, LENGTH = 4, 200
SIZES = {"test": 20000, "validation": 20000, "train": 160000}
CLASSES = 2 * BOUND + 1
LEAST = BOUND  # mean number of relevant positions: with fewer, the sums −4 and 4 hardly ever occur
BATCH = 4096  # sequences drawn at a time; the data depend on it


def draw_pairs(
    rng: np.random.Generator, count: int, probability: float, length: int = LENGTH
) -> tuple[np.ndarray, np.ndarray]:
    """Draw unbalanced sequences: tokens (count, length) uint8, sums (count,).

    Args:
        rng: source of randomness.
        count: number of sequences.
        probability: probability that a position is relevant.
        length: number of positions.
    """
    relevant = rng.random((count, length)) < probability
    values = np.where(rng.random((count, length)) < 0.5, 1, -1)
    sums = np.zeros(count, int)
    for place in range(length):
        blocked = relevant[:, place] & (sums * values[:, place] == BOUND)
        values[blocked, place] *= -1
        sums += values[:, place] * relevant[:, place]
    return (1 + relevant + 2 * (values == 1)).astype(np.uint8), sums


def balanced(
    rng: np.random.Generator, count: int, probability: float, length: int = LENGTH
) -> tuple[np.ndarray, np.ndarray]:
    """Draw tokens (count, length) and labels (count,), 0 to 8 for sums −4 to 4; class counts differ by at most one.

    More are drawn than needed, and the first ones of each class are kept, in the order drawn.

    Args:
        rng: source of randomness.
        count: number of sequences.
        probability: see `draw_pairs`.
        length: number of positions.
    """
    wanted = np.full(CLASSES, count // CLASSES)
    # Classes with one more are drawn at random, or small subsets would always favour the same ones.
    wanted[rng.permutation(CLASSES)[: count % CLASSES]] += 1
    parts: list[np.ndarray] = []
    names: list[np.ndarray] = []
    while wanted.any():
        tokens, sums = draw_pairs(rng, BATCH, probability, length)
        labels = sums + BOUND
        chosen = np.sort(np.concatenate([np.flatnonzero(labels == c)[: wanted[c]] for c in range(CLASSES)]))
        parts.append(tokens[chosen])
        names.append(labels[chosen])
        wanted -= np.bincount(labels[chosen], minlength=CLASSES)
    return np.concatenate(parts), np.concatenate(names)


def sparse_sums(percent: int, length: int = LENGTH) -> SequenceTask:
    """Return the task with `percent` % relevant positions; its data are always the same.

    Args:
        percent: percentage of relevant positions.
        length: number of positions; shorter sequences are drawn anew, as the start of a longer one has another sum.

    Raises:
        ConfigError: there are so few positions that hardly any sequence has a sum of −4 or 4.
    """
    if percent * length < 100 * LEAST:
        raise ConfigError(
            f"task sparsity_{percent} is given {length} positions, of which {percent * length / 100:g} are "
            f"relevant on average; expected at least {LEAST}: {-(-100 * LEAST // percent)} positions or more"
        )

    def read(path: Path | None, wanted: Mapping[str, int | None]) -> dict[str, Sequences]:
        if path is not None:
            raise ConfigError(f"data_dir is {path}; task sparsity_{percent} generates its own data: leave it out")
        return {
            split: _split(percent / 100, length, number, wanted[split], split) for number, split in _numbered(wanted)
        }

    reader: Callable[[Path | None, Mapping[str, int | None]], dict[str, Sequences]] = read
    return SequenceTask(
        name=f"sparsity_{percent}",
        read=reader,
        vocab_size=5,
        max_length=length,
        label_names=tuple(map(str, range(-BOUND, BOUND + 1))),
        generated=True,
        remade=partial(sparse_sums, percent),
    )


def _numbered(wanted: Mapping[str, int | None]) -> list[tuple[int, str]]:
    return [(number, split) for number, split in enumerate(SIZES) if split in wanted]


def _split(probability: float, length: int, number: int, limit: int | None, split: str) -> Sequences:
    """Generate as much of a split as requested; each split has its own stream."""
    size = SIZES[split] if limit is None else min(limit, SIZES[split])
    rng = np.random.default_rng([number, round(100 * probability)])
    tokens, labels = balanced(rng, size, probability, length)
    return Sequences((list(tokens),), labels)


for _percent in (10, 50, 90):  # percent of relevant pairs
    TASKS.register(f"sparsity_{_percent}", sparse_sums(_percent))
