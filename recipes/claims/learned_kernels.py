"""Learning the Transformer Kernel (Chowdhury et al., TMLR 2022)."""

from __future__ import annotations

import statistics
from collections.abc import Callable

from _lib.verdicts import FAILS, HOLDS, UNTESTED, Claim, Measured, NotMeasuredError, Store, all_of, as_good, gain

TITLE = "Learning the Transformer Kernel"
LEARNERS = ("posrf_gmm", "posrf_fastfood_learned", "posrf_generative")
TASKS = ("mrpc", "rte", "cola", "stsb")
# A pretraining that has come less than this share of the way below the loss of guessing by frequency has learned little
# that attention could have contributed.
USEFUL = 0.1


def long_range(task: str, printed: float) -> Callable[[Store], Measured]:
    """Learned Fastfood minus a random matrix, over PosRF."""

    def measure(store: Store) -> Measured:
        return gain(
            store.differences("spectraformer", task, "posrf_fastfood_learned", "posrf_orf", "accuracy", 100).values(),
            printed,
        )

    return measure


def beside_softmax(store: Store) -> Measured:
    """Mean over tasks of the score minus that of softmax, per seed of fine-tuning."""
    parts = []
    for name in LEARNERS:
        by_task = [store.differences("kernels", task, name, "softmax", "score", 100) for task in TASKS]
        seeds = sorted(set.intersection(*(set(found) for found in by_task)))
        if not seeds:
            raise NotMeasuredError(f"model_cards/kernels: no seed of all tasks for {name}")
        found = as_good([statistics.mean(each[seed] for each in by_task) for seed in seeds], 2.0)
        parts.append(Measured(f"{name} {found.ours}", found.verdict))
    whole = all_of(*parts)
    start = next(iter(store.reports("kernels", "pretraining", "softmax").values()))
    learned = 1 - start["loss"] / start["loss_without_context"]
    if learned < USEFUL:
        return Measured(f"{whole.ours}; the pretraining is too short to tell", UNTESTED)
    return whole


def pretraining(store: Store) -> Measured:
    """Held-out loss behind equal processor time, in nats below that of the random matrix; one seed each."""
    base = next(iter(store.reports("kernels", "pretraining", "posrf_orf").values()))
    parts = []
    for name in ("softmax", *LEARNERS):
        report = next(iter(store.reports("kernels", "pretraining", name).values()))
        parts.append(f"{name} {base['loss'] - report['loss']:+.3f}")
    return Measured(", ".join(parts) + " nats below posrf_orf; one seed each", UNTESTED)


def memory(store: Store) -> Measured:
    """The exponent of memory in the length."""
    figures = store.figures("benchmarks/results/attention")
    exponent = figures["memory_exponent"]
    return Measured(f"grows as length^{exponent:.2f}", HOLDS if exponent <= 1.05 else FAILS)


LRA = "sweep_pairs.py --data DATA"
CLAIMS = [
    Claim(
        "Table 2",
        "A learned matrix beats a random one of the same features: ListOps.",
        "FastFood-PRF 37.05, Performer 36.00",
        long_range("listops", 1.05),
        "expressions of 50 to 250 tokens, half a CPU minute a run",
        "model_cards/spectraformer",
        LRA,
    ),
    Claim(
        "Table 2",
        "The same, Text (where the paper's own figures say the contrary).",
        "FastFood-PRF 64.66, Performer 65.40",
        long_range("text", 0.0),
        "500 tokens, half a CPU minute a run",
        "model_cards/spectraformer",
        LRA,
    ),
    Claim(
        "Table 3",
        "Behind masked pretraining, learned kernels fine-tune to softmax's scores on GLUE (here: within 2 points).",
        "GMM 71/82, 59, 21 against 70/82, 60, 18 (MRPC, RTE, CoLA)",
        beside_softmax,
        "3 layers, 300 wide, IMDb, 10 CPU minutes; MRPC, RTE, CoLA, STS-B",
        "model_cards/kernels",
        "sweep_kernels.py --data DATA",
    ),
    Claim(
        "Fig. 4",
        "Memory grows linearly with the length.",
        "a figure",
        memory,
        "1,024 to 65,536 tokens",
        "recipes/benchmarks/results/attention",
        "benchmarks/attention.py",
    ),
]
