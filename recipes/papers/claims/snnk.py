"""Scalable Neural Network Kernels (Sehanobish et al., ICLR 2024)."""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Callable
from functools import partial

from papers.lib.verdicts import (
    DIRECTION,
    FAILS,
    HOLDS,
    UNDECIDED,
    UNTESTED,
    Claim,
    Measured,
    NotMeasuredError,
    Store,
    all_of,
    as_good,
    gain,
    in_words,
)
from papers.pages.uptraining import CONSTANT

TITLE = "Scalable Neural Network Kernels"
Rows = list[tuple[str, str, str, str]]
GLUE = ("rte", "mrpc", "stsb", "cola", "sst2")


def pointwise(store: Store) -> Measured:
    """Compare errors with the root law in the number of projections; the printed deviations are a different kind."""
    rows = [row for row in store.figures("papers/programs/results/pointwise")["rows"] if "urf" in row["layer"]]
    few, many = rows[0], rows[-1]
    factor = (many["projections"] / few["projections"]) ** 0.5
    ours = (
        f"{few['error']:.2f} with {few['projections']}, {many['error']:.3f} with {many['projections']} projections: "
        f"1/{few['error'] / many['error']:.1f}, by theory 1/{factor:.1f}"
    )
    return Measured(ours, DIRECTION if abs(few["error"] / many["error"] / factor - 1) < 0.25 else FAILS)


def beside(
    store: Store, page: str, rows: Rows, key: str = "score", margin: float = 1.0, unit: str = "points"
) -> Measured:
    """Combine several comparisons under one claim: none may fall behind by more than the margin.

    Args:
        store: the stored reports.
        page: folder below model_cards/.
        rows: description, task, a method, and the method to compare it with.
        key: the figure to compare.
        margin: margin in `unit`.
        unit: unit of the figure; points are percentages.
    """
    factor = 100 if unit == "points" else 1
    parts = (
        as_good(store.differences(page, task, first, second, key, factor).values(), margin, unit).of(words)
        for words, task, first, second in rows
    )
    return all_of(*parts, where=f"model_cards/{page}")


def siren(store: Store) -> Measured:
    """Compare with the dense layer, in decibels."""
    tasks = (("one hidden layer", "siren"), ("second of three", "siren_three"), ("a photograph", "siren_photograph"))
    there = [(words, task, "snnk", "dense") for words, task in tasks if "snnk" in store.methods("snnk", task)]
    return beside(store, "snnk", there, unit="dB")


def beside_low_rank(store: Store) -> Measured:
    """Compare with a low-rank layer, in decibels."""
    return gain(store.differences("snnk", "siren", "snnk", "low_rank", "score").values(), unit="dB")


def two_bodies(store: Store) -> Measured:
    """Measure the unexplained variance of the potential and the errors of four energies, means over seeds."""
    ours, missed = [], {}
    for name in ("snnk", "dense", "low_rank"):  # the last is not in the paper, and has as many parameters as the first
        reports = store.reports("snnk", "two_bodies", name).values()
        missed[name] = statistics.mean(1 - report["score"] for report in reports)
        energy = statistics.mean(report["largest_relative_error_of_an_energy"] for report in reports)
        numbers = next(iter(reports))["trainable_parameters"]
        ours.append(f"{name}: 1 − R² {missed[name]:.1e}, worst energy off by {energy:.2%}, {numbers:,} numbers")
    learnt = missed["snnk"] < 1e-3
    verdict = FAILS if not learnt else HOLDS if missed["snnk"] <= missed["dense"] else DIRECTION
    return Measured("; ".join(ours), verdict)


def mnist(store: Store) -> Measured:
    """Judge whether SNNK is better than, or as good as, the dense network."""
    values = store.differences("snnk", "mnist", "snnk_32", "dense", "score", 100).values()
    better = gain(values)
    if better.verdict == HOLDS:
        return better
    return Measured(in_words(list(values), "points"), DIRECTION if as_good(values, 0.5).verdict == HOLDS else FAILS)


def tables_of_numbers(store: Store) -> Measured:
    """Compare the three-layer networks on the UCI tables."""
    return beside(store, "snnk", [(task, task, "snnk_32", "dense") for task in ("covertype", "higgs")])


def layer_cost(store: Store) -> Measured:
    """Measure the forward pass of one layer over widths."""
    rows = store.figures("benchmarks/results/snnk_layer")["rows"]
    ours = {
        row["width"]: row["speed-up"]
        for row in rows
        if (row["section"], row["pass"], row["layer"]) == ("layer", "forward", "snnk, 32")
    }
    widths = sorted(ours)
    text = ", ".join(f"{ours[width]:.1f} × at {width:,}" for width in widths)
    return Measured(f"{text} (32 features)", HOLDS if min(ours.values()) > 1 else DIRECTION)


def beside_lora(method: str) -> Callable[[Store], Measured]:
    """Compare a method with LoRA: mean difference over tasks, per seed; on a CPU, and on a GPU if stored."""

    def measure(store: Store) -> Measured:
        parts = [as_good(store.mean_differences("glue", GLUE, method, "lora_r8"), 1.0)]
        with contextlib.suppress(NotMeasuredError):
            parts.append(as_good(store.mean_differences("glue_gpu", GLUE, method, "lora_r8"), 1.0).of("GPU"))
        return all_of(*parts)

    return measure


def bottlenecks(store: Store) -> Measured:
    """Compare F1 on MRPC with AdapterHub's adapters."""
    return gain(store.differences("glue", "mrpc", "snnk_relu16", "adapters_seq_bn", "metrics.f1", 100).values(), 6.46)


def poolers(store: Store, better: str, worse: str, least: float) -> Measured:
    """Compare F1 on MRPC of two poolers; not testable while neither clearly beats a constant answer."""
    found = gain(store.differences("uptraining", "mrpc", better, worse, "metrics.f1", 100).values(), least)
    means = [
        statistics.mean(store.values("uptraining", "mrpc", name, "metrics.f1", 100).values())
        for name in (better, worse)
    ]
    if max(abs(mean - CONSTANT["mrpc"]) for mean in means) < 1:
        said = f"; {means[0]:.1f} and {means[1]:.1f}, where the same answer to all scores {CONSTANT['mrpc']:.1f}"
        return Measured(found.ours.removesuffix(UNDECIDED) + said, UNTESTED)
    return found


def pooler(store: Store) -> Measured:
    """Compare cosine features with the dense pooler."""
    return poolers(store, "pooler_cos", "pooler_dense", 0.57)


def tanh_pooler(store: Store) -> Measured:
    """Compare the dense pooler with tanh by brute force."""
    return poolers(store, "pooler_dense", "pooler_tanh", 12.79)


def bundle_numbers(store: Store) -> Measured:
    """Count the parameters of pooler and classifier."""
    rows = {row["what"]: row["numbers"] for row in store.figures("papers/programs/results/parameter_tables")["poolers"]}
    whole, bundled = rows["pooler and classifier"], rows["the same, bundled"]
    return Measured(
        f"{whole:,} and {bundled:,}, 1/{whole / bundled:.0f}", FAILS if abs(whole / 59_000 - 1) > 0.1 else HOLDS
    )


def bert_numbers(store: Store) -> Measured:
    """Count the parameters of BERT-base with six replaced layers."""
    rows = store.figures("papers/programs/results/parameter_tables")["uptraining"]
    (row,) = (row for row in rows if (row["model"], row["k"]) == ("BERT-base", 6))
    training, bundled, size = row["training"] / 1e6, row["bundled"] / 1e6, row["bundled_bytes"] / 1e6
    ours = f"{training:.1f} M in training, {bundled:.1f} M bundled, {size:.0f} MB"
    return Measured(ours, HOLDS if abs(training - 72) < 1 and abs(size - 226.71) < 5 else FAILS)


def products(store: Store) -> Measured:
    """Count the multiply-adds of the same models."""
    rows = store.figures("papers/programs/results/parameter_tables")["uptraining"]
    off = [
        abs(row[f"{when}_macs"] / 1e9 / row["printed"][f"{when}_macs"] - 1)
        for row in rows
        for when in ("training", "bundled")
        if f"{when}_macs" in (row["printed"] or {})
    ]
    return Measured(f"the same within {100 * max(off):.1f} %", HOLDS if max(off) < 0.01 else FAILS)


def uptraining(store: Store) -> Measured:
    """Compare F1 on MRPC with replaced upper FFNs, by the paper's and a fitted initialisation; half of them decides."""
    there = store.methods("uptraining", "mrpc")

    def found(layers: int) -> Measured | None:
        tried = [(start, f"top{layers}_m8_{start}") for start in ("paper", "fitted")]
        rows = [(f"{layers} of 6, {start} start", "mrpc", name, "full") for start, name in tried if name in there]
        return beside(store, "uptraining", rows, "metrics.f1") if rows else None

    half, whole = found(3), found(6)
    if half is None:
        raise NotMeasuredError("model_cards/uptraining/mrpc: 3 of 6 layers")
    return half if whole is None else Measured(f"{half.ours}; and beyond half: {whole.ours}", half.verdict)


def pictures(store: Store) -> Measured:
    """Compare accuracy with LoRA of as many parameters."""
    return beside(store, "vision", [(task, task, "snnk_relu8", "lora_r4") for task in ("cifar10", "digits")])


of_study = partial(Claim, page="model_cards/snnk", command="papers/study.py run snnk --data DATA")
of_glue = partial(Claim, page="model_cards/glue", command="papers/study.py run glue data.dir=DATA/glue")
of_uptraining = partial(
    Claim, page="model_cards/uptraining", command="papers/study.py run uptraining data.dir=DATA/glue"
)
counted = partial(
    Claim, page="recipes/papers/programs/results/parameter_tables", command="papers/programs/parameter_tables.py"
)
CLAIMS = [
    Claim(
        "Fig. 2 (g, h)",
        "Few random features estimate a layer of 2,000 inputs; mean relative error of one draw.",
        "about 10⁻² at 256 projections, deviations 5·10⁻⁸ to 10⁻¹² (ERRATA A11)",
        pointwise,
        "as printed: d = 2,000, 500 draws",
        "recipes/papers/programs/results/pointwise",
        "papers/programs/pointwise.py",
    ),
    of_study(
        "4.2, Fig. 3",
        "64 sine features instead of a hidden layer of SIREN fit a picture as well.",
        "pictures only; “match the performance”",
        siren,
        "128 × 128 pixels, 256 hidden",
    ),
    of_study(
        "not in the paper",
        "Features beat a layer of low rank with as many numbers: pictures.",
        "not compared",
        beside_low_rank,
        "128 × 128 pixels, 256 hidden",
    ),
    of_study(
        "4.2, Fig. 3",
        "32 features instead of the hidden layer of a QPNN learn the two-body potential.",
        "pictures only; “perfectly”, with fewer numbers",
        two_bodies,
        "4,096 points, 128 hidden",
    ),
    of_study(
        "4.2, Fig. 9",
        "32 ReLU features instead of the hidden layer beat the dense network on MNIST.",
        "a bar chart; “outperform”",
        mnist,
        "54,001 images, 10 epochs",
    ),
    of_study(
        "4.5, Fig. 6",
        "SNNK matches or beats the dense network on UCI's tables with a fraction of the numbers.",
        "curves only",
        tables_of_numbers,
        "samples of 11,340 and 6,300 rows; HEPMASS not at hand",
    ),
    Claim(
        "1, 3",
        "A layer takes O(md + ml) time instead of O(ld).",
        "complexity",
        layer_cost,
        "one CPU thread, against linear and GELU",
        "recipes/benchmarks/results/snnk_layer",
        "benchmarks/snnk_layer.py",
    ),
    of_glue(
        "Tables 1, 8",
        "ReLU adapters of 16 features are as good as LoRA with as many numbers (within a point).",
        "−.7 points, mean over RTE, MRPC, SST-2, STS-B, CoLA",
        beside_lora("snnk_relu16"),
        "MiniLM-L6, the same tasks; on a GPU ([glue_gpu](../model_cards/glue_gpu/)) other seeds too",
    ),
    of_glue(
        "not in the paper",
        "Six learned rows and norms behind a fitted head, our default, are as good as LoRA (within a point).",
        "not compared",
        beside_lora("rows6_fitted_head"),
        "MiniLM-L6, the same tasks; on a GPU ([glue_gpu](../model_cards/glue_gpu/)) other seeds too",
    ),
    Claim(
        "Table 1",
        "ReLU adapters of 16 features beat bottleneck adapters on 5 of 8 tasks, among them MRPC.",
        "91.26 against 84.8 F1, with a third of the numbers",
        bottlenecks,
        "MiniLM-L6, MRPC; AdapterHub's seq_bn with 58,442 numbers, ours 74,498",
        "model_cards/glue",
        "papers/peers/adapters_glue.py",
    ),
    of_uptraining(
        "Table 1",
        "A pooler of cosine features beats the dense one, MRPC.",
        "82.07 against 81.5 F1",
        pooler,
        "MiniLM-L6, 2,000 examples",
    ),
    of_uptraining(
        "Table 3",
        "A pooler of tanh features by brute force is much worse, MRPC.",
        "68.71 against 81.5 F1",
        tanh_pooler,
        "MiniLM-L6, 2,000 examples",
    ),
    counted(
        "Table 5",
        "Pooler and classifier have about 59k numbers, their bundle 2k, 1/30.",
        "59k, 2k, 1/30",
        bundle_numbers,
        "BERT-base, counted",
    ),
    counted(
        "Table 6",
        "With six of BERT's FFNs replaced, 72 M numbers are trained and the bundle has 226.71 MB.",
        "72 M, 69 M, 226.71 MB",
        bert_numbers,
        "BERT-base, counted (ERRATA A9)",
    ),
    counted(
        "Table 6",
        "The products of the replaced models.",
        "716 to 484 G (BERT), 563 to 384 G (ViT)",
        products,
        "BERT-base, ViT-base, counted",
    ),
    of_uptraining(
        "Fig. 12",
        "Replacing half of the FFNs hardly costs accuracy (here: within a point).",
        "curves only; “minimal impact”",
        uptraining,
        "MiniLM-L6, MRPC (F1), 2,000 examples",
    ),
    Claim(
        "Table 7",
        "ReLU adapters are as good as LoRA on pictures (within a point).",
        "98.2 (.3 M) against 98.7 (.22 M), CIFAR-10",
        pictures,
        "small ViTs",
        "model_cards/vision",
        "papers/study.py run vision",
    ),
]
