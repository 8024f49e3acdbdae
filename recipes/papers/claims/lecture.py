"""The lecture on linear attention, FMMformer and random Fourier features; FMMformer is of Nguyen et al. 2021."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial

from papers.lib.verdicts import (
    DIRECTION,
    FAILS,
    HOLDS,
    UNTESTED,
    Claim,
    Measured,
    NotMeasuredError,
    Store,
    all_of,
    gain,
)

TITLE = "Lecture: linear attention, FMMformer, random Fourier features"
CEILING = 0.999  # accuracy


def with_near_field(task: str, width: int) -> Callable[[Store], Measured]:
    """Compare FMMformer with linear attention, both of rank 1, per seed."""

    def measure(store: Store) -> Measured:
        return gain(store.differences("fmm", task, f"fmm_{width}_1", "linear_1", "accuracy", 100).values())

    return measure


def further_ranks(task: str) -> Callable[[Store], Measured]:
    """Compare three maps with one, alone and with each near field; no gain is possible if one is always right."""

    def measure(store: Store) -> Measured:
        parts = []
        for name in ("linear", "fmm_16", "fmm_64"):
            if f"{name}_3" not in store.methods("fmm", task):
                continue
            found = gain(store.differences("fmm", task, f"{name}_3", f"{name}_1", "accuracy", 100).values())
            if min(store.values("fmm", task, f"{name}_1", "accuracy").values()) > CEILING:
                found = Measured(f"{found.ours}, where one is always right", UNTESTED)
            parts.append(found.of(name))
        return all_of(*parts, where=f"model_cards/fmm/{task}: rank 3")

    return measure


def quicker(store: Store) -> Measured:
    """Measure the training step of linear over softmax attention, by length: on a CPU, and on a GPU if stored."""
    places = {"": store.figures("benchmarks/results/attention")["training"]}
    with contextlib.suppress(NotMeasuredError):
        card, figures = store.on_gpu("attention")
        places[f"{card}, bf16, flash attention: "] = figures["training"]
    parts = []
    for where, rows in places.items():
        ours = ", ".join(f"{row['speed_up']:.1f} × at {row['length']:,}" for row in rows)
        growth, longer = (rows[-1][key] / rows[0][key] for key in ("speed_up", "length"))
        verdict = HOLDS if growth > longer / 2 else DIRECTION if growth > 1 else FAILS
        parts.append(Measured(f"{where}{ours}", verdict))
    return all_of(*parts)


def memory(store: Store) -> Measured:
    """Return the exponent of memory in the length, and the memory at the largest length."""
    figures = store.figures("benchmarks/results/attention")
    last, exponent = figures["memory"][-1], figures["memory_exponent"]
    ours = f"grows as length^{exponent:.2f}; {last['linear_MiB']:.0f} MiB at {last['length']:,} tokens"
    return Measured(ours, HOLDS if exponent <= 1.05 else FAILS)


def fourier(store: Store) -> Measured:
    """Compare the errors of random features over their number with theory."""
    rows = [row for row in store.figures("papers/programs/results/pointwise")["rows"] if "arc-cosine" in row["layer"]]
    few, many = rows[0], rows[-1]
    found, theory = few["error"] / many["error"], (many["projections"] / few["projections"]) ** 0.5
    ours = f"{many['projections'] / few['projections']:.0f} times the rows: 1/{found:.1f} of the error (1/{theory:.1f})"
    return Measured(ours, HOLDS if abs(found / theory - 1) < 0.25 else FAILS)


of_fmm = partial(Claim, page="model_cards/fmm", command="papers/study.py run fmm")
CLAIMS = [
    Claim(
        "Linear attention",
        "Associativity makes attention O(N) in time: the gain over softmax grows with the length.",
        "complexity",
        quicker,
        "forward and backward of one attention; 2 CPU threads",
        "recipes/benchmarks/results",
        "benchmarks/attention.py; gpu.py --steps attention",
    ),
    Claim(
        "Linear attention",
        "And O(N) in memory.",
        "complexity",
        memory,
        "1,024 to 65,536 tokens",
        "recipes/benchmarks/results/attention",
        "benchmarks/attention.py",
    ),
    of_fmm(
        "FMMformer",
        "A near field beside the far field beats linear attention (rank 1): copying.",
        "not in the lecture; a curve in its paper",
        with_near_field("copy_128", 64),
        "128 tokens; a near field of 64 sees what is to be copied",
    ),
    of_fmm(
        "FMMformer",
        "The same with a near field of 16, in which what is to be copied never is.",
        "not in the lecture",
        with_near_field("copy_128", 16),
        "128 tokens",
    ),
    of_fmm(
        "FMMformer",
        "The same with a near field of 64, in which what is to be copied is not either.",
        "not in the lecture",
        with_near_field("copy_256", 64),
        "256 tokens",
    ),
    of_fmm(
        "FMMformer",
        "The same, ListOps.",
        "not in the lecture; elu alone 17.15, softmax 36.38 in *Learning the Transformer Kernel*, Table 2",
        with_near_field("listops", 64),
        "expressions of 50 to 250 tokens, a CPU minute a run",
    ),
    of_fmm(
        "FMMformer",
        "A sum of several feature maps (rank 3) beats one.",
        "not in the lecture; a curve in its paper",
        further_ranks("copy_128"),
        "copying, 128 tokens",
    ),
    of_fmm(
        "FMMformer",
        "The same, ListOps.",
        "not in the lecture; a curve in its paper",
        further_ranks("listops"),
        "expressions of 50 to 250 tokens, a CPU minute a run",
    ),
    Claim(
        "Random features",
        "Their error falls as one over the root of their number.",
        "a law",
        fourier,
        "arc-cosine kernel, d = 2,000, 500 draws",
        "recipes/papers/programs/results/pointwise",
        "papers/programs/pointwise.py",
    ),
]
