"""Algorithms for Efficiently Learning Low-Rank Neural Networks: initialisations of layers U Vᵀ."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from papers.lib.verdicts import DIRECTION, FAILS, HOLDS, UNTESTED, Claim, Measured, NotMeasuredError, Store, gain
from papers.pages.lowrank import comparisons

TITLE = "Algorithms for Efficiently Learning Low-Rank Neural Networks"
TASK = "cifar10"


def compared(start: str, least: float) -> Callable[[Store], Measured]:
    """Measure a claim that pages/lowrank.py compares, looked up there by the start of its name."""

    def measure(store: Store) -> Measured:
        row = {name: list(store.reports("lowrank", TASK, name).values()) for name in store.methods("lowrank", TASK)}
        for claim, values in comparisons(row):
            if claim.startswith(start) and values:
                return gain(values, least)
        raise NotMeasuredError(f"model_cards/lowrank/{TASK}: {start}")

    return measure


def start_and_accuracy(store: Store) -> Measured:
    """Measure Spearman's correlation of initialisation error with accuracy, by bootstrap over runs."""
    found = store.figures("papers/programs/results/low_rank_errors")["correlations"][TASK][
        "within rank scale and decay"
    ]
    ours = f"ρ = {found['value']:+.2f} ({found['low']:+.2f} to {found['high']:+.2f}; {found['points']} runs)"
    verdict = HOLDS if found["high"] < 0 else FAILS if found["low"] > 0 else UNTESTED
    return Measured(ours + ("; the runs do not decide" if verdict == UNTESTED else ""), verdict)


def projection(store: Store) -> Measured:
    """Compare the risk of the kernel projection with that of the SVD, on random layers."""
    risks = [
        row["relative_risk"]
        for row in store.figures("benchmarks/results/lowrank_init")["rows"]
        if row["activation"] == "relu" and "kernel_projection" in row["relative_risk"]
    ]
    worse = sum(risk["kernel_projection"] > risk["spectral"] for risk in risks)
    return Measured(f"worse than the SVD in {worse} of {len(risks)} layers", FAILS if worse else HOLDS)


def optimised(store: Store) -> Measured:
    """Compare the risk after optimisation (warm start) with that of the SVD, on random ReLU layers at small ranks."""
    risks = [
        row["relative_risk"]
        for row in store.figures("benchmarks/results/lowrank_init")["rows"]
        if row["activation"] == "relu" and row["rank_scale"] <= 0.1 and "ws_nkp" in row["relative_risk"]
    ]
    better = sum(risk["ws_nkp"] < risk["spectral"] for risk in risks)
    exact = sum(risk["function"] <= risk["ws_nkp"] for risk in risks)
    ours = f"below the SVD in {better} of {len(risks)} layers; our exact risk below it in {exact}"
    return Measured(ours, HOLDS if better == len(risks) else DIRECTION if 2 * better > len(risks) else FAILS)


SCALE = "ResNet-20, CIFAR-10, 2,500 images, 8 epochs, rank scales .05 and .1"
of_study = partial(Claim, page="model_cards/lowrank", command="papers/study.py run lowrank data.dir=DATA/cifar10")
of_init = partial(Claim, page="recipes/benchmarks/results/lowrank_init", command="benchmarks/lowrank_init.py")
CLAIMS = [
    of_study(
        "Tables 1, 2",
        "The warm-started kernel projection trains to higher accuracy than the spectral start.",
        "+.3 on average, ImageNet",
        compared("ws_nkp above spectral", 0.3),
        SCALE,
    ),
    of_study(
        "Tables 1, 2",
        "It also beats the usual start of both factors.",
        "+.1 to +1.0, ImageNet",
        compared("ws_nkp above baseline", 0.1),
        SCALE,
    ),
    of_study(
        "5.2",
        "Frobenius decay beats weight decay at small rank scales.",
        "+.8 to +1.1 at .05, ResNet-50",
        compared("Frobenius decay above weight decay", 0.8),
        SCALE,
    ),
    of_study(
        "5.2",
        "The gain over the spectral start is larger at smaller rank scales.",
        "figures of Tables 3 to 8",
        compared("ws_nkp gains more", 0.0),
        SCALE,
    ),
    Claim(
        "Fig. 2",
        "A smaller error at the start goes with higher accuracy.",
        "a curve, EfficientNet-b7",
        start_and_accuracy,
        SCALE,
        "recipes/papers/programs/results/low_rank_errors",
        "papers/programs/low_rank_errors.py",
    ),
    of_init(
        "5.1",
        "Optimising the function of a layer starts nearer to it than the SVD does.",
        "the method itself",
        optimised,
        "random ReLU layers, rank scales to .1",
    ),
    of_init(
        "Theorem 2.10",
        "The kernel projection minimises the ReLU risk (ERRATA D1).",
        "a proof",
        projection,
        "random ReLU layers",
    ),
]
