"""Spectraformer (Nguyen et al. 2024)."""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Callable, Iterable, Sequence
from functools import partial

from papers.lib.printed_pairs import COMPONENTS, MATRICES, PRINTED
from papers.lib.verdicts import DIRECTION, FAILS, HOLDS, Claim, Measured, NotMeasuredError, Store, all_of, gain, ratio

TITLE = "Spectraformer"
TASKS = ("listops", "text")
BEST, BEFORE = "posrf_mm", "saderf_orf"
PAGES = {"spectraformer": "", "lra": "longer ", "spectraformer_gpu": "GPU "}  # page -> prefix of its figures


Rows = dict[str, dict[str, float]]


def side_by_side(measure: Callable[[Rows], Measured]) -> Callable[[Store], Measured]:
    """Build the measurement of a claim about the benchmark's rows: on a CPU, and on a GPU if stored.

    Args:
        measure: judges pair -> row of section `pairs` of benchmarks/attention.py.
    """

    def on_both(store: Store) -> Measured:
        benches = {"": store.figures("benchmarks/results/attention")["pairs"]}
        with contextlib.suppress(NotMeasuredError):
            card, figures = store.on_gpu("pairs")
            benches[f"{card}: "] = figures["pairs"]
        found = [(where, measure({row["pair"]: row for row in rows})) for where, rows in benches.items()]
        return all_of(*(Measured(f"{where}{each.ours}", each.verdict) for where, each in found))

    return on_both


def _less(key: str, rows: Rows) -> float:
    """Return the percentage that the best pair saves over the previous best."""
    best, before = (rows[name.replace("_", "-")][key] for name in (BEST, BEFORE))
    return 100 * (1 - best / before)


@side_by_side
def time_of_best(rows: Rows) -> Measured:
    """Compare the time of a step."""
    return ratio(_less("seconds_per_step", rows), 19.0, "time")


@side_by_side
def memory_of_best(rows: Rows) -> Measured:
    """Compare the memory of a step."""
    return ratio(_less("peak_MiB", rows), 20.2, "memory")


def on_pages(store: Store, task: str, pages: Sequence[str], first: str, second: str, printed: float) -> Measured:
    """Compare the accuracies of two methods in points, on each page that has both."""
    parts = []
    for page in pages:
        if {first, second} <= set(store.methods(page, task)):
            found = gain(store.differences(page, task, first, second, "accuracy", 100).values(), printed)
            parts.append(found.of(f"{PAGES[page]}{task}"))
    return all_of(*parts, where=f"model_cards/{' or '.join(pages)}: {first} and {second} on {task}")


def accuracy_of_best(store: Store) -> Measured:
    """Compare accuracies on every task that both pairs ran, short and long."""
    parts = []
    for task, pages in (("listops", ("spectraformer",)), ("text", tuple(PAGES))):
        with contextlib.suppress(NotMeasuredError):
            parts.append(on_pages(store, task, pages, BEST, BEFORE, 0.33))
    return all_of(*parts, where=f"model_cards/spectraformer: {BEST} and {BEFORE}")


def _means(store: Store, task: str, part: int) -> dict[str, dict[int, float]]:
    """Return component (part 0) or matrix (1) -> seed -> mean accuracy over its pairs, for seeds of all pairs."""
    pairs = PRINTED[task]
    runs = {name: store.values("spectraformer", task, name, "accuracy", 100) for name in pairs}
    whole = set.intersection(*(set(seeds) for seeds in runs.values()))
    own: dict[str, list[str]] = {}
    for name in pairs:
        own.setdefault(name.split("_", 1)[part], []).append(name)
    return {
        each: {seed: statistics.mean(runs[name][seed] for name in names) for seed in whole}
        for each, names in own.items()
    }


def _ahead(store: Store, part: int, orders: Iterable[tuple[str, str]]) -> Measured:
    """Compare these means per seed, first minus second, with the printed ones, on tasks that all pairs ran."""
    tasks = [task for task in TASKS if set(PRINTED[task]) <= set(store.methods("spectraformer", task))]
    if not tasks:
        raise NotMeasuredError("model_cards/spectraformer: all pairs")
    by_task = [_means(store, task, part) for task in tasks]
    parts = []
    for first, second in orders:
        seeds = sorted(set.intersection(*(set(found[first]) for found in by_task)))
        if not seeds:
            raise NotMeasuredError("model_cards/spectraformer: no seed of all pairs")
        differences = [statistics.mean(found[first][s] - found[second][s] for found in by_task) for s in seeds]
        printed = statistics.mean(_printed(task, part, first) - _printed(task, part, second) for task in tasks)
        parts.append(gain(differences, printed).of(f"{first} − {second} (printed {printed:+.1f})"))
    return all_of(*parts).of(f"{' and '.join(tasks)}:")


def _printed(task: str, part: int, name: str) -> float:
    """Return the paper's mean accuracy on a task over the pairs that have a component or matrix."""
    return statistics.mean(cell.accuracy for pair, cell in PRINTED[task].items() if pair.split("_", 1)[part] == name)


def components(store: Store) -> Measured:
    """Compare SADERF with OPRF and OPRF with PosRF, means over matrices and tasks."""
    return _ahead(store, 0, [("saderf", "oprf"), ("oprf", "posrf")])


def hadamard(store: Store) -> Measured:
    """Compare ORF with SORF, means over components and tasks."""
    return _ahead(store, 1, [("orf", "sorf")])


def matched(store: Store) -> Measured:
    """Compare MM with ORF, means over components and tasks."""
    return _ahead(store, 1, [("mm", "orf")])


@side_by_side
def cost_of_components(rows: Rows) -> Measured:
    """Compare time and memory of OPRF and SADERF with PosRF, means over the matrices."""

    def mean(component: str, key: str) -> float:
        return statistics.mean(rows[f"{component}-{matrix}"][key] for matrix in MATRICES)

    parts, least = [], [(3.17 / 2.71, 2.08 / 1.76), (3.21 / 2.71, 2.19 / 1.76)]
    for component, printed in zip(("oprf", "saderf"), least, strict=True):
        found = [mean(component, key) / mean("posrf", key) for key in ("seconds_per_step", "peak_MiB")]
        whole = all(one >= other for one, other in zip(found, printed, strict=True))
        verdict = HOLDS if whole else DIRECTION if min(found) > 1 else FAILS
        parts.append(Measured(f"{component} {found[0]:.2f} × the time, {found[1]:.2f} × the memory", verdict))
    return all_of(*parts)


@side_by_side
def learned_fastfood(rows: Rows) -> Measured:
    """Compare seconds and memory with those of ORF, mean over components."""
    pairs = [(rows[f"{c}-fastfood_learned"], rows[f"{c}-orf"]) for c in COMPONENTS]
    time = statistics.mean(one["seconds_per_step"] / other["seconds_per_step"] for one, other in pairs)
    memory = statistics.mean(one["peak_MiB"] / other["peak_MiB"] for one, other in pairs)
    ours = f"{time:.2f} × the time, {memory:.2f} × the memory of ORF"
    return Measured(ours, HOLDS if time >= 1.78 and memory < 1 else DIRECTION if time > 1 and memory < 1 else FAILS)


@side_by_side
def beside_softmax(rows: Rows) -> Measured:
    """Compare time and memory of the best pair with exact attention, fused and with its weights formed."""
    row, parts, cheap = rows["posrf-mm"], [], []
    for name, what in (("softmax", "fused softmax"), (FORMED, "softmax whose weights are formed")):
        if name in rows:
            time, memory = (row[f"{key}_of_softmax"] / rows[name][f"{key}_of_softmax"] for key in ("time", "memory"))
            parts.append(f"{time:.2f} × the time, {memory:.2f} × the memory of {what}")
            cheap += [time < 1, memory < 1]
    return Measured(", ".join(parts), HOLDS if all(cheap) else DIRECTION if any(cheap) else FAILS)


def estimates(store: Store) -> Measured:
    """Compare the divergence from softmax of the best drawn pair of 128 features, uniform weights and a fitted map."""
    rows = store.figures("papers/programs/results/attention_estimates")["rows"]
    drawn = [row for row in rows if row["features"] == 128 and row["kl"] is not None and "centroids" not in row["map"]]
    best, level = min(drawn, key=lambda row: row["kl"]), next(row for row in rows if row["map"] == "uniform")
    fitted = next(row for row in rows if row["map"] == "centroids" and row["features"] == 64)
    worse = sum(row["kl"] > level["kl"] for row in drawn)
    ours = (
        f"uniform {level['kl']:.2f} nats; {worse} of {len(drawn)} drawn maps are worse, the best is {best['map']} "
        f"{best['kl']:.2f}; 64 fitted centroids {fitted['kl']:.2f}"
    )
    return Measured(ours, HOLDS if worse == 0 else FAILS if worse == len(drawn) else DIRECTION)


FORMED = "softmax, weights formed"  # a name in benchmarks/attention.py
STEP = "training step of two texts of 4,000 characters; on the GPU 32"
EXPRESSIONS = "expressions of 50 to 250 tokens, half a CPU minute a run"
REVIEWS = "reviews of up to 1,000 characters, six CPU minutes a run"
LONGER = "longer: up to 2,000, 15 minutes"
ON_GPU = "GPU: three minutes, about 3,300 steps, 16 runs at a time"
benched = partial(
    Claim, page="recipes/benchmarks/results", command="benchmarks/attention.py --sections pairs; gpu.py --steps pairs"
)
of_pairs = partial(Claim, page="model_cards/spectraformer", command="papers/study.py run spectraformer --data DATA")
CLAIMS = [
    benched(
        "Table 2, 4.2",
        "PosRF-MM takes 19.0 % less time than SADERF-ORF (printed the other way round, ERRATA B15).",
        "2.35 against 2.90 hours",
        time_of_best,
        STEP,
    ),
    benched(
        "Table 2, 4.2",
        "PosRF-MM takes 20.2 % less memory than SADERF-ORF.",
        "1.86 against 2.33 GB",
        memory_of_best,
        STEP,
    ),
    of_pairs(
        "Table 2",
        "PosRF-MM is at least as accurate as SADERF-ORF.",
        "60.19 against 59.86",
        accuracy_of_best,
        f"{EXPRESSIONS}; {REVIEWS}; {LONGER}; {ON_GPU}",
    ),
    of_pairs(
        "4.2",
        "SADERF is more accurate than OPRF, and OPRF than PosRF, means over the matrices.",
        "58.82, 58.53, 57.50",
        components,
        f"{EXPRESSIONS}; {REVIEWS}",
    ),
    benched(
        "4.2",
        "OPRF and SADERF take longer and need more memory than PosRF, means over the matrices.",
        "3.17 and 3.21 against 2.71 hours, 2.08 (ERRATA B16) and 2.19 against 1.76 GB",
        cost_of_components,
        STEP,
    ),
    of_pairs(
        "4.2",
        "SORF is the least accurate matrix: ORF is ahead of it, mean over the components.",
        "59.64 against 55.43",
        hadamard,
        f"{EXPRESSIONS}; {REVIEWS}",
    ),
    of_pairs(
        "Table 2",
        "MM is the most accurate matrix (the text has SGQ, ERRATA B14): ahead of ORF, mean over the components.",
        "59.93 against 59.65",
        matched,
        f"{EXPRESSIONS}; {REVIEWS}",
    ),
    benched(
        "4.2",
        "Learned Fastfood takes most time and least memory of the matrices.",
        "4.78 against 2.69 hours, 1.73 against 2.13 GB",
        learned_fastfood,
        STEP,
    ),
    benched(
        "Table 3",
        "PosRF-MM needs much less time and memory than exact attention.",
        "a figure",
        beside_softmax,
        STEP,
    ),
    Claim(
        "3",
        "Random features estimate the softmax attention of a trained model (better than uniform weights do).",
        "not measured there",
        estimates,
        "MiniLM-L6 on SST-2, 128 features",
        "recipes/papers/programs/results/attention_estimates",
        "papers/programs/attention_estimates.py --model MODEL --data DATA/glue",
    ),
]
