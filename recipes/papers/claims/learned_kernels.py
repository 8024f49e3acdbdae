"""Learning the Transformer Kernel (Chowdhury et al., TMLR 2022)."""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Callable
from functools import partial

from papers.claims.lecture import memory
from papers.claims.spectraformer import EXPRESSIONS, LONGER, REVIEWS, of_pairs, on_pages
from papers.lib.reports import by_model
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
    as_good,
    gain,
    in_words,
    unchanged,
)
from papers.pages.sparsity import steps_to
from snnk_cli.tables import mean_and_error

TITLE = "Learning the Transformer Kernel"
LEARNERS = ("posrf_gmm", "posrf_fastfood_learned", "posrf_generative")
TASKS = ("mrpc", "rte", "cola", "stsb")
# A pretraining that improves on the loss of guessing by frequency by less than this share has learned little that
# attention could have contributed to.
USEFUL = 0.1


def long_range(task: str, printed: float, *pages: str) -> Callable[[Store], Measured]:
    """Compare learned Fastfood with a random matrix, for PosRF, on every page that has both."""

    def measure(store: Store) -> Measured:
        return on_pages(store, task, pages, "posrf_fastfood_learned", "posrf_orf", printed)

    return measure


def beside_softmax(store: Store) -> Measured:
    """Compare learned kernels with softmax: score difference, mean over tasks, per fine-tuning seed."""
    there = [name for name in LEARNERS if all(name in store.methods("kernels", task) for task in TASKS)]
    parts = (as_good(store.mean_differences("kernels", TASKS, name, "softmax"), 2.0).of(name) for name in there)
    whole = all_of(*parts, where="model_cards/kernels: a learned kernel on all tasks")
    start = next(iter(store.reports("kernels", "pretraining", "softmax").values()))
    learned = 1 - start["loss"] / start["loss_without_context"]
    if learned < USEFUL:
        return Measured(f"{whole.ours}; the pretraining is too short to tell", UNTESTED)
    return whole


def _steps(store: Store, method: str, level: float = 0.9) -> dict[str, dict[int, int]]:
    """Return task -> seed -> steps to this accuracy, or all steps if a run never reached it."""
    found = {}
    for task in ("sparsity_10", "sparsity_90"):
        reports = store.reports("sparsity", task, method)
        found[task] = {seed: steps_to(report, level) or report["steps"] for seed, report in reports.items()}
    return found


def _slower(store: Store, method: str) -> list[float]:
    """Return the percentage of extra steps needed with 90 % relevant pairs compared with 10 %, per seed."""
    sparse, dense = _steps(store, method).values()
    found = [100 * (dense[seed] / sparse[seed] - 1) for seed in sparse if seed in dense]
    if not found:
        raise NotMeasuredError(f"model_cards/sparsity: no seed of both for {method}")
    return found


def positive_with_sparsity(store: Store) -> Measured:
    """Measure positive features over a mixture, and exact attention, which estimates nothing."""
    found = gain(_slower(store, "posrf_gmm"), unit="% steps", form="+.0f")
    with contextlib.suppress(NotMeasuredError):
        beside = in_words(_slower(store, "softmax"), "%", "+.0f")
        found = Measured(f"{found.ours}; softmax itself {beside}", found.verdict)
    return found


def trigonometric_with_sparsity(store: Store) -> Measured:
    """Measure trigonometric features over a mixture."""
    return unchanged(_slower(store, "trigrf_gmm"), 25, "% steps")


def eigenvalues(store: Store) -> Measured:
    """Compute the largest eigenvalue and the mean over layers and heads of all mixtures, averaged over seeds."""
    models = store.figures("papers/programs/results/spectra")["models"]
    parts = []
    for name, seeds in by_model({model["model"]: model["layers"] for model in models}).items():
        found = [[head for layer in layers if "gmm" in layer["map"] for head in layer["heads"]] for layers in seeds]
        if any(found):
            largest = mean_and_error([max(head["maximum"] for head in heads) for heads in found])
            mean = mean_and_error([statistics.mean(head["mean"] for head in heads) for heads in found])
            verdict = HOLDS if largest[0] < 0.5 else DIRECTION if mean[0] < 1 else FAILS
            told = "largest {:.2f} ± {:.2f}, mean {:.2f} ± {:.2f}".format(*largest, *mean)
            parts.append(Measured(f"{name}: {told} ({len(found)} seeds)", verdict))
    return all_of(*parts, where="papers/programs/results/spectra: a mixture")


def voting(store: Store) -> Measured:
    """Compute the accuracy gain of a majority vote of fresh draws over one draw, in percent; for both mixtures."""
    split, task = "evaluation.draws.splits.test.", "sparsity_50"
    parts = []
    for name in store.methods("draws", task):
        gains = store.values("draws", task, name, f"{split}voting_gain")
        one, all_, against = (
            statistics.mean(store.values("draws", task, name, split + key, 100).values())
            for key in ("accuracy", "voting_accuracy", "pi_share")
        )
        found = gain([100 * (value - 1) for value in gains.values()], unit="%", form="+.0f")
        means = f"{one:.1f} to {all_:.1f} % right, {against:.1f} % of answers against the majority"
        parts.append(Measured(f"{name} {found.ours}: {means}", found.verdict))
    return all_of(*parts, where=f"model_cards/draws/{task}")


of_sparsity = partial(Claim, page="model_cards/sparsity", command="papers/study.py run sparsity")
CLAIMS = [
    of_pairs(
        "Table 2",
        "A learned matrix beats a random one of the same features: ListOps.",
        "FastFood-PRF 37.05, Performer 36.00",
        long_range("listops", 1.05, "spectraformer"),
        EXPRESSIONS,
    ),
    of_pairs(
        "Table 2",
        "The same, Text (where the paper's own figures say the contrary).",
        "FastFood-PRF 64.66, Performer 65.40",
        long_range("text", 0.0, "spectraformer", "lra"),
        f"{REVIEWS}; {LONGER}",
    ),
    Claim(
        "Table 3",
        "Behind masked pretraining, learned kernels fine-tune to softmax's scores on GLUE (here: within 2 points).",
        "GMM 71/82, 59, 21 against 70/82, 60, 18 (MRPC, RTE, CoLA)",
        beside_softmax,
        "3 layers, 300 wide, IMDb, 10 CPU minutes; 2,000 examples of MRPC, RTE, CoLA, STS-B",
        "model_cards/kernels",
        "papers/study.py run kernels --data DATA",
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
    Claim(
        "Table 4",
        "Learned mixtures have eigenvalues much below 1, that of what is not learned.",
        "largest .096 to .499, mean .025 to .053",
        eigenvalues,
        "sums over 50 pairs; masked pretraining, 10 CPU minutes",
        "recipes/papers/programs/results/spectra",
        "papers/programs/spectra.py RUN --output FOLDER",
    ),
    Claim(
        "Fig. 5",
        "Voting over fresh draws gains accuracy (AGV above 1).",
        "a figure",
        voting,
        "sums over 50 pairs, 10 draws of a model",
        "model_cards/draws",
        "papers/study.py run draws",
    ),
    of_sparsity(
        "Fig. 6",
        "Positive features over a mixture learn slower the more pairs count (90 % against 10 %).",
        "a figure",
        positive_with_sparsity,
        "100 pairs, steps to 90 % right",
    ),
    of_sparsity(
        "Fig. 6",
        "Trigonometric ones do not (here: within 25 %).",
        "a figure",
        trigonometric_with_sparsity,
        "100 pairs, steps to 90 % right",
    ),
]
