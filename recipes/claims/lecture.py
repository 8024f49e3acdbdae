"""The lecture on linear attention, FMMformer and random Fourier features; FMMformer is of Nguyen et al. 2021."""

from __future__ import annotations

import statistics
from collections.abc import Callable

from _lib.verdicts import DIRECTION, FAILS, HOLDS, Claim, Measured, NotMeasuredError, Store, all_of, gain

TITLE = "Lecture: linear attention, FMMformer, random Fourier features"
RANKS = (1, 2, 3)


def with_near_field(task: str, width: int) -> Callable[[Store], Measured]:
    """FMMformer minus linear attention of the same rank, mean over the ranks, per seed."""

    def measure(store: Store) -> Measured:
        pairs = [(f"fmm_{width}_{rank}", f"linear_{rank}") for rank in RANKS]
        return gain(_means(store, task, pairs))

    return measure


def further_ranks(task: str) -> Callable[[Store], Measured]:
    """Three maps minus one, alone and beside a near field of 64."""

    def measure(store: Store) -> Measured:
        parts = []
        for name in ("linear", "fmm_64"):
            found = gain(_means(store, task, [(f"{name}_3", f"{name}_1")]))
            parts.append(Measured(f"{name} {found.ours}", found.verdict))
        return all_of(*parts)

    return measure


def _means(store: Store, task: str, pairs: list[tuple[str, str]]) -> list[float]:
    found = [store.differences("fmm", task, first, second, "accuracy", 100) for first, second in pairs]
    seeds = sorted(set.intersection(*(set(each) for each in found)))
    if not seeds:
        raise NotMeasuredError(f"model_cards/fmm/{task}: no seed of all ranks")
    return [statistics.mean(each[seed] for each in found) for seed in seeds]


def quicker(store: Store) -> Measured:
    """Training step of linear over softmax attention, by length."""
    rows = store.figures("benchmarks/results/attention")["training"]
    ours = ", ".join(f"{row['speed_up']:.1f} × at {row['length']:,}" for row in rows)
    growth = rows[-1]["speed_up"] / rows[0]["speed_up"] / (rows[-1]["length"] / rows[0]["length"])
    return Measured(ours, HOLDS if growth > 0.5 else DIRECTION if growth > 0 else FAILS)


def memory(store: Store) -> Measured:
    """The exponent of memory in the length, and the memory of the longest."""
    figures = store.figures("benchmarks/results/attention")
    last, exponent = figures["memory"][-1], figures["memory_exponent"]
    ours = f"grows as length^{exponent:.2f}; {last['linear_MiB']:.0f} MiB at {last['length']:,} tokens"
    return Measured(ours, HOLDS if exponent <= 1.05 else FAILS)


def fourier(store: Store) -> Measured:
    """Errors of random features over their number."""
    rows = [row for row in store.figures("experiments/results/pointwise")["rows"] if "arc-cosine" in row["layer"]]
    few, many = rows[0], rows[-1]
    found, theory = few["error"] / many["error"], (many["projections"] / few["projections"]) ** 0.5
    ours = f"{many['projections'] / few['projections']:.0f} times the rows: 1/{found:.1f} of the error (1/{theory:.1f})"
    return Measured(ours, HOLDS if abs(found / theory - 1) < 0.25 else FAILS)


FMM, SWEEP, BENCH = "model_cards/fmm", "sweep_fmm.py", "recipes/benchmarks/results/attention"
CLAIMS = [
    Claim(
        "Linear attention",
        "Associativity makes attention O(N) in time: the gain over softmax grows with the length.",
        "complexity",
        quicker,
        "training step of a batch, 2 CPU threads",
        BENCH,
        "benchmarks/attention.py",
    ),
    Claim(
        "Linear attention",
        "And O(N) in memory.",
        "complexity",
        memory,
        "1,024 to 65,536 tokens",
        BENCH,
        "benchmarks/attention.py",
    ),
    Claim(
        "FMMformer",
        "A near field beside the far field beats linear attention of the same rank: copying.",
        "not in the lecture; a curve in its paper",
        with_near_field("copy_128", 64),
        "128 tokens; near field of 64 cannot see the answer at once, two layers can",
        FMM,
        SWEEP,
    ),
    Claim(
        "FMMformer",
        "The same with a narrow near field of 16, which never sees the answer.",
        "not in the lecture",
        with_near_field("copy_128", 16),
        "128 tokens",
        FMM,
        SWEEP,
    ),
    Claim(
        "FMMformer",
        "The same, ListOps.",
        "not in the lecture; elu alone 17.15, softmax 36.38 in *Learning the Transformer Kernel*, Table 2",
        with_near_field("listops", 64),
        "expressions of 50 to 250 tokens",
        FMM,
        SWEEP,
    ),
    Claim(
        "FMMformer",
        "A sum of several feature maps (rank 3) beats one.",
        "not in the lecture; a curve in its paper",
        further_ranks("copy_128"),
        "copying, 128 tokens",
        FMM,
        SWEEP,
    ),
    Claim(
        "Random features",
        "Their error falls as one over the root of their number.",
        "a law",
        fourier,
        "arc-cosine kernel, d = 2,000, 500 draws",
        "recipes/experiments/results/pointwise",
        "experiments/pointwise.py",
    ),
]
