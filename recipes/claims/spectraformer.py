"""Spectraformer (Nguyen et al. 2024)."""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Iterable, Sequence

from _lib.printed_pairs import COMPONENTS, MATRICES, PRINTED
from _lib.verdicts import DIRECTION, FAILS, HOLDS, Claim, Measured, NotMeasuredError, Store, all_of, gain, ratio

TITLE = "Spectraformer"
TASKS = ("listops", "text")
BEST, BEFORE = "posrf_mm", "saderf_orf"


def _bench(store: Store) -> dict[str, dict[str, float]]:
    return {row["pair"]: row for row in store.figures("benchmarks/results/attention")["pairs"]}


def time_of_best(store: Store) -> Measured:
    """Side by side in one process."""
    rows = _bench(store)
    best, before = (rows[name.replace("_", "-")]["seconds_per_step"] for name in (BEST, BEFORE))
    return ratio(100 * (1 - best / before), 19.0, "time")


def memory_of_best(store: Store) -> Measured:
    """Side by side in one process."""
    rows = _bench(store)
    best, before = (rows[name.replace("_", "-")]["peak_MiB"] for name in (BEST, BEFORE))
    return ratio(100 * (1 - best / before), 20.2, "memory")


def on_pages(store: Store, task: str, pages: Sequence[str], first: str, second: str, printed: float) -> Measured:
    """By how many points a method is more accurate than another, on each page that has both.

    Args:
        store: of the reports.
        task: on all pages.
        pages: "spectraformer" for the short runs, "lra" for the longer ones.
        first: method.
        second: the other.
        printed: the paper's difference.
    """
    parts = []
    for page in pages:
        if {first, second} <= set(store.methods(page, task)):
            found = gain(store.differences(page, task, first, second, "accuracy", 100).values(), printed)
            parts.append(Measured(f"{'longer ' if page == 'lra' else ''}{task} {found.ours}", found.verdict))
    if not parts:
        raise NotMeasuredError(f"model_cards/{' or '.join(pages)}: {first} and {second} on {task}")
    return all_of(*parts)


def accuracy_of_best(store: Store) -> Measured:
    """On every task that both ran, short and long."""
    parts = []
    for task, pages in (("listops", ("spectraformer",)), ("text", ("spectraformer", "lra"))):
        with contextlib.suppress(NotMeasuredError):
            parts.append(on_pages(store, task, pages, BEST, BEFORE, 0.33))
    if not parts:
        raise NotMeasuredError(f"model_cards/spectraformer: {BEST} and {BEFORE}")
    return all_of(*parts)


def _means(store: Store, task: str, part: int) -> dict[str, dict[int, float]]:
    """Component (part 0) or matrix (1) -> seed -> mean accuracy over its pairs, of seeds that all pairs ran."""
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
    """Differences of such means per seed, first minus second, and the printed ones, of tasks that all pairs ran."""
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
        measured = gain(differences, printed)
        ours = f"{first} − {second} (printed {printed:+.1f}) {measured.ours}"
        parts.append(Measured(ours, measured.verdict))
    whole = all_of(*parts)
    return Measured(f"{' and '.join(tasks)}: {whole.ours}", whole.verdict)


def _printed(task: str, part: int, name: str) -> float:
    """The paper's mean accuracy on a task over the pairs that have a component or matrix."""
    return statistics.mean(cell.accuracy for pair, cell in PRINTED[task].items() if pair.split("_", 1)[part] == name)


def components(store: Store) -> Measured:
    """SADERF over OPRF over PosRF, means over matrices and tasks."""
    return _ahead(store, 0, [("saderf", "oprf"), ("oprf", "posrf")])


def hadamard(store: Store) -> Measured:
    """ORF over SORF, means over components and tasks."""
    return _ahead(store, 1, [("orf", "sorf")])


def matched(store: Store) -> Measured:
    """MM over ORF, means over components and tasks."""
    return _ahead(store, 1, [("mm", "orf")])


def cost_of_components(store: Store) -> Measured:
    """Time and memory of OPRF and SADERF beside PosRF, means over the matrices, in one process."""
    rows = _bench(store)

    def mean(component: str, key: str) -> float:
        return statistics.mean(rows[f"{component}-{matrix}"][key] for matrix in MATRICES)

    parts, least = [], [(3.17 / 2.71, 2.08 / 1.76), (3.21 / 2.71, 2.19 / 1.76)]
    for component, printed in zip(("oprf", "saderf"), least, strict=True):
        found = [mean(component, key) / mean("posrf", key) for key in ("seconds_per_step", "peak_MiB")]
        whole = all(one >= other for one, other in zip(found, printed, strict=True))
        verdict = HOLDS if whole else DIRECTION if min(found) > 1 else FAILS
        parts.append(Measured(f"{component} {found[0]:.2f} × the time, {found[1]:.2f} × the memory", verdict))
    return all_of(*parts)


def learned_fastfood(store: Store) -> Measured:
    """Mean over components of seconds and memory beside those of ORF."""
    rows = _bench(store)
    pairs = [(rows[f"{c}-fastfood_learned"], rows[f"{c}-orf"]) for c in COMPONENTS]
    time = statistics.mean(one["seconds_per_step"] / other["seconds_per_step"] for one, other in pairs)
    memory = statistics.mean(one["peak_MiB"] / other["peak_MiB"] for one, other in pairs)
    ours = f"{time:.2f} × the time, {memory:.2f} × the memory of ORF"
    return Measured(ours, HOLDS if time >= 1.78 and memory < 1 else DIRECTION if time > 1 and memory < 1 else FAILS)


def beside_softmax(store: Store) -> Measured:
    """Time and memory of the best pair beside exact attention, in one process."""
    row = _bench(store)["posrf-mm"]
    ours = f"{row['time_of_softmax']:.2f} × the time, {row['memory_of_softmax']:.2f} × the memory of softmax"
    cheap = (row["time_of_softmax"] < 1, row["memory_of_softmax"] < 1)
    return Measured(ours, HOLDS if all(cheap) else DIRECTION if any(cheap) else FAILS)


def estimates(store: Store) -> Measured:
    """Divergence from softmax of the best drawn pair with 128 features, of uniform weights and of a fitted map."""
    rows = store.figures("experiments/results/attention_estimates")["rows"]
    drawn = [row for row in rows if row["features"] == 128 and row["kl"] is not None and "centroids" not in row["map"]]
    best, level = min(drawn, key=lambda row: row["kl"]), next(row for row in rows if row["map"] == "uniform")
    fitted = next(row for row in rows if row["map"] == "centroids" and row["features"] == 64)
    worse = sum(row["kl"] > level["kl"] for row in drawn)
    ours = (
        f"uniform {level['kl']:.2f} nats; {worse} of {len(drawn)} drawn maps are worse, the best is {best['map']} "
        f"{best['kl']:.2f}; 64 fitted centroids {fitted['kl']:.2f}"
    )
    return Measured(ours, HOLDS if worse == 0 else FAILS if worse == len(drawn) else DIRECTION)


LRA, BENCH = "sweep_pairs.py --data DATA", "benchmarks/attention.py"
EXPRESSIONS = "expressions of 50 to 250 tokens, half a CPU minute a run"
REVIEWS = "reviews of up to 1,000 characters, six CPU minutes a run"
LONGER = "longer: up to 2,000, 15 minutes"
BENCHED = "recipes/benchmarks/results/attention"
CLAIMS = [
    Claim(
        "Table 2, 4.2",
        "PosRF-MM takes 19.0 % less time than SADERF-ORF (printed the other way round, ERRATA B15).",
        "2.35 against 2.90 hours",
        time_of_best,
        "training step of a batch, one process",
        BENCHED,
        BENCH,
    ),
    Claim(
        "Table 2, 4.2",
        "PosRF-MM takes 20.2 % less memory than SADERF-ORF.",
        "1.86 against 2.33 GB",
        memory_of_best,
        "training step of a batch, one process",
        BENCHED,
        BENCH,
    ),
    Claim(
        "Table 2",
        "PosRF-MM is at least as accurate as SADERF-ORF.",
        "60.19 against 59.86",
        accuracy_of_best,
        f"{EXPRESSIONS}; {REVIEWS}; {LONGER}",
        "model_cards/spectraformer",
        LRA,
    ),
    Claim(
        "4.2",
        "SADERF is more accurate than OPRF, and OPRF than PosRF, means over the matrices.",
        "58.82, 58.53, 57.50",
        components,
        f"{EXPRESSIONS}; {REVIEWS}",
        "model_cards/spectraformer",
        LRA,
    ),
    Claim(
        "4.2",
        "OPRF and SADERF take longer and need more memory than PosRF, means over the matrices.",
        "3.17 and 3.21 against 2.71 hours, 2.08 (ERRATA B16) and 2.19 against 1.76 GB",
        cost_of_components,
        "training step of a batch, one process",
        BENCHED,
        BENCH,
    ),
    Claim(
        "4.2",
        "SORF is the least accurate matrix: ORF is ahead of it, mean over the components.",
        "59.64 against 55.43",
        hadamard,
        f"{EXPRESSIONS}; {REVIEWS}",
        "model_cards/spectraformer",
        LRA,
    ),
    Claim(
        "Table 2",
        "MM is the most accurate matrix (the text has SGQ, ERRATA B14): ahead of ORF, mean over the components.",
        "59.93 against 59.65",
        matched,
        f"{EXPRESSIONS}; {REVIEWS}",
        "model_cards/spectraformer",
        LRA,
    ),
    Claim(
        "4.2",
        "Learned Fastfood takes most time and least memory of the matrices.",
        "4.78 against 2.69 hours, 1.73 against 2.13 GB",
        learned_fastfood,
        "training step of a batch, one process",
        BENCHED,
        BENCH,
    ),
    Claim(
        "Table 3",
        "PosRF-MM needs much less time and memory than exact attention.",
        "a figure",
        beside_softmax,
        "training step of a batch, one process",
        BENCHED,
        BENCH,
    ),
    Claim(
        "3",
        "Random features estimate the softmax attention of a trained model (better than uniform weights do).",
        "not measured there",
        estimates,
        "MiniLM-L6 on SST-2, 128 features",
        "recipes/experiments/results/attention_estimates",
        "experiments/attention_estimates.py --model MODEL --data DATA/glue",
    ),
]
